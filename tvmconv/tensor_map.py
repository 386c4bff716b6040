"""Description of an array for TMA copies: its layout in memory, and the box that one copy transfers.

A GPU takes it as a `CUtensorMap`, an opaque structure of 128 bytes that the host encodes once the array's address is
known. This module holds the plain data. Source: CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np

from tvmconv import compat
from tvmconv.errors import CompileError

ENCODE_FUNCTION = "tvmconv.tensor_map"  # packed function that lowered host code calls to encode a map
MAP_BYTES, MAP_ALIGNMENT_BYTES = 128, 64  # size and alignment of CUtensorMap
DTYPES = ("float16", "bfloat16", "float32", "int32", "uint8")
CHUNK_BYTES = 16  # strides and copied rows are multiples of this
MAX_AXES = 5
MAX_EXTENT, MAX_STRIDE = 1 << 32, (1 << 40) - 1
MAX_BOX_ELEMENTS = 256  # box elements along an axis of a tile, or channels of an im2col copy
MAX_PIXELS = 1024  # pixels of an im2col copy
MAX_ELEMENT_STRIDE = 8
SWIZZLES = (0, 32, 64, 128)
CORNER_LIMITS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}  # im2col: corners are in [-limit, limit), by number of axes
OFFSET_LIMITS = {
    3: 1 << 16,
    4: 1 << 8,
    5: 1 << 5,
}  # im2col: offsets of an instruction are below the limit, by number of axes


@dataclass(frozen=True)
class TensorMap:
    """Layout of an array and the box that one copy transfers; axes are listed from the innermost, which is dense."""

    dtype: str  # dtype of the elements
    extents: tuple[int, ...]  # number of elements along each axis
    strides: tuple[int, ...]  # bytes between neighbors along each axis but the innermost; multiples of 16
    box: tuple[int, ...]  # elements of a copy along each axis; for im2col the numbers of channels and of pixels
    element_strides: tuple[int, ...]  # element stride of a copy along each axis, in elements
    # Swizzle span in bytes, within which 16-byte chunks are permuted in shared memory: 0 (none), 32, 64 or 128.
    swizzle: int
    # Lower corner of the im2col bounding box, relative to the image's first pixel, per spatial axis.
    lower_corner: tuple[int, ...] = ()
    # Upper corner of the im2col bounding box, relative to the image's last pixel, per spatial axis.
    upper_corner: tuple[int, ...] = ()

    @property
    def is_im2col(self) -> bool:
        """Whether a copy transfers a run of pixels (im2col mode) instead of a tile."""
        return bool(self.lower_corner)

    @property
    def nbytes(self) -> int:
        """Number of bytes from the first element to the end of the last."""
        outer_bytes = sum((extent - 1) * stride for extent, stride in zip(self.extents[1:], self.strides, strict=True))
        return self.extents[0] * self._itemsize + outer_bytes

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def validate(self) -> None:
        """Raise CompileError if the hardware does not support the map."""
        for problem in self._validate():
            raise CompileError(f"{self}: {problem}")

    def _validate(self) -> Iterator[str]:
        """Yield the faults of the map; only the first is meaningful, because later checks assume earlier ones.

        Source: CUDA Driver API, "cuTensorMapEncodeTiled" and "cuTensorMapEncodeIm2col".
        """
        num_axes = len(self.extents)
        min_axes, lengths = (3, (2, num_axes - 2, num_axes - 2)) if self.is_im2col else (1, (num_axes, 0, 0))
        if self.dtype not in DTYPES:
            yield f"expected elements of {', '.join(DTYPES)}"
        if not min_axes <= num_axes <= MAX_AXES:
            yield f"expected {min_axes} to {MAX_AXES} axes"
        if (len(self.strides), len(self.element_strides)) != (num_axes - 1, num_axes):
            yield f"expected {num_axes - 1} strides and {num_axes} steps"
        if (len(self.box), len(self.lower_corner), len(self.upper_corner)) != lengths:
            yield "expected a box of {} numbers, and corners of {} and {}".format(*lengths)
        if not all(1 <= extent <= MAX_EXTENT for extent in self.extents):
            yield f"expected extents of 1 to {MAX_EXTENT}"
        if not all(0 < stride <= MAX_STRIDE and stride % CHUNK_BYTES == 0 for stride in self.strides):
            yield f"expected strides that are multiples of {CHUNK_BYTES} bytes, below {MAX_STRIDE + 1}: {self.strides}"
        max_box = (MAX_BOX_ELEMENTS, MAX_PIXELS) if self.is_im2col else (MAX_BOX_ELEMENTS,) * num_axes
        if not all(1 <= extent <= limit for extent, limit in zip(self.box, max_box, strict=True)):
            yield f"expected a copy of at most {'·'.join(map(str, max_box))} elements"
        if not all(1 <= element_stride <= MAX_ELEMENT_STRIDE for element_stride in self.element_strides):
            yield f"expected steps of 1 to {MAX_ELEMENT_STRIDE}: {self.element_strides}"
        if self.swizzle not in SWIZZLES:
            yield f"expected one of {', '.join(map(str, SWIZZLES))} bytes to swizzle, not {self.swizzle}"
        row_bytes = self.box[0] * self._itemsize
        if row_bytes % CHUNK_BYTES or row_bytes > (self.swizzle or row_bytes):
            most_bytes = f", at most {self.swizzle}, which are swizzled" if self.swizzle else ""
            yield f"expected rows of a multiple of {CHUNK_BYTES} bytes{most_bytes}: {row_bytes}"
        corner = CORNER_LIMITS.get(num_axes, 0)
        if not all(-corner <= coordinate < corner for coordinate in (*self.lower_corner, *self.upper_corner)):
            yield f"expected corners from {-corner} to {corner - 1}: {self.lower_corner} and {self.upper_corner}"

    def to_json(self) -> str:
        """Return the map as a JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> TensorMap:
        """Parse the result of `to_json`; raises `CompileError` like `from_dict`."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise CompileError(f"expected a tensor map as JSON: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Return the map as a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TensorMap:
        """Parse the result of `to_dict`; raises `CompileError` for other data or an unsupported map."""
        try:
            data = compat.rename_keys(data, compat.TENSOR_MAP_KEYS)
            axes = {name: tuple(map(operator.index, data[name])) for name in _AXIS_FIELDS}
            if not isinstance(data["dtype"], str):
                raise TypeError("the dtype is not a text")
            tensor_map = cls(dtype=data["dtype"], swizzle=operator.index(data["swizzle"]), **axes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(f"expected a tensor map as JSON: {error!r}") from error
        tensor_map.validate()
        return tensor_map

    def __str__(self) -> str:
        prefix = "im2col, " if self.is_im2col else ""
        extents, box = ("·".join(map(str, numbers)) for numbers in (self.extents, self.box))
        return f"the tensor map of {extents} {self.dtype}, {prefix}{box} at a time"


_AXIS_FIELDS = ("extents", "strides", "box", "element_strides", "lower_corner", "upper_corner")


def make_tiled_map(
    dtype: str,
    itemsize: int,
    extents: tuple[int, ...],
    element_offsets: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    """Make a map whose copies transfer tiles.

    Args:
        dtype: Dtype of the elements; those of 8 bits are copied as bytes.
        itemsize: Bytes per element.
        extents: Number of elements along each axis, the innermost first.
        element_offsets: Elements between neighbors along each axis but the innermost.
        box: Elements of a tile along each axis.
        swizzle: Swizzle span in bytes, see `TensorMap`.
    """
    strides = tuple(stride * itemsize for stride in element_offsets)
    dtype = "uint8" if itemsize == 1 else dtype
    return TensorMap(dtype, extents, strides, box, (1,) * len(extents), swizzle)


def make_im2col_map(
    dtype: str,
    itemsize: int,
    extents: tuple[int, ...],
    box: tuple[int, int],
    pixel_stride: tuple[int, ...],
    lower_corner: tuple[int, ...],
    output_size: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    """Make a map of a dense channels-last image whose copies transfer the pixels under one filter tap.

    Args:
        dtype: Dtype of the elements; those of 8 bits are copied as bytes.
        itemsize: Bytes per element.
        extents: Channels, pixels along each spatial axis (the innermost first), and images.
        box: Channels and pixels of a copy.
        pixel_stride: Convolution stride along each spatial axis, in pixels.
        lower_corner: First filter position along each spatial axis: 0 without padding, -1 with a padding of one pixel.
        output_size: Number of filter positions along each spatial axis.
        swizzle: Swizzle span in bytes, see `TensorMap`.
    """
    strides = tuple(math.prod(extents[:axis]) * itemsize for axis in range(1, len(extents)))
    spatial_extents = extents[1:-1]
    upper_corner = tuple(
        lower_coordinate + (o - 1) * s - (n - 1)
        for lower_coordinate, o, s, n in zip(lower_corner, output_size, pixel_stride, spatial_extents, strict=True)
    )
    dtype = "uint8" if itemsize == 1 else dtype
    return TensorMap(dtype, extents, strides, box, (1, *pixel_stride, 1), swizzle, lower_corner, upper_corner)
