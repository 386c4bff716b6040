"""Asynchronous readers of shared memory: wgmma, and bulk copies to global memory.

They read until their threads have waited for them. Afterwards, any thread that synchronizes with one of these threads
may overwrite the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.target import WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.vector_clocks import VectorClocks
    from tvmconv.emulator.threads import EmulatedThreads, Lanes

PENDING_TIME = 1 << 30  # time of an access that has not completed


class AsyncReader(NamedTuple):
    """Agent whose instructions read shared memory asynchronously.

    Attributes:
        kind: "wgmma" for the operands of a warpgroup, or "bulk copy" for the source of a thread's copy.
        index_in_block: Index of the warpgroup or the thread in its block.
    """

    kind: Literal["wgmma", "bulk copy"]
    index_in_block: int

    @property
    def threads(self) -> NDArray[np.intp]:
        """Threads of the block that know the end of the read after a wait."""
        if self.kind == "bulk copy":
            return np.array([self.index_in_block])
        return np.arange(WARPGROUP_SIZE) + self.index_in_block * WARPGROUP_SIZE


class AsyncReaders:
    """End times of the asynchronous reads of each chunk of shared memory, by reader.

    Args:
        threads: Threads that are executed together.
        clocks: Vector clocks of the threads.
        chunks_per_block: Number of 16-byte chunks of shared memory per block.
    """

    def __init__(self, threads: EmulatedThreads, clocks: VectorClocks, chunks_per_block: int) -> None:
        self._threads, self._clocks, self._chunks_per_block = threads, clocks, chunks_per_block
        self._read_end_times: dict[AsyncReader, NDArray[np.int32]] = {}

    def start_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """Record that a reader starts to read chunks, in the blocks that contain them."""
        if reader not in self._read_end_times:
            self._read_end_times[reader] = np.zeros(len(self._threads.block_indices) * self._chunks_per_block, np.int32)
        self._read_end_times[reader][chunks] = PENDING_TIME

    def complete_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """Record that a reader has read chunks, and that its threads know."""
        self._read_end_times[reader][chunks] = self._clocks.time

    def find_pending_bulk_copy(self) -> tuple[AsyncReader, int] | None:
        """Return a bulk copy without a wait and the block that it reads, or None."""
        for reader, end_times in self._read_end_times.items():
            if reader.kind == "bulk copy" and (end_times == PENDING_TIME).any():
                return reader, int(np.argmax(end_times == PENDING_TIME)) // self._chunks_per_block
        return None

    def find_violation(self, chunks: NDArray[np.int64], lanes: Lanes) -> tuple[int, int, AsyncReader, bool] | None:
        """Find a chunk that a lane may not write because it may still be read.

        Args:
            chunks: Chunks that each lane writes, of shape (lanes, chunks); those of a lane are in one block.
            lanes: Writing lanes.

        Returns:
            The lane, the chunk, its reader, and whether the read is pending; None if all writes are legal.
        """
        for reader, reader_times in self._read_end_times.items():
            end_times = reader_times[chunks]
            if not end_times.any():
                continue
            lanes_per_block = self._threads.lanes_per_block
            agents = chunks[:, :1] // self._chunks_per_block * lanes_per_block + reader.threads
            agents = np.minimum(agents, self._threads.num_lanes - 1)
            known_times = self._clocks.read_latest_times(lanes, agents)[:, None]
            is_own = (agents == lanes[:, None]).any(axis=1)[:, None]
            is_violated = (end_times == PENDING_TIME) | (end_times >= known_times) & ~is_own & (end_times > 0)
            if is_violated.any():
                row, column = np.argwhere(is_violated)[0].tolist()
                return int(lanes[row]), int(chunks[row, column]), reader, bool(end_times[row, column] == PENDING_TIME)
        return None
