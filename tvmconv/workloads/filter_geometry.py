"""The sizes of filters and the quantities that follow from them: shapes, operations and bytes."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np

from tvmconv.errors import WorkloadError
from tvmconv.workloads.base import Workload
from tvmconv.workloads.text import check_elements, join_sizes, quote, validate_integers

CLAMP = "clamp"


class FilterGeometry(Workload):
    """The geometry of a one- or two-dimensional filter.

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
        check_elements("the padded X", self.padded_shape)

    @abstractmethod
    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Return the index in X and Y of an element of a row with `width · channels` elements.

        The arguments are ints or TVM expressions.
        """

    @abstractmethod
    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Return the index in K of a tap of the mask."""

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
