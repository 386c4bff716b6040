"""Two-dimensional filter: a mask is slid over an image of interleaved channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tvmconv.workloads.filters import Filter
from tvmconv.workloads.registry import operator
from tvmconv.workloads.text import join_sizes, parse_integers


@operator
@dataclass(frozen=True)
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

    Example:
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
        """Return the index in X and Y of an element of a row with `width · channels` elements."""
        return row, element // self.C, element % self.C

    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Return the index in K of a tap of the mask."""
        return r, s

    @property
    def signal_shape(self) -> tuple[int, int, int]:
        """Shape of X and Y: (H, W, C)."""
        return self.image

    @property
    def mask_shape(self) -> tuple[int, int]:
        """Shape of K: (R, S)."""
        return self.mask

    @property
    def text(self) -> str:
        """Canonical text, such as `filter2d:4096x4096x3,5x5` or `filter2d:4096x4096x3,5x5,clamp`."""
        return self._format_text(join_sizes(self.image), join_sizes(self.mask))

    @classmethod
    def parse(cls, text: str) -> Filter2d:
        """Read `filter2d:HxWxC,RxS[,clamp]`; raise WorkloadError if the text is malformed."""
        signal, mask, clamp = cls._split_text(text)
        H, W, C = parse_integers(signal, (3,), f"the image's HxWxC, as in {cls.EXAMPLE}")
        R, S = parse_integers(mask, (2,), f"the mask's RxS, as in {cls.EXAMPLE}")
        return cls(H, W, C, R, S, clamp)
