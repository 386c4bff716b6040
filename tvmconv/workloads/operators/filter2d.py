"""Two-dimensional filter: a mask slid over an image of interleaved channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tvmconv.workloads.filters import Filter
from tvmconv.workloads.registry import operator
from tvmconv.workloads.text import join_sizes, parse_integers


@operator
@dataclass(frozen=True)
class Filter2d(Filter):
    """An image Y of an image X filtered by a mask K, the same for every channel.

    Y[i, j, c] is the sum over r, s of X[i + r - R // 2, j + s - S // 2, c] · K[r, s], with zeros outside X; with a
    clamp it is limited to 0 to 1. The mask is not flipped: this is a correlation. Channels are interleaved: the samples
    of a pixel lie side by side.

    Attributes:
        H: height of the image.
        W: width of the image.
        C: channels.
        R: height of the mask, an odd number; it may exceed the image.
        S: width of the mask, likewise.
        clamp: whether the output is limited to 0 to 1.

    Raises:
        WorkloadError: a number is no integer or out of range, or a size of the mask is even.
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
        """Where an element of a row, of `width · channels` elements, lies in X and Y."""
        return row, element // self.C, element % self.C

    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Where a tap of the mask lies in K."""
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
        """Read `filter2d:HxWxC,RxS[,clamp]`; raises `WorkloadError`."""
        signal, mask, clamp = cls._split_text(text)
        H, W, C = parse_integers(signal, (3,), f"the image's HxWxC, as in {cls.EXAMPLE}")
        R, S = parse_integers(mask, (2,), f"the mask's RxS, as in {cls.EXAMPLE}")
        return cls(H, W, C, R, S, clamp)
