"""Who touched shared memory when, and which accesses race.

A write is ordered before another thread's access by what makes it known to that thread, such as a barrier between
them (`clocks`). An access that is not ordered behind a write, and a write that is not ordered behind an access, is
a race. Of many threads that read a place, the first and the last are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.emulator.addresses import CHUNK_BYTES, SHARED_BASE_ADDRESS
from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.memory.arrays import check_aligned
from tvmconv.emulator.memory.async_readers import PENDING_TIME, AsyncReaders
from tvmconv.emulator.memory.vector_clocks import ASYNC_PROXY, GENERIC_PROXY, VectorClocks
from tvmconv.emulator.threads import EmulatedThreads, Lanes
from tvmconv.gpu_specs import WARP_SIZE

BUFFER_ALIGNMENT_BYTES = 128  # bytes, of a shared buffer
MBARRIER_WRITER = -2  # the writer of what is an mbarrier


@dataclass
class SharedMemoryHistory:
    """The units of the shared memory of all blocks that are executed together, and who touched each of them when.

    Attributes:
        threads: the lanes.
        nbytes: of a block.
        unit_bytes: bytes that are told apart.
        clocks: what each lane knows of the others.
        async_readers: what reads behind its thread's back.
    """

    threads: EmulatedThreads
    nbytes: int
    unit_bytes: int

    def __post_init__(self) -> None:
        """Nobody has touched anything."""
        self.nbytes = round_up(max(self.nbytes, BUFFER_ALIGNMENT_BYTES), BUFFER_ALIGNMENT_BYTES)
        lanes, size = self.threads.num_lanes, len(self.threads.block_indices) * self.nbytes // self.unit_bytes
        self._write_times = np.zeros(size, np.int32)  # when, and by which lane
        self._writers = np.full(size, -1, np.int32)
        # Reads that nothing is ordered behind yet: the first and the last of the lanes, and when each of them has read.
        self._first_readers, self._last_readers = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self._first_read_times, self._last_read_times = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._read_log: list[tuple[NDArray[np.int64], Lanes, Lanes, int]] = []  # reads that are not in these yet
        self._lane_blocks = np.arange(lanes) // self.threads.lanes_per_block  # of a lane
        self.clocks = VectorClocks(self.threads)
        self.async_readers = AsyncReaders(self.threads, self.clocks, self.nbytes // CHUNK_BYTES)
        self._ordered_before = 1  # what happened before this time is ordered before everything, within a block

    def find_units(self, addresses: NDArray[np.int64], lanes: Lanes, nbytes: int, blocks: Lanes | None = None) -> Any:
        """Which units accesses touch, of shape (accesses, units).

        Args:
            addresses: in the block's shared memory, behind `SHARED_BASE_ADDRESS`.
            lanes: that access them.
            nbytes: of an access.
            blocks: whose memory it is, if not the lane's own.
        """
        offsets = addresses - SHARED_BASE_ADDRESS
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self.nbytes):
            worst_offset = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {worst_offset} of shared memory, which has {self.nbytes} bytes"
            )
        check_aligned(offsets, nbytes, "shared memory")
        blocks = self._lane_blocks[lanes] if blocks is None else blocks
        first_units = (blocks * self.nbytes + offsets) // self.unit_bytes
        count = nbytes // self.unit_bytes
        return first_units[:, None] if count == 1 else first_units[:, None] + np.arange(count)

    def find_chunks(self, addresses: NDArray[np.int64], blocks: Lanes) -> NDArray[np.int64]:
        """Which chunks of 16 bytes lie at addresses, of shape (accesses, chunks), in the memory of a block for each."""
        offsets = addresses - SHARED_BASE_ADDRESS
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + CHUNK_BYTES > self.nbytes):
            worst_offset = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {CHUNK_BYTES} bytes at byte {worst_offset} of shared memory, which "
                f"has {self.nbytes} bytes"
            )
        if np.bitwise_or.reduce(offsets, axis=None) % CHUNK_BYTES:
            raise ExecutionError(f"misaligned: chunks of {CHUNK_BYTES} bytes of shared memory")
        return (blocks[:, None] * self.nbytes + offsets) // CHUNK_BYTES

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """A barrier of lanes that wait for each other: each row of an array, within a cluster."""
        has_all_threads = groups.size == len(self.threads.block_indices) * self.threads.threads_per_block
        is_full_barrier = (
            has_all_threads and groups.shape[1] == self.threads.cluster_size * self.threads.threads_per_block
        )
        if not is_full_barrier:
            self.apply_logged_reads()
        self._read_log.clear()  # as everything is ordered behind them now
        self.clocks.synchronize_groups(groups)
        if is_full_barrier:
            self._ordered_before = self.clocks.time

    def apply_logged_reads(self) -> None:
        """Take the logged reads into account, before anybody comes to know more."""
        for units, first_lane, last_lane, read_time in self._read_log:
            flat_units = units.reshape(-1)
            first_lanes = np.broadcast_to(first_lane[:, None], units.shape).reshape(-1).astype(np.int32)
            last_lanes = np.broadcast_to(last_lane[:, None], units.shape).reshape(-1).astype(np.int32)
            # Reads that this one is ordered behind are forgotten.
            is_superseded = self._first_read_times[flat_units] < self.clocks.read_times(
                first_lanes, np.maximum(self._first_readers[flat_units], 0)
            )
            is_superseded &= self._last_read_times[flat_units] < self.clocks.read_times(
                first_lanes, np.maximum(self._last_readers[flat_units], 0)
            )
            self._first_readers[flat_units[is_superseded]], self._last_readers[flat_units[is_superseded]] = (
                np.int32(2**30),
                np.int32(-1),
            )
            np.minimum.at(self._first_readers, flat_units, first_lanes)
            np.maximum.at(self._last_readers, flat_units, last_lanes)
            self._first_read_times[flat_units[self._first_readers[flat_units] == first_lanes]] = read_time
            self._last_read_times[flat_units[self._last_readers[flat_units] == last_lanes]] = read_time
        self._read_log.clear()

    # --- races ---

    def _check_read(self, units: NDArray[np.int64], lanes: Lanes, is_whole_warp: bool) -> None:
        """Raise RaceError unless lanes may read units; remember that they have."""
        write_times = self._write_times[units]
        if write_times.size and int(write_times.max()) >= self._ordered_before:
            self._check_order(write_times, self._writers[units], units, lanes, "reads", is_whole_warp)
        first_lanes, last_lanes = (
            (lanes // WARP_SIZE * WARP_SIZE, lanes // WARP_SIZE * WARP_SIZE + WARP_SIZE - 1)
            if is_whole_warp
            else (lanes, lanes)
        )
        self._read_log.append((units, first_lanes, last_lanes, self.clocks.time))

    def _check_write(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        write_times = self._write_times[units]
        if write_times.size and int(write_times.max()) >= self._ordered_before:
            self._check_order(write_times, self._writers[units], units, lanes, "writes")
        self.apply_logged_reads()
        for read_times_of, reader_lanes in (
            (self._first_read_times, self._first_readers),
            (self._last_read_times, self._last_readers),
        ):
            read_times = read_times_of[units]
            if read_times.size and int(read_times.max()) >= self._ordered_before:
                self._check_order(read_times, reader_lanes[units], units, lanes, "overwrites")
        self._check_async_readers(units // (CHUNK_BYTES // self.unit_bytes), lanes)

    def _check_async_readers(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        if violation := self.async_readers.find_violation(chunks, lanes):
            lane, chunk, reader, is_pending = violation
            reason = "nobody has waited for it" if is_pending else "nothing orders this behind its end"
            location = self._describe_location(chunk * (CHUNK_BYTES // self.unit_bytes))
            raise RaceError(
                f"race: {self.threads.describe_lane(lane)} writes {location}, which a {reader.kind} "
                f"may still read: {reason}"
            )

    def _check_order(
        self,
        access_times: NDArray[np.int32],
        access_lanes: NDArray[np.int32],
        units: NDArray[np.int64],
        lanes: Lanes,
        action: str,
        is_whole_warp: bool = False,
    ) -> None:
        """Raise RaceError if an access is not ordered behind that of the lanes `access_lanes` before it."""
        own_lanes = np.broadcast_to(lanes[:, None], units.shape)
        known_times = self.clocks.read_times(own_lanes, access_lanes)
        is_race = (access_times >= known_times) & ((access_lanes != own_lanes) | is_whole_warp) | (
            access_times == PENDING_TIME
        )
        if is_race.any():
            first_race = tuple(index[0] for index in np.nonzero(is_race))
            self._raise_race(
                int(own_lanes[first_race]),
                int(access_lanes[first_race]),
                int(access_times[first_race]),
                int(units[first_race]),
                action,
                is_whole_warp,
            )

    def _raise_race(
        self, lane: int, other_lane: int, access_time: int, unit: int, action: str, is_whole_warp: bool
    ) -> None:
        thread_name, location = self.threads.describe_lane(lane), self._describe_location(unit)
        thread_name = f"the warp of {thread_name}" if is_whole_warp else thread_name
        if other_lane == MBARRIER_WRITER:
            raise RaceError(f"{thread_name} {action} {location}, where an mbarrier lies")
        if access_time == PENDING_TIME:
            raise RaceError(
                f"{thread_name} {action} {location}, where an asynchronous copy goes that nobody has waited for"
            )
        if other_lane >= self.threads.num_lanes:
            raise RaceError(f"race: {thread_name} {action} {location}, whose copy it has not waited for")
        earlier_action = "has read" if action == "overwrites" else "has written"
        raise RaceError(
            f"race: {thread_name} {action} {location}, which {self.threads.describe_lane(other_lane)} "
            f"{earlier_action} with no barrier between"
        )

    # --- races with the async proxy ---

    def _check_async_read(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], action: str) -> None:
        """Raise RaceError unless all lanes of a group know who wrote chunks, and that the async proxy sees it."""
        write_times, writers = (
            self._group_by_chunk(self._write_times)[chunks],
            self._group_by_chunk(self._writers)[chunks],
        )
        if (write_times == write_times[..., :1]).all() and (writers == writers[..., :1]).all():
            write_times, writers = write_times[..., 0], writers[..., 0]
        else:
            write_times, writers = (values.reshape(len(chunks), -1) for values in (write_times, writers))
        clocks, clock_columns = self.clocks.intersect_groups(groups), self.clocks.find_columns(writers)
        group_rows = np.arange(len(chunks))[:, None]
        is_own = (writers == groups[:, :1]) & (groups.shape[1] == 1)
        is_unordered = (write_times >= clocks[group_rows, GENERIC_PROXY, clock_columns]) & ~is_own | (
            write_times == PENDING_TIME
        )
        is_unfenced = (
            (write_times >= clocks[group_rows, ASYNC_PROXY, clock_columns])
            & (write_times > 0)
            & (writers < self.threads.num_lanes)
        )
        for is_race in (is_unordered, is_unfenced):
            if is_race.any():
                group, column_index = np.argwhere(is_race)[0].tolist()
                unit = int(chunks[group, column_index * chunks.shape[1] // write_times.shape[1]]) * (
                    CHUNK_BYTES // self.unit_bytes
                )
                lane, other_lane = int(groups[group, 0]), int(writers[group, column_index])
                if is_race is is_unordered:
                    self._raise_race(lane, other_lane, int(write_times[group, column_index]), unit, action, False)
                raise RaceError(
                    f"race: {self.threads.describe_lane(lane)} {action} "
                    f"{self._describe_location(unit)}, which {self.threads.describe_lane(other_lane)} "
                    "has written with no fence.proxy.async behind it"
                )

    def _check_async_write(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        """Raise RaceError unless the async proxy may write chunks for lanes."""
        self._check_async_read(chunks, lanes[:, None], "has a bulk copy write")
        self.apply_logged_reads()
        for read_times_of, reader_lanes in (
            (self._first_read_times, self._first_readers),
            (self._last_read_times, self._last_readers),
        ):
            read_times = self._group_by_chunk(read_times_of)[chunks]
            if read_times.any():
                units = np.arange(CHUNK_BYTES // self.unit_bytes) + chunks[:, :, None] * (
                    CHUNK_BYTES // self.unit_bytes
                )
                units = units.reshape(len(chunks), -1)
                self._check_order(read_times.reshape(units.shape), reader_lanes[units], units, lanes, "overwrites")
        self._check_async_readers(chunks, lanes)

    def _group_by_chunk(self, unit_values: NDArray[Any]) -> NDArray[Any]:
        """An array of something for each unit, by chunk."""
        return unit_values.reshape(-1, CHUNK_BYTES // self.unit_bytes)

    def _describe_location(self, units: Any) -> str:
        unit_index = int(np.asarray(units).reshape(-1)[0])
        return f"byte {unit_index * self.unit_bytes % self.nbytes} of shared memory"
