"""Filters: a mask is slid over a signal, or over an image of interleaved channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tvmconv.errors import WorkloadError
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.registry import operator
from tvmconv.workloads.text import join_sizes, parse_integers, quote


@operator
@dataclass(frozen=True, repr=False)
class Filter1d(Filter):
    """A signal Y that is a signal X filtered by a mask K.

    Y[i] is the sum over j of X[i + j - k // 2] · K[j], with zeros outside X; with a clamp it is limited to 0 to 1. The
    mask is not flipped: this is a correlation.

    Attributes:
        n: Number of samples of the signal.
        k: Number of taps of the mask, odd; it may exceed the signal.
        clamp: Whether the output is limited to 0 to 1.

    Raises:
        WorkloadError: A number is not an integer or out of range, or the mask's size is even.

    Examples:
        >>> from tvmconv import Filter1d
        >>> Filter1d(n=16777216, k=5).text
        'filter1d:16777216,k5'
    """

    operator: ClassVar[str] = "filter1d"
    EXAMPLE: ClassVar[str] = "filter1d:16777216,k5"

    n: int
    k: int
    clamp: bool = False

    @property
    def image(self) -> tuple[int, int, int]:
        """The signal as an image of one row: (1, n, 1)."""
        return 1, self.n, 1

    @property
    def mask(self) -> tuple[int, int]:
        """The mask as a mask of one row: (1, k)."""
        return 1, self.k

    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Return the index in X and Y of an element of the only row.

        Args:
            row: Row of the image, an int or a TVM expression.
            element: Element of the row, an int or a TVM expression.

        Examples:
            >>> from tvmconv import Filter1d
            >>> Filter1d(n=64, k=5).element_index(0, 3)
            (3,)
        """
        return (element,)

    @property
    def signal_shape(self) -> tuple[int]:
        """Shape of X and Y: (n,)."""
        return (self.n,)

    @property
    def mask_shape(self) -> tuple[int]:
        """Shape of K: (k,)."""
        return (self.k,)

    @property
    def text(self) -> str:
        """Canonical text, such as `filter1d:16777216,k5` or `filter1d:16777216,k5,clamp`."""
        return self._format_text(str(self.n), f"k{self.k}")

    @classmethod
    def _parse_sizes(cls, signal: str, mask: str) -> tuple[int, ...]:
        (n,) = parse_integers(signal, (1,), f"the number of samples, as in {cls.EXAMPLE}")
        if not mask.startswith("k"):
            raise WorkloadError(f"{quote(mask)}: expected k and the number of the mask's taps, as in {cls.EXAMPLE}")
        (k,) = parse_integers(mask[1:], (1,), f"a number after the k of the mask, as in {cls.EXAMPLE}")
        return n, k


@operator
@dataclass(frozen=True, repr=False)
class Filter2d(Filter):
    """An image Y that is an image X filtered by a mask K, the same for every channel.

    Y[i, j, c] is the sum over r, s of X[i + r - R // 2, j + s - S // 2, c] · K[r, s], with zeros outside X; with a
    clamp it is limited to 0 to 1. The mask is not flipped: this is a correlation. Channels are interleaved: the samples
    of a pixel are adjacent in memory.

    Attributes:
        H: Height of the image.
        W: Width of the image.
        C: Number of channels.
        R: Height of the mask, odd; it may exceed the image.
        S: Width of the mask, odd; it may exceed the image.
        clamp: Whether the output is limited to 0 to 1.

    Raises:
        WorkloadError: A number is not an integer or out of range, or a size of the mask is even.

    Examples:
        >>> from tvmconv import Filter2d
        >>> Filter2d(H=4096, W=4096, C=3, R=5, S=5, clamp=True).text
        'filter2d:4096x4096x3,5x5,clamp'
    """

    operator: ClassVar[str] = "filter2d"
    EXAMPLE: ClassVar[str] = "filter2d:4096x4096x3,5x5"

    H: int
    W: int
    C: int
    R: int
    S: int
    clamp: bool = False

    @property
    def image(self) -> tuple[int, int, int]:
        """Height, width and channels of X and Y."""
        return self.H, self.W, self.C

    @property
    def mask(self) -> tuple[int, int]:
        """Height and width of the mask."""
        return self.R, self.S

    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Return the index in X and Y of an element of a row with `width · channels` elements.

        Args:
            row: Row of the image, an int or a TVM expression.
            element: Element of the row, an int or a TVM expression.

        Examples:
            >>> from tvmconv import Filter2d
            >>> Filter2d(H=8, W=8, C=3, R=5, S=5).element_index(1, 7)
            (1, 2, 1)
        """
        return row, element // self.C, element % self.C

    @property
    def text(self) -> str:
        """Canonical text, such as `filter2d:4096x4096x3,5x5` or `filter2d:4096x4096x3,5x5,clamp`."""
        return self._format_text(join_sizes(self.image), join_sizes(self.mask))

    @classmethod
    def _parse_sizes(cls, signal: str, mask: str) -> tuple[int, ...]:
        return (
            *parse_integers(signal, (3,), f"the image's HxWxC, as in {cls.EXAMPLE}"),
            *parse_integers(mask, (2,), f"the mask's RxS, as in {cls.EXAMPLE}"),
        )
