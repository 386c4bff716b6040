"""Shared memory of executed blocks, with a check of every access.

All bits of unwritten memory are ones, which is NaN in every floating-point type, so results computed from it show the
error. Accesses out of bounds, misaligned accesses and races raise `ExecutionError`.

Lanes are the threads of all blocks that are executed together, rounded up to whole warps per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.addresses import CHUNK_BYTES
from tvmconv.emulator.errors import RaceError
from tvmconv.emulator.memory.access_history import MBARRIER_WRITER, PENDING_TIME, SharedMemoryHistory
from tvmconv.emulator.memory.arrays import Bytes, GlobalArray
from tvmconv.emulator.memory.commit_groups import CommitGroups
from tvmconv.emulator.memory.vector_clocks import GENERIC_PROXY
from tvmconv.emulator.threads import Lanes


@dataclass
class SharedMemory(SharedMemoryHistory):
    """Shared memory of all blocks that are executed together, block by block, with the latest accesses.

    An asynchronous copy counts as a write at the time at which its thread waits for it; until then no thread may access
    its destination. A TMA copy counts as a write by its mbarrier at the time at which it completes.

    Attributes:
        is_checked: Whether values are stored and races are checked.
    """

    is_checked: ClassVar[bool] = True
    _data: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._data = np.full(len(self._write_times), -1, f"i{self.unit_bytes}").view(f"u{self.unit_bytes}")
        self._copy_groups = CommitGroups(self.threads.num_lanes)
        # Time of the last access to a block's memory by a lane of another block.
        self._remote_accesses: dict[tuple[int, int], int] = {}

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, is_whole_warp: bool = False) -> NDArray[Any]:
        """Return the contents of units, of shape (accesses, units), that lanes or their whole warps read."""
        self._check_read(units, lanes, is_whole_warp)
        return self._data[units]

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Write data to units."""
        self._check_write(units, lanes)
        self._store_units(units, lanes, data)

    def _store_units(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        self._data[units] = data
        if not np.array_equal(self._data[units], data):
            location = self._describe_location(units)
            raise RaceError(f"race: threads store different values to {location} at the same time")
        self._writers[units] = lanes[:, None]
        self._write_times[units] = self.clocks.time

    def start_copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Start asynchronous copies."""
        self._check_write(units, lanes)
        self._copy_groups.issue(lanes, units, data)
        self._write_times[units] = PENDING_TIME
        self._writers[units] = lanes[:, None]

    def commit_group(self, lanes: Lanes) -> None:
        """Commit each lane's copies since its last commit as a group."""
        self._copy_groups.commit(lanes)

    def wait_group(self, lanes: Lanes, max_pending_groups: int) -> None:
        """Complete all groups of each lane but the last `max_pending_groups`."""
        for copies in self._copy_groups.wait(lanes, max_pending_groups):
            units, data = copies.values
            self._store_units(units, copies.lanes, data)

    # --- the async proxy ---

    def read_async(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], reader: str) -> Bytes:
        """Return the contents of chunks, of shape (groups, chunks, 16), that the async proxy reads for lane groups."""
        self._check_async_read(chunks, groups, f"has {reader} read")
        data: Bytes = self._data.view(np.uint8).reshape(-1, CHUNK_BYTES)[chunks]
        return data

    def start_async_write(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Start a write of chunks, of shape (copies, chunks), by the agent of each copy, which a lane issues."""
        self._check_async_write(chunks, lanes)
        self._group_by_chunk(self._write_times)[chunks] = PENDING_TIME
        self._group_by_chunk(self._writers)[chunks] = agents[:, None, None]

    def complete_copy(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """Complete a write of the async proxy."""
        self._data.view(np.uint8).reshape(-1, CHUNK_BYTES)[chunks] = data
        self._group_by_chunk(self._write_times)[chunks] = self.clocks.time

    def reserve_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Turn units into an mbarrier, which other instructions may not access."""
        self._check_write(units, lanes)
        self._write_times[units], self._writers[units] = PENDING_TIME, MBARRIER_WRITER

    def free_mbarrier(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Turn the units of an mbarrier into memory again, written by a lane."""
        self._write_times[units], self._writers[units] = self.clocks.time, lanes[:, None]

    # --- other blocks of the cluster ---

    def note_remote_access(self, blocks: Lanes, lanes: Lanes) -> None:
        """Note that lanes access the memory of other blocks, which may not exit before they know of the accesses."""
        for block, lane in set(zip(blocks.tolist(), lanes.tolist(), strict=True)):
            self._remote_accesses[block, lane] = self.clocks.time

    def check_block_exit(self) -> None:
        """Raise RaceError if a block may exit while other blocks or pending copies access its shared memory."""
        lane_offsets = np.arange(self.threads.lanes_per_block)
        for (block, lane), access_time in self._remote_accesses.items():
            clock = self.clocks.merge_lanes(block * self.threads.lanes_per_block + lane_offsets)
            known_time = clock[GENERIC_PROXY, self.clocks.find_columns(lane)]
            if block != lane // self.threads.lanes_per_block and access_time >= known_time:
                raise RaceError(
                    f"block {self.threads.describe_block(block)} may exit while {self.threads.describe_lane(lane)} "
                    "accesses its shared memory"
                )
        if pending := self.async_readers.find_pending_bulk_copy():
            block_name = self.threads.describe_block(pending[1])
            raise RaceError(f"block {block_name} may exit while a bulk copy still reads its shared memory")


@dataclass(frozen=True)
class MemoryAddress:
    """Target of an access, named after its array or buffer.

    Attributes:
        memory: Accessed memory.
        byte_offsets: Offset of each lane in bytes.
        name: Name of the array or buffer.
        target_blocks: Owner of the shared memory of each access, if it may be another block.
    """

    memory: GlobalArray | SharedMemory
    byte_offsets: NDArray[np.int64]
    name: str
    target_blocks: Lanes | None = None
