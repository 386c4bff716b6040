"""History of the accesses to shared memory, from which races are found.

A synchronization, such as a barrier, orders a write before another thread's later access (`vector_clocks`). Two
accesses of different threads race if one of them is a write and nothing orders them. Of many threads that read a
location, only the first and the last are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.emulator.addresses import CHUNK_BYTES, SHARED_BASE_ADDRESS
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.memory.arrays import check_aligned
from tvmconv.emulator.memory.vector_clocks import ASYNC_PROXY, GENERIC_PROXY, VectorClocks
from tvmconv.emulator.threads import EmulatedThreads, Lanes
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
class SharedMemoryHistory:
    """Units of the shared memory of all blocks that are executed together, with the latest accesses to each.

    Attributes:
        threads: Threads that are executed together.
        nbytes: Bytes of shared memory per block.
        unit_bytes: Bytes per unit, the granularity of the history.
    """

    threads: EmulatedThreads
    nbytes: int
    unit_bytes: int

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
