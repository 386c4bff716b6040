"""Memory that keeps nothing, for who counts what is accessed: races are not looked for, and values do not matter.

What decides where or whether memory is accessed may not depend on what is in memory
(`Machine.evaluate_data_independent`), so who counts needs no values. That a kernel has no races is for tests to tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.memory.arrays import Bytes
from tvmconv.emulator.memory.async_readers import PENDING_TIME, AsyncReader, AsyncReaders
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.memory.vector_clocks import VectorClocks

if TYPE_CHECKING:
    from tvmconv.emulator.threads import Lanes


class _UncheckedClocks(VectorClocks):
    """Everybody knows of everything."""

    def read_times(self, lanes: NDArray[Any], agents: NDArray[Any], proxy: int = 0) -> NDArray[np.int32]:
        """All."""
        return np.full(np.shape(lanes), PENDING_TIME, np.int32)

    def release(self, lanes: Lanes) -> NDArray[np.int32]:
        """Nothing that would have to be told."""
        return self.make_empty_clock()

    def join(self, clock: NDArray[np.int32], other_clock: NDArray[np.int32]) -> NDArray[np.int32]:
        """One of them."""
        return clock

    def acquire(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """They know it."""

    def fence_async_proxy(self, lanes: Lanes) -> None:
        """They are."""

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """They know it."""


class _UncheckedReaders(AsyncReaders):
    """Nobody reads for long."""

    def start_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """It has read them."""

    def complete_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """It has."""


class UncheckedSharedMemory(SharedMemory):
    """Shared memory that is full of zeros, whatever is written."""

    is_checked = False

    def __post_init__(self) -> None:
        """No more than where it ends."""
        super().__post_init__()
        self.clocks = _UncheckedClocks(self.threads)
        self.async_readers = _UncheckedReaders(self.threads, self.clocks, self.nbytes // CHUNK_BYTES)

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, is_whole_warp: bool = False) -> NDArray[Any]:
        """Zeros."""
        return np.zeros(units.shape, f"u{self.unit_bytes}")

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Nothing."""

    def apply_logged_reads(self) -> None:
        """Nothing."""

    def start_copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Nothing."""

    def start_async_write(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Nothing."""

    def complete_copy(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """Nothing."""

    def reserve_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Nothing."""

    def free_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Nothing."""

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """Nothing."""

    def note_remote_access(self, blocks: Lanes, lanes: Lanes) -> None:
        """Nothing."""
