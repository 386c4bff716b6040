"""Barriers of a warp, a block, a part of a block by number, and a cluster; and mbarriers in shared memory.

A phase of an mbarrier completes when all expected arrivals and all expected bytes have come. Source: PTX ISA, "Parallel
Synchronization and Communication Instructions".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.memory.arrays import check_aligned
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.memory.vector_clocks import GENERIC_PROXY
from tvmconv.emulator.synchronization.fibers import WaitCondition
from tvmconv.emulator.threads import SHARED_BASE_ADDRESS, Lanes
from tvmconv.target import WARP_SIZE

CLUSTER_BARRIER = -1  # number of the cluster's barrier
BLOCK_BARRIER = 0  # number of the block's barrier


@dataclass
class Barrier:
    """One phase of a barrier; its clock is the union of those of the arrived lanes once all have arrived."""

    name: str
    num_expected: int
    arrived_lanes: list[Lanes] = field(default_factory=list)
    clock: NDArray[np.int32] | None = None

    @property
    def num_arrived(self) -> int:
        """Number of threads that have arrived."""
        return sum(map(len, self.arrived_lanes))


class BarrierTable:
    """Barriers of all blocks, which order the accesses to their shared memory."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared, self._threads = shared, shared.threads
        self._open_barriers: dict[tuple[int, int], Barrier] = {}  # by block or cluster, and barrier number
        self._cluster_barriers: dict[int, Barrier] = {}  # cluster barrier of each lane's last arrival

    def sync_warps(self, is_active: NDArray[np.bool_], is_thread: NDArray[np.bool_]) -> None:
        """Synchronize the active lanes of warps, which never waits because warps are executed in lock step."""
        active_by_warp, threads_by_warp = is_active.reshape(-1, WARP_SIZE), is_thread.reshape(-1, WARP_SIZE)
        has_active: NDArray[np.bool_] = np.asarray(active_by_warp.any(axis=1))
        if not np.array_equal(active_by_warp & threads_by_warp, threads_by_warp & has_active[:, None]):
            raise RaceError("a barrier of the warp that not all of its threads reach")
        groups = np.arange(len(is_active)).reshape(-1, WARP_SIZE)
        is_full: NDArray[np.bool_] = np.asarray(threads_by_warp.all(axis=1))
        if (has_active & is_full).any():
            self._shared.synchronize_groups(groups[has_active & is_full])
        for group in groups[has_active & ~is_full]:
            self._shared.synchronize_groups(group[is_thread[group]][None, :])

    def sync(
        self, lanes: Lanes, barrier_index: Any = BLOCK_BARRIER, num_threads: int | None = None
    ) -> Iterator[WaitCondition]:
        """Arrive at a barrier, and wait until all expected threads have, by default those of the block or the cluster.

        The number of the barrier is one for all lanes, or one per lane.
        """
        barriers = self._arrive_at_barriers(lanes, barrier_index, num_threads)
        if barriers:
            yield from self._wait(barriers)

    def arrive(self, lanes: Lanes, barrier_index: Any, num_threads: int | None = None) -> None:
        """Arrive at a barrier without waiting; the arguments are those of `sync`."""
        for barrier, arriving_lanes in self._arrive_at_barriers(lanes, barrier_index, num_threads, can_complete=False):
            if isinstance(barrier_index, int) and barrier_index == CLUSTER_BARRIER:
                self._cluster_barriers.update(dict.fromkeys(arriving_lanes.tolist(), barrier))

    def wait_cluster(self, lanes: Lanes) -> Iterator[WaitCondition]:
        """Wait until all threads of the cluster have arrived, after the waiting lanes themselves."""
        lanes_by_barrier: dict[int, tuple[Barrier, list[int]]] = {}
        for lane in lanes.tolist():
            barrier = self._cluster_barriers.pop(lane, None)
            if barrier is None:
                name = self._threads.describe_lane(lane)
                raise ExecutionError(f"{name} waits at the cluster's barrier without having arrived at it")
            lanes_by_barrier.setdefault(id(barrier), (barrier, []))[1].append(lane)
        barriers = [(barrier, np.array(arriving_lanes)) for barrier, arriving_lanes in lanes_by_barrier.values()]
        yield from self._wait(barriers)

    def _wait(self, barriers: list[tuple[Barrier, Lanes]]) -> Iterator[WaitCondition]:
        def describe() -> str:
            return "; ".join(
                f"{self._threads.describe_lanes(lanes)} at {barrier.name} that not all of its threads reach "
                f"({barrier.num_arrived} of {barrier.num_expected})"
                for barrier, lanes in barriers
                if barrier.clock is None
            )

        wait = WaitCondition(lambda: all(barrier.clock is not None for barrier, _ in barriers), describe)
        if not wait.is_ready():
            yield wait
        self._shared.apply_logged_reads()
        for barrier, lanes in barriers:
            assert barrier.clock is not None
            self._shared.clocks.acquire(lanes, barrier.clock)

    def _arrive_at_barriers(
        self, lanes: Lanes, barrier_indices: Any, num_threads: int | None, *, can_complete: bool = True
    ) -> list[tuple[Barrier, Lanes]]:
        """Arrive, and return each barrier with its arriving lanes.

        The result is empty if `can_complete`, and if the lanes are all expected threads, which synchronize at once.
        """
        is_cluster = isinstance(barrier_indices, int) and barrier_indices == CLUSTER_BARRIER
        threads = self._threads
        blocks_per_scope = threads.cluster_size if is_cluster else 1
        num_threads = num_threads or threads.threads_per_block * blocks_per_scope
        scope_indices = lanes // (threads.lanes_per_block * blocks_per_scope)
        indices_by_lane = np.broadcast_to(np.asarray(barrier_indices), lanes.shape)
        if can_complete and (indices_by_lane == indices_by_lane[0]).all():
            present_scopes, counts = np.unique(scope_indices, return_counts=True)
            barrier_index = int(indices_by_lane[0])
            is_open = any((index, barrier_index) in self._open_barriers for index in present_scopes.tolist())
            if not is_open and (counts == num_threads).all():
                self._shared.synchronize_groups(lanes.reshape(-1, num_threads))
                return []
        keys = scope_indices * (1 << 8) + indices_by_lane + 1
        arrivals = []
        for key in np.unique(keys).tolist():
            arriving_lanes = lanes[keys == key]
            scope_index, barrier_index = key >> 8, (key & 255) - 1
            name = _describe_barrier(barrier_index, num_threads)
            barrier = self._open_barriers.setdefault((scope_index, barrier_index), Barrier(name, num_threads))
            barrier.arrived_lanes.append(arriving_lanes)
            if barrier.num_expected != num_threads or barrier.num_arrived > num_threads:
                raise ExecutionError(
                    f"{threads.describe_lanes(arriving_lanes)} at {name}: it expects {num_threads} threads, and "
                    f"{barrier.num_arrived} have arrived"
                )
            if barrier.num_arrived == num_threads:
                self._shared.apply_logged_reads()
                barrier.clock = self._shared.clocks.release(np.concatenate(barrier.arrived_lanes))
                del self._open_barriers[scope_index, barrier_index]
            arrivals.append((barrier, arriving_lanes))
        return arrivals


def _describe_barrier(barrier_index: int, num_threads: int) -> str:
    if barrier_index == CLUSTER_BARRIER:
        return "a barrier of the cluster"
    if barrier_index == BLOCK_BARRIER:
        return "a barrier of the block"
    return f"the barrier {barrier_index} of {num_threads} threads"


MBARRIER_BYTES = 8
MAX_ARRIVALS, MAX_TX_COUNT = (1 << 20) - 1, (1 << 20) - 1


@dataclass
class Mbarrier:
    """One mbarrier in the shared memory of a block."""

    name: str
    block: int
    num_expected_arrivals: int  # number of arrivals per phase
    writer_agent: int  # agent of the vector clocks that stands for the copies of this mbarrier
    init_lane: int
    init_time: int
    arrival_clock: NDArray[np.int32]  # union of the clocks of the arrivals in the current phase
    phase_clock: NDArray[np.int32]  # union of the clocks of the arrivals in the last complete phase
    is_fenced: bool = False  # whether fence.mbarrier_init has made it visible to other blocks and the async proxy
    phase: int = 0  # number of complete phases
    pending_arrivals: int = 0  # number of arrivals that the current phase lacks
    tx_count: int = 0  # number of bytes that the current phase lacks; negative if bytes came before they were expected
    copies_in_flight: int = 0  # number of copies that have not completed
    last_copy_time: int = 0  # time at which the last copy completed

    def __str__(self) -> str:
        missing_parts = []
        if self.pending_arrivals:
            missing_parts.append(f"{self.pending_arrivals} of {self.num_expected_arrivals} arrivals")
        missing_parts += [f"{self.tx_count} bytes"] if self.tx_count else []
        return f"{self.name}, whose phase {self.phase} lacks {' and '.join(missing_parts)}"


@dataclass
class MbarrierTable:
    """Mbarriers of all blocks, in their shared memory."""

    shared: SharedMemory
    _mbarriers: dict[tuple[int, int], Mbarrier] = field(default_factory=dict)
    _agents: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank in the cluster and address

    def initialize(self, location: MemoryAddress, lanes: Lanes, arrival_counts: NDArray[Any]) -> None:
        """mbarrier.init."""
        shared = self.shared
        check_aligned(location.byte_offsets, MBARRIER_BYTES, "shared memory")
        lane_blocks = (lanes // shared.threads.lanes_per_block).tolist()
        for key in zip(lane_blocks, location.byte_offsets.tolist(), strict=True):
            if key in self._mbarriers:
                raise ExecutionError(f"{self._mbarriers[key].name} is initialized again without mbarrier.inval")
        shared.reserve_mbarrier(shared.find_units(location.byte_offsets, lanes, MBARRIER_BYTES), lanes)
        for lane, byte_offset, num_arrivals in zip(
            lanes.tolist(), location.byte_offsets.tolist(), arrival_counts.tolist(), strict=True
        ):
            if not 1 <= num_arrivals <= MAX_ARRIVALS:
                raise ExecutionError(f"an mbarrier expects 1 to {MAX_ARRIVALS} arrivals, not {num_arrivals}")
            block = lane // shared.threads.lanes_per_block
            agent_key = block % shared.threads.cluster_size, byte_offset
            if agent_key not in self._agents:
                self._agents[agent_key] = shared.clocks.add_agent()
            self._mbarriers[block, byte_offset] = Mbarrier(
                name=self._describe(block, byte_offset),
                block=block,
                num_expected_arrivals=num_arrivals,
                writer_agent=self._agents[agent_key],
                init_lane=lane,
                init_time=shared.clocks.time,
                arrival_clock=shared.clocks.make_empty_clock(),
                phase_clock=shared.clocks.make_empty_clock(),
                pending_arrivals=num_arrivals,
            )

    def _describe(self, block: int, byte_offset: int) -> str:
        block_name = self.shared.threads.describe_block(block)
        return f"the mbarrier at byte {byte_offset - SHARED_BASE_ADDRESS} of shared memory of block {block_name}"

    def invalidate(self, location: MemoryAddress, lanes: Lanes) -> None:
        """mbarrier.inval."""
        for barrier, lane in zip(self.find_mbarriers(location, lanes), lanes.tolist(), strict=True):
            key = next(key for key, value in self._mbarriers.items() if value is barrier)
            del self._mbarriers[key]
            lane_array = np.array([lane])
            units = self.shared.find_units(np.array([key[1]]), lane_array, MBARRIER_BYTES)
            self.shared.free_mbarrier(units, lane_array)

    def fence_init(self, lanes: Lanes) -> None:
        """fence.mbarrier_init: makes mbarriers that lanes initialized visible to other blocks and the async proxy."""
        fencing_lanes = set(lanes.tolist())
        for barrier in self._mbarriers.values():
            barrier.is_fenced |= barrier.init_lane in fencing_lanes

    def find_mbarriers(self, location: MemoryAddress, lanes: Lanes, *, is_async_proxy: bool = False) -> list[Mbarrier]:
        """Return the mbarriers at addresses; their initialization has to be ordered and fenced before the use."""
        shared = self.shared
        blocks = lanes // shared.threads.lanes_per_block if location.target_blocks is None else location.target_blocks
        mbarriers = []
        byte_offsets = location.byte_offsets.tolist()
        for lane, block, byte_offset in zip(lanes.tolist(), blocks.tolist(), byte_offsets, strict=True):
            barrier = self._mbarriers.get((block, byte_offset))
            thread_name = shared.threads.describe_lane(lane)
            if barrier is None:
                raise ExecutionError(
                    f"{thread_name} uses {self._describe(block, byte_offset)}, which is not initialized"
                )
            known_time = shared.clocks.read_times(np.array(lane), np.array(barrier.init_lane))
            if lane != barrier.init_lane and barrier.init_time >= known_time:
                raise RaceError(f"race: {thread_name} uses {barrier.name} with no barrier after its mbarrier.init")
            is_remote = block != lane // shared.threads.lanes_per_block
            if (is_async_proxy or is_remote) and not barrier.is_fenced:
                raise RaceError(
                    f"race: {thread_name} uses {barrier.name} with no fence.mbarrier_init after its mbarrier.init"
                )
            if is_remote and not is_async_proxy:
                shared.note_remote_access(np.array([block]), np.array([lane]))
            mbarriers.append(barrier)
        return mbarriers

    def arrive(self, barrier: Mbarrier, lane: int, num_arrivals: int, nbytes: int = 0) -> None:
        """Arrive `num_arrivals` times, after `nbytes` more bytes have been announced as expected."""
        if num_arrivals > barrier.pending_arrivals:
            name = self.shared.threads.describe_lane(lane)
            raise ExecutionError(
                f"{name} arrives at {barrier.name}, whose phase {barrier.phase} has had all of its "
                f"{barrier.num_expected_arrivals} arrivals"
            )
        self.expect_tx(barrier, nbytes)
        self.shared.apply_logged_reads()
        clocks = self.shared.clocks
        barrier.arrival_clock = clocks.join(barrier.arrival_clock, clocks.release(np.array([lane])))
        barrier.pending_arrivals -= num_arrivals
        self._complete_phase(barrier)

    def expect_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Expect `nbytes` more bytes; a negative number has arrived."""
        barrier.tx_count += nbytes
        if abs(barrier.tx_count) > MAX_TX_COUNT:
            raise ExecutionError(f"{barrier.name} expects {barrier.tx_count} bytes; at most {MAX_TX_COUNT} are allowed")

    def complete_tx(self, barrier: Mbarrier, nbytes: int) -> None:
        """Record that a copy has written `nbytes` bytes."""
        self.expect_tx(barrier, -nbytes)
        barrier.copies_in_flight -= 1
        clocks = self.shared.clocks
        barrier.last_copy_time = clocks.time
        clock = clocks.make_empty_clock()
        clock[GENERIC_PROXY, clocks.find_columns(barrier.writer_agent)] = clocks.advance_time()
        barrier.arrival_clock = clocks.join(barrier.arrival_clock, clock)
        self._complete_phase(barrier)

    def _complete_phase(self, barrier: Mbarrier) -> None:
        if barrier.pending_arrivals or barrier.tx_count:
            return
        if barrier.copies_in_flight:
            raise RaceError(
                f"race: phase {barrier.phase} of {barrier.name} is complete while copies for it are pending, because "
                "it expects too few bytes"
            )
        barrier.phase_clock, barrier.arrival_clock = barrier.arrival_clock, self.shared.clocks.make_empty_clock()
        barrier.phase += 1
        barrier.pending_arrivals = barrier.num_expected_arrivals

    def wait_parity(self, location: MemoryAddress, lanes: Lanes, parities: NDArray[Any]) -> Iterator[WaitCondition]:
        """Wait until the phase of a parity is complete, and acquire the clocks of the arrivals in it."""
        keys = (lanes // self.shared.threads.lanes_per_block << 25 | location.byte_offsets) << 1 | parities & 1
        _, first_indices, inverse = np.unique(keys, return_index=True, return_inverse=True)
        target_blocks = None if location.target_blocks is None else location.target_blocks[first_indices]
        barriers = self.find_mbarriers(
            replace(location, byte_offsets=location.byte_offsets[first_indices], target_blocks=target_blocks),
            lanes[first_indices],
        )
        phase_waits = [
            (barrier, int(parities[first_index]) & 1, lanes[inverse == number])
            for number, (barrier, first_index) in enumerate(zip(barriers, first_indices.tolist(), strict=True))
        ]
        describe_lanes = self.shared.threads.describe_lanes
        wait = WaitCondition(
            lambda: all(barrier.phase & 1 != parity for barrier, parity, _ in phase_waits),
            lambda: "; ".join(
                f"{describe_lanes(waiting_lanes)} at {barrier}"
                for barrier, parity, waiting_lanes in phase_waits
                if barrier.phase & 1 == parity
            ),
        )
        if not wait.is_ready():
            yield wait
        self.shared.apply_logged_reads()
        for barrier, _, waiting_lanes in phase_waits:
            self.shared.clocks.acquire(waiting_lanes, barrier.phase_clock)

    def check_block_exit(self) -> None:
        """Raise RaceError if a block exits without a wait for its copies."""
        clocks, lanes_per_block = self.shared.clocks, self.shared.threads.lanes_per_block
        for barrier in self._mbarriers.values():
            clock = clocks.merge_lanes(barrier.block * lanes_per_block + np.arange(lanes_per_block))
            known_time = clock[GENERIC_PROXY, clocks.find_columns(barrier.writer_agent)]
            if barrier.copies_in_flight or barrier.last_copy_time >= max(int(known_time), 1):
                raise RaceError(f"a block exits without a wait for the copies of {barrier.name}")
