"""The shared memory of an executed kernel, which knows who touched it.

Memory that nobody has written is full of ones in every bit, which is NaN in every floating-point type, so that what is
computed from it shows. What is out of bounds, misaligned or a race is an `ExecutionError`.

Lanes are threads: those of all blocks that are executed together, a multiple of a warp for each block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import CHUNK
from tvmconv.analysis.emulation.errors import RaceError
from tvmconv.analysis.emulation.memory.arrays import Array, Bytes
from tvmconv.analysis.emulation.memory.clocks import SEEN
from tvmconv.analysis.emulation.memory.history import MBARRIER, History
from tvmconv.analysis.emulation.memory.readers import PENDING
from tvmconv.analysis.emulation.threads import Lanes


@dataclass
class _Copies:
    """Asynchronous copies of one instruction that have not landed.

    Attributes:
        lanes: that issued them.
        group: of each lane.
        units: of shared memory that each writes, shape (lanes, units).
        data: what lands there.
    """

    lanes: Lanes
    group: NDArray[np.int64]
    units: NDArray[np.int64]
    data: NDArray[Any]


@dataclass
class Shared(History):
    """The shared memory of all blocks that are executed together, in bytes behind one another, and who touched it when.

    An asynchronous copy is a write at the time at which its thread waits for it; until then nobody may touch where it
    goes. A copy of TMA is a write by its mbarrier, when it lands.

    Attributes:
        checked: whether races are looked for, and values kept.
    """

    checked: ClassVar[bool] = True
    _data: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Nobody has written anything."""
        super().__post_init__()
        self._data = np.full(len(self._written), -1, f"i{self.unit}").view(f"u{self.unit}")
        self._copies: list[_Copies] = []
        self._committed = np.zeros(self.threads.lanes, np.int64)  # groups of asynchronous copies, by lane
        self._from_afar: dict[tuple[int, int], int] = {}  # when a block's memory was last accessed by a lane of another

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, whole_warp: bool = False) -> NDArray[Any]:
        """What lies in units.

        Args:
            units: of shape (accesses, units).
            lanes: that read them.
            whole_warp: whether all lanes of the warp read them, not only the one that is named.
        """
        self._check_read(units, lanes, whole_warp)
        return self._data[units]

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Write to units, each as wide as the memory's unit."""
        self._check_write(units, lanes)
        self._put(units, lanes, data)

    def _put(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        self._data[units] = data
        if not np.array_equal(self._data[units], data):
            raise RaceError(f"race: threads store different values to {self._place(units)} at a time")
        self._writer[units] = lanes[:, None]
        self._written[units] = self.clocks.now

    def copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Start an asynchronous copy."""
        self._check_write(units, lanes)
        self._copies.append(_Copies(lanes, self._committed[lanes], units, data))
        self._written[units] = PENDING
        self._writer[units] = lanes[:, None]

    def commit(self, lanes: Lanes) -> None:
        """Make a group of each lane's copies since its last group."""
        self._committed[lanes] += 1

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Let all groups of each lane land but its last so many."""
        waiting = np.zeros(self.threads.lanes, bool)
        waiting[lanes] = True
        left = []
        for copies in self._copies:
            landed = waiting[copies.lanes] & (copies.group < self._committed[copies.lanes] - pending)
            if landed.any():
                self._put(copies.units[landed], copies.lanes[landed], copies.data[landed])
            if not landed.all():
                kept = ~landed
                left.append(_Copies(copies.lanes[kept], copies.group[kept], copies.units[kept], copies.data[kept]))
        self._copies = left

    # --- the async proxy ---

    def read_async(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], reader: str) -> Bytes:
        """What lies in chunks, of shape (groups, chunks, 16), read by the async proxy for groups of lanes."""
        self._check_proxy(chunks, groups, f"has {reader} read")
        found: Bytes = self._data.view(np.uint8).reshape(-1, CHUNK)[chunks]
        return found

    def write_async(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Begin to write chunks by the async proxy.

        Args:
            chunks: of shape (copies, chunks).
            lanes: that have them written, one for each copy.
            agents: who writes, for each copy.
        """
        self._check_write_async(chunks, lanes)
        self._rows(self._written)[chunks] = PENDING
        self._rows(self._writer)[chunks] = agents[:, None, None]

    def land(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """What the async proxy writes is there."""
        self._data.view(np.uint8).reshape(-1, CHUNK)[chunks] = data
        self._rows(self._written)[chunks] = self.clocks.now

    def reserve(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make units an mbarrier, which nothing else may access."""
        self._check_write(units, lanes)
        self._written[units], self._writer[units] = PENDING, MBARRIER

    def free(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make them memory again, that a lane writes."""
        self._written[units], self._writer[units] = self.clocks.now, lanes[:, None]

    # --- other blocks of the cluster ---

    def from_afar(self, blocks: Lanes, lanes: Lanes) -> None:
        """Note that lanes access the memory of other blocks of the cluster, which must not end before they have."""
        for block, lane in set(zip(blocks.tolist(), lanes.tolist(), strict=True)):
            self._from_afar[block, lane] = self.clocks.now

    def end(self) -> None:
        """Raise RaceError if a block may have ended while others access its memory, or its own copies do."""
        home = np.arange(self.threads.padded)
        for (block, lane), when in self._from_afar.items():
            known = self.clocks.united(block * self.threads.padded + home)[SEEN, self.clocks.column(lane)]
            if block != lane // self.threads.padded and when >= known:
                raise RaceError(
                    f"a block may end, and its shared memory with it, while others of its cluster access it: "
                    f"{self.threads.name(lane)} that of block {self.threads.block_name(block)}"
                )
        if pending := self.readers.pending():
            raise RaceError(
                f"block {self.threads.block_name(pending[1])} may end while a bulk copy still reads its shared memory"
            )


@dataclass(frozen=True)
class Address:
    """Where an access goes.

    Attributes:
        memory: which.
        at: bytes, of each lane.
        name: of the array or buffer.
        blocks: whose shared memory it is, if it may be another block's.
    """

    memory: Array | Shared
    at: NDArray[np.int64]
    name: str
    blocks: Lanes | None = None
