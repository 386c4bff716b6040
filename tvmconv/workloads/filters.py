"""One- and two-dimensional filters: a small mask slid over a signal or an image, with zeros around it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes, epilogue
from tvmconv.workloads.filters_reference import correlate
from tvmconv.workloads.text import by, check_elements, checked_integers, quote

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import te, tirx
    from typing_extensions import Self

CLAMP = "clamp"


class Filter(ABC):
    """What filters of one and two dimensions have in common.

    An image of (height, width, channels) in C order, interleaved, is filtered by a mask of (rows, columns); a signal is
    an image of one row and one channel, and its mask has one row.
    """

    operator: ClassVar[str]
    EXAMPLE: ClassVar[str]
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
    @abstractmethod
    def signal_shape(self) -> tuple[int, ...]:
        """Shape of X and Y."""

    @property
    @abstractmethod
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of K."""

    def __post_init__(self) -> None:
        for own in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if own.name != CLAMP:
                (number,) = checked_integers(own.name, getattr(self, own.name))
                object.__setattr__(self, own.name, number)
        if not isinstance(self.clamp, (bool, np.bool_)):
            raise WorkloadError(f"clamp={quote(self.clamp)}: expected True or False")
        object.__setattr__(self, CLAMP, bool(self.clamp))
        if any(size % 2 == 0 for size in self.mask):
            raise WorkloadError(f"mask {quote(by(self.mask_shape))}: expected odd sizes, so that it has a middle")
        check_elements("the padded X", self.padded_shape)

    @abstractmethod
    def at(self, line: Any, element: Any) -> tuple[Any, ...]:
        """Where an element of a row of the image lies in X and Y; numbers, or expressions of TVM."""

    @abstractmethod
    def tap(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Where a tap of the mask lies in K."""

    @property
    def radius(self) -> tuple[int, int]:
        """Rows and columns of the mask on each side of its middle."""
        rows, columns = self.mask
        return rows // 2, columns // 2

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of X with the ghost cells that the mask reaches: (n + k - 1,) or (H + R - 1, W + S - 1, C)."""
        taps = len(self.mask_shape)  # the axes that the mask slides along; what is behind them are channels
        slid = (n + size - 1 for n, size in zip(self.signal_shape, self.mask_shape, strict=False))
        return *slid, *self.signal_shape[taps:]

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations on each sum before it is stored."""
        return (CLAMP,) if self.clamp else ()

    @property
    def storage(self) -> str:
        """Element type of X, K and Y in memory."""
        return dtypes.DTYPES[self.dtype].storage

    @property
    def tolerance(self) -> float:
        """The largest relative L2 error of a right result."""
        return dtypes.DTYPES[self.dtype].tolerance

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
        """A multiplication and an addition for each tap and output, ghost cells included; the clamp is not counted."""
        return 2 * math.prod(self.signal_shape) * math.prod(self.mask_shape)

    @property
    def min_bytes(self) -> int:
        """Least bytes moved: X read and Y written once, and of the mask the taps that ever meet the signal."""
        taps = (min(taps, 2 * size - 1) for taps, size in zip(self.mask, self.image, strict=False))
        return (2 * math.prod(self.signal_shape) + math.prod(taps)) * np.dtype(self.dtype).itemsize

    @property
    def arithmetic_intensity(self) -> float:
        """`flops` over `min_bytes`, in FLOP per byte."""
        return self.flops / self.min_bytes

    def __str__(self) -> str:
        return self.text

    @property
    @abstractmethod
    def text(self) -> str:
        """Canonical text; `parse` of it gives an equal workload."""

    def inputs(self, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw X and K from the standard normal distribution, C-contiguous float32."""
        rng = np.random.default_rng(seed)
        return rng.standard_normal(self.signal_shape, np.float32), rng.standard_normal(self.mask_shape, np.float32)

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Correlate, and clamp, in float64.

        Args:
            inputs: a signal of shape `signal_shape`, and a mask of shape `mask_shape`.

        Returns:
            The filtered signal, of shape `signal_shape`.
        """
        x, k = inputs
        y = correlate(x.reshape(self.image), k.reshape(self.mask)).reshape(self.signal_shape)
        return epilogue.reference(self.epilogue, y, {})

    def declare(self) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
        """Declare the filter in tensor expressions.

        The stages are, in this order:

        - `padded`: X with its ghost cells, of shape `padded_shape`.
        - `sum`, of Y's shape: the sum of the products of `padded` and K.
        - `Y`: the output, of X's shape, each element the epilogue of one of `sum`.

        Returns:
            The tensors X, K and Y.
        """
        from tvmconv.workloads import filters_te

        return filters_te.declare(self)

    def prim_func(self) -> tirx.PrimFunc:
        """The declaration as an unscheduled TIR function of X, K and Y."""
        from tvm import te

        return te.create_prim_func(list(self.declare()))

    def _spell(self, signal: str, mask: str) -> str:
        return ",".join([f"{self.operator}:{signal}", mask, *([CLAMP] if self.clamp else [])])

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self:
        """Read the workload's text, such as `EXAMPLE`.

        Raises:
            WorkloadError: the text is malformed, or a number is out of range.
        """

    @classmethod
    def _split(cls, text: str) -> tuple[str, str, bool]:
        """The signal and the mask in a text, and whether it ends in the clamp."""
        operator, colon, sizes = text.partition(":")
        pieces = sizes.split(",")
        if operator != cls.operator or not colon or len(pieces) < 2:
            raise WorkloadError(f"{quote(text)}: expected {cls.operator}:SIGNAL,MASK[,{CLAMP}], as in {cls.EXAMPLE}")
        if pieces[2:] not in ([], [CLAMP]):
            raise WorkloadError(
                f"{quote(','.join(pieces[2:]))}: expected nothing or {CLAMP!r} behind the mask, as in {cls.EXAMPLE}"
            )
        return pieces[0], pieces[1], len(pieces) > 2
