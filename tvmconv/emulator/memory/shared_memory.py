"""Shared memory of executed blocks, with a check of every access.

All bits of unwritten memory are ones, which is NaN in every floating-point type, so results computed from it show the
error. Accesses out of bounds, misaligned accesses and races raise `ExecutionError`.

Lanes are the threads of all blocks that are executed together, rounded up to whole warps per block.

A synchronization, such as a barrier, orders a write before another thread's later access (`vector_clocks`). Two
accesses of different threads race if one of them is a write and nothing orders them. Of many threads that read a
location, only the first and the last are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.memory.arrays import Bytes, GlobalArray, check_aligned
from tvmconv.emulator.memory.commit_groups import CommitGroups
from tvmconv.emulator.memory.vector_clocks import ASYNC_PROXY, GENERIC_PROXY, VectorClocks
from tvmconv.emulator.threads import CHUNK_BYTES, SHARED_BASE_ADDRESS, EmulatedThreads, Lanes
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

BUFFER_ALIGNMENT_BYTES = 128  # alignment of a shared buffer
MBARRIER_WRITER = -2  # writer of a location that is an mbarrier
PENDING_TIME = 1 << 30  # time of an access that has not completed


class AsyncReader(NamedTuple):
    """Warpgroup (for wgmma) or thread (for bulk copies) that reads shared memory asynchronously, by its index."""

    kind: Literal["wgmma", "bulk copy"]
    index_in_block: int

    @property
    def threads(self) -> NDArray[np.intp]:
        """Threads of the block that know the end of the read after a wait."""
        if self.kind == "bulk copy":
            return np.array([self.index_in_block])
        return np.arange(WARPGROUP_SIZE) + self.index_in_block * WARPGROUP_SIZE


class AsyncReaders:
    """End times of the asynchronous reads of each 16-byte chunk of shared memory, by reader.

    Readers read until their threads have waited for them. Afterwards, any thread that synchronizes with one of these
    threads may overwrite the memory.
    """

    def __init__(self, threads: EmulatedThreads, clocks: VectorClocks, chunks_per_block: int) -> None:
        self._threads, self._clocks, self._chunks_per_block = threads, clocks, chunks_per_block
        self._read_end_times: dict[AsyncReader, NDArray[np.int32]] = {}

    def mark_read(self, reader: AsyncReader, chunks: NDArray[np.int64], is_pending: bool) -> None:
        """Record that a reader reads chunks, or has read them and its threads know, in the blocks that contain them."""
        if reader not in self._read_end_times:
            self._read_end_times[reader] = np.zeros(len(self._threads.block_indices) * self._chunks_per_block, np.int32)
        self._read_end_times[reader][chunks] = PENDING_TIME if is_pending else self._clocks.time

    def find_pending_bulk_copy(self) -> tuple[AsyncReader, int] | None:
        """Return a bulk copy without a wait and the block that it reads, or None."""
        for reader, end_times in self._read_end_times.items():
            if reader.kind == "bulk copy" and (end_times == PENDING_TIME).any():
                return reader, int(np.argmax(end_times == PENDING_TIME)) // self._chunks_per_block
        return None

    def find_violation(self, chunks: NDArray[np.int64], lanes: Lanes) -> tuple[int, int, AsyncReader, bool] | None:
        """Find a chunk that a lane may not write because it may still be read.

        Each lane writes its row of chunks, which are in one block. Returns the lane, the chunk, its reader, and whether
        the read is pending; None if all writes are legal.
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


@dataclass
class SharedMemory:
    """Shared memory of all blocks that are executed together, block by block, with the latest accesses to each unit.

    An asynchronous copy counts as a write at the time at which its thread waits for it; until then no thread may access
    its destination. A TMA copy counts as a write by its mbarrier at the time at which it completes.
    """

    threads: EmulatedThreads
    nbytes: int  # bytes of shared memory per block
    unit_bytes: int  # bytes per unit, the granularity of the history

    is_checked: ClassVar[bool] = True  # whether values are stored and races are checked

    def __post_init__(self) -> None:
        self.nbytes = round_up(max(self.nbytes, BUFFER_ALIGNMENT_BYTES), BUFFER_ALIGNMENT_BYTES)
        lanes, size = self.threads.num_lanes, len(self.threads.block_indices) * self.nbytes // self.unit_bytes
        self._write_times = np.zeros(size, np.int32)  # time and lane of the last write
        self._writers = np.full(size, -1, np.int32)
        # The first and the last reading lane since the last barrier of all threads, and the time of each read.
        self._readers, self._read_times = np.full((2, size), -1, np.int32), np.zeros((2, size), np.int32)
        self._read_log: list[tuple[NDArray[np.int64], Lanes, Lanes, int]] = []  # reads that are not yet applied
        self._lane_blocks = np.arange(lanes) // self.threads.lanes_per_block  # block of each lane
        self.clocks = VectorClocks(self.threads)
        self.async_readers = AsyncReaders(self.threads, self.clocks, self.nbytes // CHUNK_BYTES)
        self._ordered_before = 1  # accesses before this time are ordered before all later ones, within a block
        self._data: NDArray[Any] = np.full(size, -1, f"i{self.unit_bytes}").view(f"u{self.unit_bytes}")
        self._copy_groups = CommitGroups(lanes)
        # Time of the last access to a block's memory by a lane of another block.
        self._remote_accesses: dict[tuple[int, int], int] = {}

    def find_units(self, addresses: NDArray[np.int64], lanes: Lanes, nbytes: int, blocks: Lanes | None = None) -> Any:
        """Return the units that accesses touch, of shape (accesses, units).

        Addresses begin at `SHARED_BASE_ADDRESS`; `blocks` owns the memory if it is not each lane's own block.
        """
        offsets = addresses - SHARED_BASE_ADDRESS
        self._check_bounds(offsets, nbytes)
        check_aligned(offsets, nbytes, "shared memory")
        blocks = self._lane_blocks[lanes] if blocks is None else blocks
        first_units = (blocks * self.nbytes + offsets) // self.unit_bytes
        count = nbytes // self.unit_bytes
        return first_units[:, None] if count == 1 else first_units[:, None] + np.arange(count)

    def _check_bounds(self, offsets: NDArray[np.int64], nbytes: int) -> None:
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self.nbytes):
            worst_offset = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {worst_offset} of shared memory, which has {self.nbytes} bytes"
            )

    def find_chunks(self, addresses: NDArray[np.int64], blocks: Lanes) -> NDArray[np.int64]:
        """Return the 16-byte chunks at addresses, of shape (accesses, chunks); each access is to one block."""
        offsets = addresses - SHARED_BASE_ADDRESS
        self._check_bounds(offsets, CHUNK_BYTES)
        if np.bitwise_or.reduce(offsets, axis=None) % CHUNK_BYTES:
            raise ExecutionError(f"misaligned: a {CHUNK_BYTES}-byte chunk of shared memory is not aligned to its size")
        return (blocks[:, None] * self.nbytes + offsets) // CHUNK_BYTES

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """Synchronize the lanes of each row of `groups`, which are within a cluster."""
        has_all_threads = groups.size == len(self.threads.block_indices) * self.threads.threads_per_block
        cluster_threads = self.threads.cluster_size * self.threads.threads_per_block
        is_full_barrier = has_all_threads and groups.shape[1] == cluster_threads
        if not is_full_barrier:
            self.apply_logged_reads()
        self._read_log.clear()  # a barrier of all threads orders all reads before everything that follows
        self.clocks.synchronize_groups(groups)
        if is_full_barrier:
            self._ordered_before = self.clocks.time

    def apply_logged_reads(self) -> None:
        """Record the logged reads in the history, before lanes synchronize further."""
        for units, *end_lanes, read_time in self._read_log:
            flat_units = units.reshape(-1)
            lanes = [np.broadcast_to(each[:, None], units.shape).reshape(-1).astype(np.int32) for each in end_lanes]
            # Forget the recorded reads that are ordered before this one.
            known_times = self.clocks.read_times(lanes[0], np.maximum(self._readers[:, flat_units], 0))
            superseded_units = flat_units[(self._read_times[:, flat_units] < known_times).all(axis=0)]
            self._readers[:, superseded_units] = np.array([[2**30], [-1]], np.int32)
            for readers, read_times, merge, own in zip(
                self._readers, self._read_times, (np.minimum, np.maximum), lanes, strict=True
            ):
                merge.at(readers, flat_units, own)
                read_times[flat_units[readers[flat_units] == own]] = read_time
        self._read_log.clear()

    # --- races ---

    def _check_read(self, units: NDArray[np.int64], lanes: Lanes, is_whole_warp: bool) -> None:
        """Check and log a read; raise RaceError if a write is not ordered before it."""
        write_times = self._write_times[units]
        if write_times.size and int(write_times.max()) >= self._ordered_before:
            self._check_order(write_times, self._writers[units], units, lanes, "reads", is_whole_warp)
        first_lanes = lanes // WARP_SIZE * WARP_SIZE if is_whole_warp else lanes
        last_lanes = first_lanes + WARP_SIZE - 1 if is_whole_warp else lanes
        self._read_log.append((units, first_lanes, last_lanes, self.clocks.time))

    def _check_write(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        write_times = self._write_times[units]
        if write_times.size and int(write_times.max()) >= self._ordered_before:
            self._check_order(write_times, self._writers[units], units, lanes, "writes")
        self.apply_logged_reads()
        for all_read_times, readers in zip(self._read_times, self._readers, strict=True):
            read_times = all_read_times[units]
            if read_times.size and int(read_times.max()) >= self._ordered_before:
                self._check_order(read_times, readers[units], units, lanes, "overwrites")
        self._check_async_readers(units // (CHUNK_BYTES // self.unit_bytes), lanes)

    def _check_async_readers(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        if violation := self.async_readers.find_violation(chunks, lanes):
            lane, chunk, reader, is_pending = violation
            reason = "no thread has waited for it" if is_pending else "nothing orders the write after its end"
            location = self._describe_location(chunk * (CHUNK_BYTES // self.unit_bytes))
            name = self.threads.describe_lane(lane)
            raise RaceError(f"race: {name} writes {location}, which a {reader.kind} may still read: {reason}")

    def _check_order(
        self,
        access_times: NDArray[np.int32],
        access_lanes: NDArray[np.int32],
        units: NDArray[np.int64],
        lanes: Lanes,
        action: str,
        is_whole_warp: bool = False,
    ) -> None:
        """Raise RaceError if an access of `lanes` is not ordered after the previous one of `access_lanes`."""
        own_lanes = np.broadcast_to(lanes[:, None], units.shape)
        known_times = self.clocks.read_times(own_lanes, access_lanes)
        is_race = (access_times >= known_times) & ((access_lanes != own_lanes) | is_whole_warp)
        is_race |= access_times == PENDING_TIME
        if is_race.any():
            first = tuple(index[0] for index in np.nonzero(is_race))
            other_lane, access_time, unit = int(access_lanes[first]), int(access_times[first]), int(units[first])
            self._raise_race(int(own_lanes[first]), other_lane, access_time, unit, action, is_whole_warp)

    def _raise_race(
        self, lane: int, other_lane: int, access_time: int, unit: int, action: str, is_whole_warp: bool
    ) -> None:
        thread_name, location = self.threads.describe_lane(lane), self._describe_location(unit)
        thread_name = f"the warp of {thread_name}" if is_whole_warp else thread_name
        if other_lane == MBARRIER_WRITER:
            raise RaceError(f"{thread_name} {action} {location}, which is part of an mbarrier")
        if access_time == PENDING_TIME:
            raise RaceError(f"{thread_name} {action} {location}, to which an asynchronous copy is pending")
        if other_lane >= self.threads.num_lanes:
            raise RaceError(f"race: {thread_name} {action} {location} without a wait for the copy to it")
        earlier_action = "has read" if action == "overwrites" else "has written"
        other_name = self.threads.describe_lane(other_lane)
        raise RaceError(
            f"race: {thread_name} {action} {location}, which {other_name} {earlier_action} with no barrier between"
        )

    # --- races with the async proxy ---

    def _check_async_read(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], action: str) -> None:
        """Raise RaceError unless the writes to chunks are ordered before all lanes of a group and fenced."""
        write_times = self._group_by_chunk(self._write_times)[chunks]
        writers = self._group_by_chunk(self._writers)[chunks]
        if (write_times == write_times[..., :1]).all() and (writers == writers[..., :1]).all():
            write_times, writers = write_times[..., 0], writers[..., 0]
        else:
            write_times, writers = (values.reshape(len(chunks), -1) for values in (write_times, writers))
        clocks, clock_columns = self.clocks.intersect_groups(groups), self.clocks.find_columns(writers)
        group_rows = np.arange(len(chunks))[:, None]
        is_own = (writers == groups[:, :1]) & (groups.shape[1] == 1)
        is_unordered = (write_times >= clocks[group_rows, GENERIC_PROXY, clock_columns]) & ~is_own
        is_unordered |= write_times == PENDING_TIME
        is_thread_write = (write_times > 0) & (writers < self.threads.num_lanes)
        is_unfenced = (write_times >= clocks[group_rows, ASYNC_PROXY, clock_columns]) & is_thread_write
        units_per_chunk = CHUNK_BYTES // self.unit_bytes
        for is_race in (is_unordered, is_unfenced):
            if is_race.any():
                group, column_index = np.argwhere(is_race)[0].tolist()
                unit = int(chunks[group, column_index * chunks.shape[1] // write_times.shape[1]]) * units_per_chunk
                lane, other_lane = int(groups[group, 0]), int(writers[group, column_index])
                if is_race is is_unordered:
                    self._raise_race(lane, other_lane, int(write_times[group, column_index]), unit, action, False)
                name, other_name = (self.threads.describe_lane(index) for index in (lane, other_lane))
                raise RaceError(
                    f"race: {name} {action} {self._describe_location(unit)}, which {other_name} has written with "
                    "no fence.proxy.async after it"
                )

    def _check_async_write(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        """Raise RaceError unless the async proxy may write chunks on behalf of lanes."""
        self._check_async_read(chunks, lanes[:, None], "has a bulk copy write")
        self.apply_logged_reads()
        units_per_chunk = CHUNK_BYTES // self.unit_bytes
        for all_read_times, readers in zip(self._read_times, self._readers, strict=True):
            read_times = self._group_by_chunk(all_read_times)[chunks]
            if read_times.any():
                units = np.arange(units_per_chunk) + chunks[:, :, None] * units_per_chunk
                units = units.reshape(len(chunks), -1)
                self._check_order(read_times.reshape(units.shape), readers[units], units, lanes, "overwrites")
        self._check_async_readers(chunks, lanes)

    def _group_by_chunk(self, unit_values: NDArray[Any]) -> NDArray[Any]:
        """Reshape one value per unit to (chunks, units per chunk)."""
        return unit_values.reshape(-1, CHUNK_BYTES // self.unit_bytes)

    def _describe_location(self, units: Any) -> str:
        unit_index = int(np.asarray(units).reshape(-1)[0])
        return f"byte {unit_index * self.unit_bytes % self.nbytes} of shared memory"

    # --- contents ---

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
    """Target of an access, named after its array or buffer."""

    memory: GlobalArray | SharedMemory  # accessed memory
    byte_offsets: NDArray[np.int64]  # offset of each lane in bytes
    name: str  # name of the array or buffer
    target_blocks: Lanes | None = None  # owner of the shared memory of each access, if it may be another block


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
