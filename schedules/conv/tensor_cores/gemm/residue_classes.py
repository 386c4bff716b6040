"""Residue classes of the pixels of a strided dgrad: the taps that reach a pixel depend on its position modulo stride.

Along an axis, pixel h of dX receives dY[p] K[r] where h + padding = p · stride + r · dilation. Pixels with the same
h mod stride have the same taps, and their elements of dY are neighbours: each residue class is a convolution of dY of
stride 1 with some of the taps. (Source: CUTLASS, `StridedDgradImplicitGemmProblemVisitor`.)

Classes are numbered such that the number of a class is its first tap. Classes with more taps then come first. With
g = gcd(stride, dilation), a class has every (stride / g)-th tap, and from one of them to the next p decreases by
dilation / g. Only pixels with h + padding a multiple of g have taps; the others form the last classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ....tir_builder import Expr, logical_and


def divide(number: Expr, divisor: int) -> Expr:
    """Return the quotient of a number that is not negative, rounded down.

    TVM does not know the signs of registers, and its code for `//` also serves negative numbers.
    """
    is_shift = divisor & (divisor - 1) == 0
    return number // divisor if is_shift or isinstance(number, int) else T.truncdiv(number, divisor)


@dataclass(frozen=True)
class ResidueAxis:
    """The residue classes along one spatial axis. Methods accept the number of a class, or an expression of it."""

    pixels: int  # pixels of dX
    taps: int  # taps of the filter
    stride: int  # stride of the forward convolution; the number of classes
    dilation: int  # its dilation
    pad_low: int  # its padding before the first pixel

    @property
    def tap_step(self) -> int:
        """Distance of neighbouring taps of a class; the number of classes with taps."""
        return self.stride // math.gcd(self.stride, self.dilation)

    @property
    def offset_step(self) -> int:
        """Distance of the elements of dY under neighbouring taps of a class."""
        return self.dilation // math.gcd(self.stride, self.dilation)

    @property
    def positions(self) -> int:
        """Pixels of a class; the last of them does not exist in some classes if the stride does not divide pixels."""
        return ceil_div(self.pixels, self.stride)

    @property
    def is_exact(self) -> bool:
        """Whether all classes have the same number of pixels."""
        return self.pixels % self.stride == 0

    @property
    def lower_corner(self) -> int:
        """First element of dY that some tap of the first pixel of some class reads."""
        return min(
            self._first_element(residue) - (self.num_taps(residue) - 1) * self.offset_step
            for residue in self._with_taps
        )

    @property
    def max_offset(self) -> int:
        """Maximum distance of an element of dY from `lower_corner`, for the first pixel of a class."""
        return max(self._first_element(residue) for residue in self._with_taps) - self.lower_corner

    def first_tap(self, residue: Expr) -> Expr:
        """Return the first tap of a class."""
        return residue % self.tap_step if self.tap_step < self.stride else residue

    def num_taps(self, residue: Expr) -> Expr:
        """Return the number of taps of a class."""
        taps = (self.taps + self.tap_step - 1 - self.first_tap(residue)) // self.tap_step
        if self.tap_step == self.stride:
            return taps if self.taps % self.tap_step else self.taps // self.tap_step
        if isinstance(residue, int):
            return taps if residue < self.tap_step else 0
        return T.Select(residue < self.tap_step, taps, 0)

    def first_pixel(self, residue: Expr) -> Expr:
        """Return the first pixel of a class."""
        pixel = self._padded_offset(residue)
        if self.tap_step < self.stride:
            pixel = pixel + residue // self.tap_step
        return pixel % self.stride

    def first_offset(self, residue: Expr) -> Expr:
        """Return the element of dY under the first tap, for the first pixel of a class, counted from `lower_corner`."""
        return self._num_strides - self.lower_corner - self._padded_offset(residue) // self.stride

    def pixel(self, residue: Expr, position: Expr) -> Expr:
        """Return a pixel of a class."""
        return self.first_pixel(residue) + position * self.stride

    @property
    def _with_taps(self) -> range:
        return range(min(self.taps, self.tap_step))

    @property
    def _num_strides(self) -> int:
        """Strides that exceed the padding, so that remainders are those of positive numbers."""
        return ceil_div(self.pad_low, self.stride)

    def _padded_offset(self, residue: Expr) -> Expr:
        return self.first_tap(residue) * self.dilation + (self._num_strides * self.stride - self.pad_low)

    def _first_element(self, residue: int) -> int:
        return self._num_strides - self._padded_offset(residue) // self.stride


@dataclass(frozen=True)
class ResidueClasses:
    """The residue classes along all spatial axes; those of the last axis vary fastest."""

    images: int  # number of images
    axes: tuple[ResidueAxis, ...]  # the classes along each axis

    @classmethod
    def from_workload(cls, w: Conv) -> ResidueClasses:
        """Return the classes of the input's pixels of a forward convolution."""
        sizes = zip(w.input_size, w.kernel, w.stride, w.dilation, w.pad_low, strict=True)
        return cls(w.N, tuple(ResidueAxis(*axis) for axis in sizes))

    @property
    def count(self) -> int:
        """Number of classes."""
        return math.prod(axis.stride for axis in self.axes)

    @property
    def rows(self) -> int:
        """Rows of the product of a class: positions of all images."""
        return self.images * math.prod(axis.positions for axis in self.axes)

    @property
    def max_taps(self) -> int:
        """Taps of the class that has most."""
        return self.num_taps(0)

    @property
    def total_taps(self) -> int:
        """Taps of all classes: each tap of the filter is in one of them."""
        return math.prod(axis.taps for axis in self.axes)

    @property
    def have_equal_taps(self) -> bool:
        """Whether all classes have the same number of taps."""
        return self.max_taps * self.count == self.total_taps

    @property
    def have_taps(self) -> bool:
        """Whether all classes have taps."""
        return self.num_taps(self.count - 1) > 0

    def split(self, residue: Expr) -> list[Expr]:
        """Return the class along each axis."""
        strides = [axis.stride for axis in self.axes]
        last_axes = [math.prod(strides[axis + 1 :]) for axis in range(len(strides))]
        return [
            0 if stride == 1 else residue // size % stride if axis else residue // size
            for axis, (stride, size) in enumerate(zip(strides, last_axes, strict=True))
        ]

    def num_taps(self, residue: Expr) -> Expr:
        """Return the number of taps of a class."""
        return math.prod(axis.num_taps(part) for axis, part in self._axes_of(residue))

    def locate_pixel(self, residue: Expr, row: Expr) -> tuple[Expr, Expr]:
        """Return the pixel of dX, counted over all images, that a row of the product of a class is.

        Returns:
            The pixel, and whether it exists.
        """
        pixel, *positions = self.split_row(row)
        conditions = [row < self.rows]
        for (axis, part), position in zip(self._axes_of(residue), positions, strict=True):
            along_axis = axis.pixel(part, position)
            conditions.append(True if axis.is_exact else along_axis < axis.pixels)
            pixel = pixel * axis.pixels + along_axis
        return pixel, logical_and(*conditions)

    def split_row(self, row: Expr) -> list[Expr]:
        """Return the image of a row of the product of a class, and its position along each axis."""
        positions: list[Expr] = []
        for axis in reversed(self.axes):
            quotient = divide(row, axis.positions)
            positions.append(row - quotient * axis.positions)
            row = quotient
        return [row, *reversed(positions)]

    def _axes_of(self, residue: Expr) -> Iterable[tuple[ResidueAxis, Expr]]:
        return zip(self.axes, self.split(residue), strict=True)
