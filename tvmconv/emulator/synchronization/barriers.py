"""Barriers of a warp, of a block, of a part of a block by number, and of a cluster.

Source: PTX ISA, "bar, barrier", "barrier.cluster" and "bar.warp.sync".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.synchronization.fibers import WaitCondition
from tvmconv.target import WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.emulator.memory.shared_memory import SharedMemory
    from tvmconv.emulator.threads import Lanes

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
        """Wait until all threads have arrived at the barrier of each of some lanes."""

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
