"""What reads shared memory behind the back of its threads: wgmma, and the bulk copies that store.

They read until their threads have waited for them. From then on a thread that has been told by any of these threads may
write there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.gpu_specs import WARPGROUP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.vector_clocks import VectorClocks
    from tvmconv.emulator.threads import EmulatedThreads, Lanes

PENDING_TIME = 1 << 30  # the time of an access that is under way


class AsyncReader(NamedTuple):
    """Who has something read.

    Attributes:
        kind: a warpgroup its operands of wgmma, or a thread what a bulk copy stores.
        index_in_block: of the warpgroup, or of the thread, in its block.
    """

    kind: Literal["wgmma", "bulk copy"]
    index_in_block: int

    @property
    def threads(self) -> NDArray[np.intp]:
        """Threads of the block any of which can tell others that it has been read."""
        return (
            np.arange(WARPGROUP_SIZE) + self.index_in_block * WARPGROUP_SIZE
            if self.kind == "wgmma"
            else np.array([self.index_in_block])
        )


class AsyncReaders:
    """Until when chunks of shared memory are read, by whom.

    Args:
        threads: the lanes.
        clocks: what these know of each other.
        chunks_per_block: of the shared memory of a block.
    """

    def __init__(self, threads: EmulatedThreads, clocks: VectorClocks, chunks_per_block: int) -> None:
        self._threads, self._clocks, self._chunks_per_block = threads, clocks, chunks_per_block
        self._read_end_times: dict[AsyncReader, NDArray[np.int32]] = {}

    def start_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """A reader of the blocks that chunks are in begins to read them."""
        if reader not in self._read_end_times:
            self._read_end_times[reader] = np.zeros(len(self._threads.block_indices) * self._chunks_per_block, np.int32)
        self._read_end_times[reader][chunks] = PENDING_TIME

    def complete_read(self, reader: AsyncReader, chunks: NDArray[np.int64]) -> None:
        """It has read them, and its threads know."""
        self._read_end_times[reader][chunks] = self._clocks.time

    def find_pending_bulk_copy(self) -> tuple[AsyncReader, int] | None:
        """A bulk copy that nobody has waited for, and the block that it reads."""
        for reader, end_times in self._read_end_times.items():
            if reader.kind == "bulk copy" and (end_times == PENDING_TIME).any():
                return reader, int(np.argmax(end_times == PENDING_TIME)) // self._chunks_per_block
        return None

    def find_violation(self, chunks: NDArray[np.int64], lanes: Lanes) -> tuple[int, int, AsyncReader, bool] | None:
        """Find a chunk that a lane may not write, as it may still be read.

        Args:
            chunks: that each lane writes, of shape (lanes, chunks), those of a lane in one block.
            lanes: that write.

        Returns:
            The lane, the chunk, who reads it, and whether that has not been waited for; None if there is none.
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
