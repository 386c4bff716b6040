"""What TMA is told of an array: how it lies in memory, and what part of it one copy takes.

On a GPU that is an opaque structure of 128 bytes, a `CUtensorMap`, which the host encodes when it knows where the array
lies and a kernel takes as a parameter. Here it is plain data. Source: CUDA Driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

ENCODE = "tvmconv.tensor_map"  # what the host side of a lowered function calls to have one encoded
NBYTES, ALIGNMENT = 128, 64  # of the structure
MAX_RANK = 5
MAX_BOX = 256  # elements of a tile along an axis, and channels of an im2col copy
MAX_PIXELS = 1024  # of an im2col copy
MAX_STEP = 8
CORNERS = {3: 1 << 15, 4: 1 << 7, 5: 1 << 4}  # im2col: corners are from minus this to below it, by rank
OFFSETS = {3: 1 << 16, 4: 1 << 8, 5: 1 << 5}  # im2col: an instruction's offsets are below this


@dataclass(frozen=True)
class TensorMap:
    """How an array lies, and what one copy takes of it. Axes are counted from the innermost, whose elements are dense.

    Attributes:
        dtype: of the elements.
        extents: elements along each axis.
        strides: bytes from one element to the next along each axis but the innermost; multiples of 16.
        box: what a copy takes: of a tile the elements along each axis; of im2col the channels, and the pixels.
        steps: every how many elements one is taken, along each axis.
        swizzle: bytes among which chunks of 16 are permuted in shared memory: 0 for none, 32, 64 or 128.
        lower: im2col: where the filter's first tap begins, against the image, along each axis of space.
        upper: im2col: where it begins last, against the image's last pixel.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @property
    def is_im2col(self) -> bool:
        """Whether a copy goes over pixels, from one line and image to the next, and not over a tile."""
        return bool(self.lower)

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TensorMap:
        """What `to_json` wrote."""
        told = json.loads(text)
        return cls(told.pop("dtype"), swizzle=told.pop("swizzle"), **{k: tuple(v) for k, v in told.items()})

    def __str__(self) -> str:
        what = f"im2col, {self.box[1]} pixels of {self.box[0]} channels" if self.is_im2col else f"{self.box} elements"
        return f"tensor map of {'·'.join(map(str, self.extents))} {self.dtype}: {what}"


def tiled(
    dtype: str, itemsize: int, extents: tuple[int, ...], elements: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> TensorMap:
    """A map of tiles.

    Args:
        dtype: of the elements.
        itemsize: bytes of one.
        extents: elements along each axis, the innermost first.
        elements: from one to the next along each axis but the innermost.
        box: of a tile.
        swizzle: see `TensorMap`.
    """
    strides = tuple(stride * itemsize for stride in elements)
    return TensorMap(dtype, extents, strides, box, (1,) * len(extents), swizzle)


def im2col(
    dtype: str,
    itemsize: int,
    extents: tuple[int, ...],
    box: tuple[int, int],
    step: tuple[int, ...],
    lower: tuple[int, ...],
    out: tuple[int, ...],
    swizzle: int,
) -> TensorMap:
    """A map of a dense image with its channels last, of whose pixels a copy takes those under one tap of a filter.

    Args:
        dtype: of the elements.
        itemsize: bytes of one.
        extents: channels, pixels along each axis of space (the innermost first), images.
        box: channels and pixels of a copy.
        step: pixels from one place of the filter to the next, along each axis of space.
        lower: the filter's first place along each axis, 0 for no padding, -1 for a pixel of it.
        out: how many places there are, along each axis.
        swizzle: see `TensorMap`.
    """
    strides = tuple(math.prod(extents[:axis]) * itemsize for axis in range(1, len(extents)))
    space = extents[1:-1]
    upper = tuple(at + (o - 1) * s - (n - 1) for at, o, s, n in zip(lower, out, step, space, strict=True))
    return TensorMap(dtype, extents, strides, box, (1, *step, 1), swizzle, lower, upper)
