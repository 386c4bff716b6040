"""What TMA is told of an array: how it lies in memory, and what part of it one copy takes.

On a GPU that is an opaque structure of 128 bytes, a `CUtensorMap`, which the host encodes when it knows where the array
lies and a kernel takes as a parameter. Here it is plain data. Source: CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes  # noqa: F401  lets NumPy know bfloat16 by its name
import numpy as np

from tvmconv import compat
from tvmconv.errors import CompileError

ENCODE_FUNCTION = "tvmconv.tensor_map"  # what the host side of a lowered function calls to have one encoded
MAP_BYTES, MAP_ALIGNMENT_BYTES = 128, 64  # of the structure
DTYPES = ("float16", "bfloat16", "float32")
CHUNK_BYTES = 16  # bytes: of what TMA copies, and what strides are multiples of
MAX_AXES = 5
MAX_EXTENT, MAX_STRIDE = 1 << 32, (1 << 40) - 1
MAX_BOX_ELEMENTS = 256  # elements of a tile along an axis, and channels of an im2col copy
MAX_PIXELS = 1024  # of an im2col copy
MAX_ELEMENT_STRIDE = 8
SWIZZLES = (0, 32, 64, 128)
CORNER_LIMITS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}  # im2col: corners are from minus this to below it, by rank
OFFSET_LIMITS = {3: 1 << 16, 4: 1 << 8, 5: 1 << 5}  # im2col: an instruction's offsets are below this


@dataclass(frozen=True)
class TensorMap:
    """How an array lies, and what one copy takes of it. Axes are counted from the innermost, whose elements are dense.

    Attributes:
        dtype: of the elements.
        extents: elements along each axis.
        strides: bytes from one element to the next along each axis but the innermost; multiples of 16.
        box: what a copy takes: of a tile the elements along each axis; of im2col the channels, and the pixels.
        element_strides: every how many elements one is taken, along each axis.
        swizzle: bytes among which chunks of 16 are permuted in shared memory: 0 for none, 32, 64 or 128.
        lower_corner: im2col: where the filter's first tap begins, against the image, along each axis of space.
        upper_corner: im2col: where it begins last, against the image's last pixel.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    lower_corner: tuple[int, ...] = ()
    upper_corner: tuple[int, ...] = ()

    @property
    def is_im2col(self) -> bool:
        """Whether a copy goes over pixels, from one line and image to the next, and not over a tile."""
        return bool(self.lower_corner)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        outer_bytes = sum((extent - 1) * stride for extent, stride in zip(self.extents[1:], self.strides, strict=True))
        return self.extents[0] * self._itemsize + outer_bytes

    @property
    def _itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def validate(self) -> None:
        """Raise CompileError for a map that TMA cannot take."""
        for problem in self._validate():
            raise CompileError(f"{self}: {problem}")

    def _validate(self) -> Iterator[str]:
        """What is wrong with it; of no account behind the first, on which others may build.

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
        """As text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> TensorMap:
        """What `to_json` wrote; raises `CompileError` as `from_dict` does."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise CompileError(f"no tensor map: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> TensorMap:
        """Parse what `to_dict` returned; raises `CompileError` for anything else, and as `validate` does."""
        try:
            data = compat.rename_keys(data, compat.TENSOR_MAP_KEYS)
            axes = {name: tuple(map(operator.index, data[name])) for name in _AXIS_FIELDS}
            if not isinstance(data["dtype"], str):
                raise TypeError("the dtype is no text")
            tensor_map = cls(dtype=data["dtype"], swizzle=operator.index(data["swizzle"]), **axes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(f"no tensor map: {error!r}") from error
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
    """A map of tiles.

    Args:
        dtype: of the elements.
        itemsize: bytes of one.
        extents: elements along each axis, the innermost first.
        element_offsets: from one to the next along each axis but the innermost.
        box: of a tile.
        swizzle: see `TensorMap`.
    """
    strides = tuple(stride * itemsize for stride in element_offsets)
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
    """A map of a dense image with its channels last, of whose pixels a copy takes those under one tap of a filter.

    Args:
        dtype: of the elements.
        itemsize: bytes of one.
        extents: channels, pixels along each axis of space (the innermost first), images.
        box: channels and pixels of a copy.
        pixel_stride: pixels from one place of the filter to the next, along each axis of space.
        lower_corner: the filter's first place along each axis, 0 for no padding, -1 for a pixel of it.
        output_size: how many places there are, along each axis.
        swizzle: see `TensorMap`.
    """
    strides = tuple(math.prod(extents[:axis]) * itemsize for axis in range(1, len(extents)))
    spatial_extents = extents[1:-1]
    upper_corner = tuple(
        lower_coordinate + (o - 1) * s - (n - 1)
        for lower_coordinate, o, s, n in zip(lower_corner, output_size, pixel_stride, spatial_extents, strict=True)
    )
    return TensorMap(dtype, extents, strides, box, (1, *pixel_stride, 1), swizzle, lower_corner, upper_corner)
