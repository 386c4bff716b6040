"""What reads shared memory behind the back of its threads: wgmma, and the bulk copies that store.

They read until their threads have waited for them. From then on a thread that has been told by any of these threads may
write there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.gpu import WARPGROUP

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.memory.clocks import Clocks
    from tvmconv.analysis.emulation.threads import Lanes, Threads

PENDING = 1 << 30  # the time of an access that is under way


class Reader(NamedTuple):
    """Who has something read.

    Attributes:
        kind: a warpgroup its operands of wgmma, or a thread what a bulk copy stores.
        number: of the warpgroup, or of the thread, in its block.
    """

    kind: Literal["wgmma", "bulk copy"]
    number: int

    @property
    def threads(self) -> NDArray[np.intp]:
        """Threads of the block any of which can tell others that it has been read."""
        return np.arange(WARPGROUP) + self.number * WARPGROUP if self.kind == "wgmma" else np.array([self.number])


class Readers:
    """Until when chunks of shared memory are read, by whom.

    Args:
        threads: the lanes.
        clocks: what these know of each other.
        chunks: of the shared memory of a block.
    """

    def __init__(self, threads: Threads, clocks: Clocks, chunks: int) -> None:
        self._threads, self._clocks, self._chunks = threads, clocks, chunks
        self._until: dict[Reader, NDArray[np.int32]] = {}

    def begin(self, reader: Reader, chunks: NDArray[np.int64]) -> None:
        """A reader of the blocks that chunks are in begins to read them."""
        if reader not in self._until:
            self._until[reader] = np.zeros(len(self._threads.blocks) * self._chunks, np.int32)
        self._until[reader][chunks] = PENDING

    def end(self, reader: Reader, chunks: NDArray[np.int64]) -> None:
        """It has read them, and its threads know."""
        self._until[reader][chunks] = self._clocks.now

    def pending(self) -> tuple[Reader, int] | None:
        """A bulk copy that nobody has waited for, and the block that it reads."""
        for reader, until in self._until.items():
            if reader.kind == "bulk copy" and (until == PENDING).any():
                return reader, int(np.argmax(until == PENDING)) // self._chunks
        return None

    def violated(self, chunks: NDArray[np.int64], lanes: Lanes) -> tuple[int, int, Reader, bool] | None:
        """Find a chunk that a lane may not write, as it may still be read.

        Args:
            chunks: that each lane writes, of shape (lanes, chunks), those of a lane in one block.
            lanes: that write.

        Returns:
            The lane, the chunk, who reads it, and whether that has not been waited for; None if there is none.
        """
        for reader, times in self._until.items():
            until = times[chunks]
            if not until.any():
                continue
            padded = self._threads.padded
            agents = chunks[:, :1] // self._chunks * padded + reader.threads
            agents = np.minimum(agents, self._threads.lanes - 1)
            known = self._clocks.latest(lanes, agents)[:, None]
            own = (agents == lanes[:, None]).any(axis=1)[:, None]
            bad = (until == PENDING) | (until >= known) & ~own & (until > 0)
            if bad.any():
                row, column = np.argwhere(bad)[0].tolist()
                return int(lanes[row]), int(chunks[row, column]), reader, bool(until[row, column] == PENDING)
        return None
