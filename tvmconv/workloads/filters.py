"""One- and two-dimensional filters: a small mask is slid over a signal or an image, with zeros outside."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import epilogue
from tvmconv.workloads.base import Workload
from tvmconv.workloads.text import MAX_INT32_ELEMENTS, check_elements, join_sizes, quote, validate_integers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te
    from typing_extensions import Self

CLAMP = "clamp"
PIECE_ELEMENTS = 1 << 17  # float64 elements of the reference per work item of a thread, which fit a processor's cache


class Filter(Workload):
    """A one- or two-dimensional filter.

    An interleaved image (height, width, channels) in C order is filtered by a mask (rows, columns). A signal is an
    image of one row and one channel, and its mask has one row.
    """

    argument_names: ClassVar[tuple[str, ...]] = ("X", "K", "Y")
    dtype: ClassVar[str] = "float32"

    clamp: bool

    @property
    @abstractmethod
    def image(self) -> tuple[int, int, int]:
        """Height, width and channels of X and Y."""

    @property
    @abstractmethod
    def mask(self) -> tuple[int, int]:
        """Height and width of the mask."""

    @property
    def signal_shape(self) -> tuple[int, ...]:
        """Shape of X and Y."""
        return self.image

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of K."""
        return self.mask

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if spec.name != CLAMP:
                (number,) = validate_integers(spec.name, getattr(self, spec.name))
                object.__setattr__(self, spec.name, number)
        if not isinstance(self.clamp, (bool, np.bool_)):
            raise WorkloadError(f"clamp={quote(self.clamp)}: expected True or False")
        object.__setattr__(self, CLAMP, bool(self.clamp))
        if any(size % 2 == 0 for size in self.mask):
            raise WorkloadError(
                f"mask {quote(join_sizes(self.mask_shape))}: expected odd sizes, so that the mask has a center"
            )
        check_elements("the padded X", self.padded_shape, MAX_INT32_ELEMENTS)

    @abstractmethod
    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Return the index in X and Y of an element of a row with `width · channels` elements.

        The arguments are ints or TVM expressions.
        """

    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Return the index in K of a tap of the mask, which has only columns if X is a signal.

        Args:
            r: Row of the mask, an int or a TVM expression.
            s: Column of the mask, an int or a TVM expression.

        Examples:
            >>> from tvmconv import Filter1d, Filter2d
            >>> Filter1d(n=64, k=5).mask_index(0, 2), Filter2d(H=8, W=8, C=3, R=5, S=5).mask_index(1, 2)
            ((2,), (1, 2))
        """
        return (s,) if len(self.mask_shape) == 1 else (r, s)

    @property
    def radius(self) -> tuple[int, int]:
        """Number of rows and of columns of the mask on each side of its center."""
        rows, columns = self.mask
        return rows // 2, columns // 2

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of X with the halo that the mask reaches: (n + k - 1,) or (H + R - 1, W + S - 1, C)."""
        num_mask_axes = len(self.mask_shape)  # the mask slides along these axes; the axes after them are channels
        padded_sizes = (n + size - 1 for n, size in zip(self.signal_shape, self.mask_shape, strict=False))
        return *padded_sizes, *self.signal_shape[num_mask_axes:]

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Names of the operations on each sum before it is stored."""
        return (CLAMP,) if self.clamp else ()

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of X, K and Y in memory."""
        return (self.storage,) * len(self.argument_names)

    @property
    def argument_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of X, K and Y."""
        return self.signal_shape, self.mask_shape, self.signal_shape

    @property
    def flops(self) -> int:
        """One multiplication and one addition per tap and output, halo included; the clamp is not counted."""
        return 2 * math.prod(self.signal_shape) * math.prod(self.mask_shape)

    @property
    def min_bytes(self) -> int:
        """Minimum memory traffic in bytes: X, Y and the taps that meet the signal move once each."""
        taps = (min(taps, 2 * size - 1) for taps, size in zip(self.mask, self.image, strict=False))
        return (2 * math.prod(self.signal_shape) + math.prod(taps)) * np.dtype(self.dtype).itemsize

    def inputs(self, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw X and K from the standard normal distribution as C-contiguous float32 arrays.

        Args:
            seed: Seed of the random numbers, not negative.

        Returns:
            X of `signal_shape` and K of `mask_shape`.

        Examples:
            >>> from tvmconv import Filter1d
            >>> [array.shape for array in Filter1d(n=64, k=5).inputs(seed=0)]
            [(64,), (5,)]
        """
        rng = np.random.default_rng(seed)
        return rng.standard_normal(self.signal_shape, np.float32), rng.standard_normal(self.mask_shape, np.float32)

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Correlate X with K, and clamp if the filter does, in float64.

        Args:
            inputs: X of `signal_shape` and K of `mask_shape`, as `inputs` returns them.

        Returns:
            Y in float64, of `signal_shape`.

        Examples:
            >>> import numpy as np
            >>> from tvmconv import Filter1d
            >>> Filter1d(n=4, k=3).reference(np.ones(4), np.ones(3)).tolist()
            [2.0, 3.0, 3.0, 2.0]
        """
        x, k = inputs
        y = _correlate(x.reshape(self.image), k.reshape(self.mask)).reshape(self.signal_shape)
        return epilogue.apply_to_array(self.epilogue, y, {})

    def declare(self) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
        """Declare the filter in tensor expressions.

        The stages are, in this order:

        - `padded`: X with its halo of zeros, of shape `padded_shape`.
        - `sum`: the sum of the products of `padded` and K, of Y's shape.
        - `Y`: the output, of X's shape, with the epilogue applied to each element of `sum`.

        Returns:
            The tensors X, K and Y.

        Examples:
            >>> from tvmconv import Filter1d
            >>> [tensor.op.name for tensor in Filter1d(n=64, k=5).declare()]
            ['X', 'K', 'Y']
        """
        from tvmconv.workloads import filters_te

        return filters_te.declare(self)

    def _format_text(self, signal: str, mask: str) -> str:
        return ",".join([f"{self.operator}:{signal}", mask, *([CLAMP] if self.clamp else [])])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a filter from its text, `filter1d:N,kK[,clamp]` or `filter2d:HxWxC,RxS[,clamp]`.

        Args:
            text: Text of a workload, such as `EXAMPLE`.

        Returns:
            The workload.

        Raises:
            WorkloadError: The text is malformed, or a size is out of range.

        Examples:
            >>> from tvmconv import Filter1d, Filter2d
            >>> Filter1d.parse("filter1d:64,k5").flops, Filter2d.parse("filter2d:8x8x3,5x5").flops
            (640, 9600)
        """
        signal, mask, clamp = cls._split_text(text)
        return cls(*cls._parse_sizes(signal, mask), clamp)  # type: ignore[call-arg]  # subclasses are dataclasses

    @classmethod
    @abstractmethod
    def _parse_sizes(cls, signal: str, mask: str) -> tuple[int, ...]:
        """Return the sizes in the texts of the signal and of the mask, in the order of the fields."""

    @classmethod
    def _split_text(cls, text: str) -> tuple[str, str, bool]:
        """Return the signal and the mask in a text, and whether it ends in the clamp."""
        operator, colon, sizes = text.partition(":")
        pieces = sizes.split(",")
        if operator != cls.operator or not colon or len(pieces) < 2:
            raise WorkloadError(f"{quote(text)}: expected {cls.operator}:SIGNAL,MASK[,{CLAMP}], as in {cls.EXAMPLE}")
        if pieces[2:] not in ([], [CLAMP]):
            raise WorkloadError(
                f"{quote(','.join(pieces[2:]))}: expected nothing or {CLAMP!r} after the mask, as in {cls.EXAMPLE}"
            )
        return pieces[0], pieces[1], len(pieces) > 2


def _correlate(x: NDArray[Any], k: NDArray[Any]) -> NDArray[np.float64]:
    """Slide a mask (rows, columns) over each channel of an image (height, width, channels), with zeros outside. Shifted
    copies of the image are added, piece by piece. Taps that only meet zeros, because they are further from the mask's
    center than the image is long, are left out.
    """
    y = np.empty(x.shape, np.float64)
    middles = [size // 2 for size in k.shape]
    used_taps = tuple(slice(max(middle - n + 1, 0), middle + n) for middle, n in zip(middles, x.shape, strict=False))
    mask = k[used_taps].astype(np.float64)
    with ThreadPoolExecutor() as threads:  # NumPy releases the GIL
        list(threads.map(lambda piece: _correlate_piece(y, piece, x, mask), _split_image(x.shape)))
    return y


def _split_image(image: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield the image's rows and columns in pieces of about `PIECE_ELEMENTS` elements."""
    height, width, channels = image
    columns = max(1, min(width, PIECE_ELEMENTS // channels))
    rows = max(1, PIECE_ELEMENTS // (columns * channels))
    for top, left in product(range(0, height, rows), range(0, width, columns)):
        yield slice(top, min(top + rows, height)), slice(left, min(left + columns, width))


def _correlate_piece(
    y: NDArray[np.float64], piece: tuple[slice, slice], x: NDArray[Any], k: NDArray[np.float64]
) -> None:
    """Compute one piece of `y` from the same piece of `x` and its halo."""
    (rows, row_padding), (columns, column_padding) = (
        _clip_halo(piece_slice, taps // 2, size)
        for piece_slice, taps, size in zip(piece, k.shape, x.shape, strict=False)
    )
    padded = np.pad(x[rows, columns].astype(np.float64), (row_padding, column_padding, (0, 0)))
    out = y[piece]
    height, width, _ = out.shape
    out[:] = 0
    for (r, s), tap in np.ndenumerate(k):
        out += tap * padded[r : r + height, s : s + width]


def _clip_halo(piece_slice: slice, radius: int, size: int) -> tuple[slice, tuple[int, int]]:
    """Return the part of a piece and its halo inside the image, and the number of zeros missing before and after it."""
    first, last = piece_slice.start - radius, piece_slice.stop + radius
    return slice(max(first, 0), min(last, size)), (max(-first, 0), max(last - size, 0))
