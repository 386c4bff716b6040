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

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import RaceError
from tvmconv.emulator.memory.access_history import MBARRIER_WRITER, SharedMemoryHistory
from tvmconv.emulator.memory.arrays import Bytes, GlobalArray
from tvmconv.emulator.memory.async_readers import PENDING_TIME
from tvmconv.emulator.memory.vector_clocks import GENERIC_PROXY
from tvmconv.emulator.threads import Lanes


@dataclass
class _PendingCopies:
    """Asynchronous copies of one instruction that have not landed.

    Attributes:
        lanes: that issued them.
        group_indices: of each lane.
        unit_indices: of shared memory that each writes, shape (lanes, units).
        data: what lands there.
    """

    lanes: Lanes
    group_indices: NDArray[np.int64]
    unit_indices: NDArray[np.int64]
    data: NDArray[Any]


@dataclass
class SharedMemory(SharedMemoryHistory):
    """The shared memory of all blocks that are executed together, in bytes behind one another, and who touched it when.

    An asynchronous copy is a write at the time at which its thread waits for it; until then nobody may touch where it
    goes. A copy of TMA is a write by its mbarrier, when it lands.

    Attributes:
        is_checked: whether races are looked for, and values kept.
    """

    is_checked: ClassVar[bool] = True
    _data: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Nobody has written anything."""
        super().__post_init__()
        self._data = np.full(len(self._write_times), -1, f"i{self.unit_bytes}").view(f"u{self.unit_bytes}")
        self._pending_copies: list[_PendingCopies] = []
        self._num_committed_groups = np.zeros(
            self.threads.num_lanes, np.int64
        )  # groups of asynchronous copies, by lane
        self._remote_accesses: dict[
            tuple[int, int], int
        ] = {}  # when a block's memory was last accessed by a lane of another

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, is_whole_warp: bool = False) -> NDArray[Any]:
        """What lies in units.

        Args:
            units: of shape (accesses, units).
            lanes: that read them.
            is_whole_warp: whether all lanes of the warp read them, not only the one that is named.
        """
        self._check_read(units, lanes, is_whole_warp)
        return self._data[units]

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Write to units, each as wide as the memory's unit."""
        self._check_write(units, lanes)
        self._store_units(units, lanes, data)

    def _store_units(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        self._data[units] = data
        if not np.array_equal(self._data[units], data):
            raise RaceError(f"race: threads store different values to {self._describe_location(units)} at a time")
        self._writers[units] = lanes[:, None]
        self._write_times[units] = self.clocks.time

    def start_copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Start an asynchronous copy."""
        self._check_write(units, lanes)
        self._pending_copies.append(_PendingCopies(lanes, self._num_committed_groups[lanes], units, data))
        self._write_times[units] = PENDING_TIME
        self._writers[units] = lanes[:, None]

    def commit_group(self, lanes: Lanes) -> None:
        """Make a group of each lane's copies since its last group."""
        self._num_committed_groups[lanes] += 1

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Let all groups of each lane land but its last so many."""
        is_waiting = np.zeros(self.threads.num_lanes, bool)
        is_waiting[lanes] = True
        remaining = []
        for copies in self._pending_copies:
            is_complete = is_waiting[copies.lanes] & (
                copies.group_indices < self._num_committed_groups[copies.lanes] - max_pending_groups
            )
            if is_complete.any():
                self._store_units(copies.unit_indices[is_complete], copies.lanes[is_complete], copies.data[is_complete])
            if not is_complete.all():
                is_remaining = ~is_complete
                remaining.append(
                    _PendingCopies(
                        copies.lanes[is_remaining],
                        copies.group_indices[is_remaining],
                        copies.unit_indices[is_remaining],
                        copies.data[is_remaining],
                    )
                )
        self._pending_copies = remaining

    # --- the async proxy ---

    def read_async(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], reader: str) -> Bytes:
        """What lies in chunks, of shape (groups, chunks, 16), read by the async proxy for groups of lanes."""
        self._check_async_read(chunks, groups, f"has {reader} read")
        data: Bytes = self._data.view(np.uint8).reshape(-1, CHUNK_BYTES)[chunks]
        return data

    def start_async_write(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Begin to write chunks by the async proxy.

        Args:
            chunks: of shape (copies, chunks).
            lanes: that have them written, one for each copy.
            agents: who writes, for each copy.
        """
        self._check_async_write(chunks, lanes)
        self._group_by_chunk(self._write_times)[chunks] = PENDING_TIME
        self._group_by_chunk(self._writers)[chunks] = agents[:, None, None]

    def complete_copy(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """What the async proxy writes is there."""
        self._data.view(np.uint8).reshape(-1, CHUNK_BYTES)[chunks] = data
        self._group_by_chunk(self._write_times)[chunks] = self.clocks.time

    def reserve_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make units an mbarrier, which nothing else may access."""
        self._check_write(units, lanes)
        self._write_times[units], self._writers[units] = PENDING_TIME, MBARRIER_WRITER

    def free_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make them memory again, that a lane writes."""
        self._write_times[units], self._writers[units] = self.clocks.time, lanes[:, None]

    # --- other blocks of the cluster ---

    def note_remote_access(self, blocks: Lanes, lanes: Lanes) -> None:
        """Note that lanes access the memory of other blocks of the cluster, which must not end before they have."""
        for block, lane in set(zip(blocks.tolist(), lanes.tolist(), strict=True)):
            self._remote_accesses[block, lane] = self.clocks.time

    def check_block_exit(self) -> None:
        """Raise RaceError if a block may have ended while others access its memory, or its own copies do."""
        lane_offsets = np.arange(self.threads.lanes_per_block)
        for (block, lane), access_time in self._remote_accesses.items():
            known_time = self.clocks.merge_lanes(block * self.threads.lanes_per_block + lane_offsets)[
                GENERIC_PROXY, self.clocks.find_columns(lane)
            ]
            if block != lane // self.threads.lanes_per_block and access_time >= known_time:
                raise RaceError(
                    f"a block may end, and its shared memory with it, while others of its cluster access it: "
                    f"{self.threads.describe_lane(lane)} that of block {self.threads.describe_block(block)}"
                )
        if pending := self.async_readers.find_pending_bulk_copy():
            raise RaceError(
                f"block {self.threads.describe_block(pending[1])} may end while a bulk copy still "
                "reads its shared memory"
            )


@dataclass(frozen=True)
class MemoryAddress:
    """Where an access goes.

    Attributes:
        memory: which.
        byte_offsets: bytes, of each lane.
        name: of the array or buffer.
        target_blocks: whose shared memory it is, if it may be another block's.
    """

    memory: GlobalArray | SharedMemory
    byte_offsets: NDArray[np.int64]
    name: str
    target_blocks: Lanes | None = None
