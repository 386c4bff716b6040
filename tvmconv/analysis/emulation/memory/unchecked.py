"""Memory that keeps nothing, for who counts what is accessed: races are not looked for, and values do not matter.

What decides where or whether memory is accessed may not depend on what is in memory (`Machine.decided`), so who counts
needs no values. That a kernel has no races is for tests to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK
from tvmconv.analysis.emulation.memory.arrays import Bytes
from tvmconv.analysis.emulation.memory.clocks import Clocks
from tvmconv.analysis.emulation.memory.readers import PENDING, Reader, Readers
from tvmconv.analysis.emulation.memory.shared import Shared

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.threads import Lanes


class _Clocks(Clocks):
    """Everybody knows of everything."""

    def of(self, lanes: NDArray[Any], agents: NDArray[Any], which: int = 0) -> NDArray[np.int32]:
        """All."""
        return np.full(np.shape(lanes), PENDING, np.int32)

    def released(self, lanes: Lanes) -> NDArray[np.int32]:
        """Nothing that would have to be told."""
        return self.blank()

    def joined(self, clock: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.int32]:
        """One of them."""
        return clock

    def learn(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """They know it."""

    def fence(self, lanes: Lanes) -> None:
        """They are."""

    def meet(self, groups: NDArray[np.intp]) -> None:
        """They know it."""


class _Readers(Readers):
    """Nobody reads for long."""

    def begin(self, reader: Reader, chunks: NDArray[np.int64]) -> None:
        """It has read them."""

    def end(self, reader: Reader, chunks: NDArray[np.int64]) -> None:
        """It has."""


class Unchecked(Shared):
    """Shared memory that is full of zeros, whatever is written."""

    checked = False

    def __post_init__(self) -> None:
        """No more than where it ends."""
        super().__post_init__()
        self.clocks = _Clocks(self.threads)
        self.readers = _Readers(self.threads, self.clocks, self.nbytes // CHUNK)

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, whole_warp: bool = False) -> NDArray[Any]:
        """Zeros."""
        return np.zeros(units.shape, f"u{self.unit}")

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing."""

    def copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Nothing."""

    def write_async(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Nothing."""

    def land(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """Nothing."""

    def reserve(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Nothing."""

    def free(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Nothing."""

    def meet(self, groups: NDArray[np.intp]) -> None:
        """Nothing."""

    def from_afar(self, blocks: Lanes, lanes: Lanes) -> None:
        """Nothing."""
