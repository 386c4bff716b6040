"""One-dimensional filter: a mask slid over a signal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tvmconv.errors import WorkloadError
from tvmconv.workloads.filters import Filter
from tvmconv.workloads.registry import operator
from tvmconv.workloads.text import parse_integers, quote


@operator
@dataclass(frozen=True)
class Filter1d(Filter):
    """A signal Y of a signal X filtered by a mask K.

    Y[i] is the sum over j of X[i + j - k // 2] · K[j], with zeros outside X; with a clamp it is limited to 0 to 1. The
    mask is not flipped: this is a correlation.

    Attributes:
        n: samples of the signal.
        k: taps of the mask, an odd number; it may exceed the signal.
        clamp: whether the output is limited to 0 to 1.

    Raises:
        WorkloadError: a number is no integer or out of range, or the mask is even.
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
        """The mask as one of one row: (1, k)."""
        return 1, self.k

    def element_index(self, row: Any, element: Any) -> tuple[Any, ...]:
        """Where an element of the only row lies in X and Y."""
        return (element,)

    def mask_index(self, r: Any, s: Any) -> tuple[Any, ...]:
        """Where a tap of the mask's only row lies in K."""
        return (s,)

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
    def parse(cls, text: str) -> Filter1d:
        """Read `filter1d:N,kK[,clamp]`; raises `WorkloadError`."""
        signal, mask, clamp = cls._split_text(text)
        (n,) = parse_integers(signal, (1,), f"the number of samples, as in {cls.EXAMPLE}")
        if not mask.startswith("k"):
            raise WorkloadError(f"{quote(mask)}: expected the mask's taps behind a k, as in {cls.EXAMPLE}")
        (k,) = parse_integers(mask[1:], (1,), f"a number behind the k of the mask, as in {cls.EXAMPLE}")
        return cls(n, k, clamp)
