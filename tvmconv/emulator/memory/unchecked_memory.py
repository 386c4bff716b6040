"""Shared memory without contents or race checks, for observers that only count accesses.

Accesses may not depend on memory contents while an observer is present (`EmulatorState.evaluate_data_independent`), so
no contents are needed. Tests verify that kernels have no races.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.memory.access_history import PENDING_TIME, AsyncReaders
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.memory.vector_clocks import VectorClocks

if TYPE_CHECKING:
    from tvmconv.emulator.threads import Lanes


def _ignore(*arguments: Any, **keywords: Any) -> None:
    """Do nothing."""


class _UncheckedClocks(VectorClocks):
    """Vector clocks that order all accesses."""

    acquire = fence_async_proxy = synchronize_groups = _ignore

    def read_times(self, lanes: NDArray[Any], agents: NDArray[Any], proxy: int = 0) -> NDArray[np.int32]:
        """Return a time after all accesses."""
        return np.full(np.shape(lanes), PENDING_TIME, np.int32)

    def release(self, lanes: Lanes) -> NDArray[np.int32]:
        """Return an empty clock."""
        return self.make_empty_clock()

    def join(self, clock: NDArray[np.int32], other_clock: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return one of the clocks."""
        return clock


class _UncheckedReaders(AsyncReaders):
    """Asynchronous readers that record no reads."""

    mark_read = _ignore


class UncheckedSharedMemory(SharedMemory):
    """Shared memory that reads as zeros and ignores writes."""

    is_checked = False
    write = start_copy = start_async_write = complete_copy = _ignore
    apply_logged_reads = synchronize_groups = note_remote_access = reserve_mbarrier = free_mbarrier = _ignore

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clocks = _UncheckedClocks(self.threads)
        self.async_readers = _UncheckedReaders(self.threads, self.clocks, self.nbytes // CHUNK_BYTES)

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, is_whole_warp: bool = False) -> NDArray[Any]:
        """Return zeros."""
        return np.zeros(units.shape, f"u{self.unit_bytes}")
