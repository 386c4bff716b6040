"""The sizes of filters, and what follows from them: shapes, operations, bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes
from tvmconv.workloads.text import check_elements, join_sizes, quote, validate_integers

CLAMP = "clamp"


class FilterGeometry(ABC):
    """The sizes of a filter of one or two dimensions, and what follows from them.

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
        for spec in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if spec.name != CLAMP:
                (number,) = validate_integers(spec.name, getattr(self, spec.name))
                object.__setattr__(self, spec.name, number)
        if not isinstance(self.clamp, (bool, np.bool_)):
            raise WorkloadError(f"clamp={quote(self.clamp)}: expected True or False")
        object.__setattr__(self, CLAMP, bool(self.clamp))
        if any(size % 2 == 0 for size in self.mask):
            raise WorkloadError(
                f"mask {quote(join_sizes(self.mask_shape))}: expected odd sizes, so that it has a middle"
            )
        check_elements("the padded X", self.padded_shape)

    @abstractmethod
    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Where an element of a row of the image lies in X and Y; numbers, or expressions of TVM."""

    @abstractmethod
    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Where a tap of the mask lies in K."""

    @property
    def radius(self) -> tuple[int, int]:
        """Rows and columns of the mask on each side of its middle."""
        rows, columns = self.mask
        return rows // 2, columns // 2

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of X with the ghost cells that the mask reaches: (n + k - 1,) or (H + R - 1, W + S - 1, C)."""
        num_mask_axes = len(self.mask_shape)  # the axes that the mask slides along; what is behind them are channels
        padded_sizes = (n + size - 1 for n, size in zip(self.signal_shape, self.mask_shape, strict=False))
        return *padded_sizes, *self.signal_shape[num_mask_axes:]

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
