"""Vector clocks: of which accesses of others a thread knows that they have happened.

Time is counted by what orders threads: barriers, arrivals, copies that land. What an agent did before the time that a
thread's clock has for it is ordered before what the thread does next. Agents are the threads of a cluster, and others
that write for them, such as the copies of one mbarrier. Source: Mattern, "Virtual Time and Global States of Distributed
Systems" (1989).

A second clock tells what of it has passed a fence for the async proxy: what threads wrote, TMA and wgmma see only then.
Source: PTX ISA, "Memory Consistency Model", "Causality order".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tvmconv.emulator.threads import EmulatedThreads, Lanes

GENERIC_PROXY, ASYNC_PROXY = 0, 1
_AGENTS_PER_GROWTH = 16  # agents besides threads, that are added at a time


class VectorClocks:
    """A clock for each lane; lanes that know the same have one together.

    Args:
        threads: the lanes.

    Attributes:
        time: the time, from 1 on.
    """

    def __init__(self, threads: EmulatedThreads) -> None:
        blocks = len(threads.block_indices)
        self.time = 1
        self._num_lanes = threads.num_lanes
        self._lanes_per_cluster = threads.lanes_per_block * threads.cluster_size  # lanes that can know of each other
        self._agent_columns = np.arange(threads.num_lanes) % self._lanes_per_cluster  # of a clock, by agent
        self._clocks = np.ones(
            (2 * blocks, 2, self._lanes_per_cluster), np.int32
        )  # by row, SEEN or FENCED, agent of the cluster
        self._lane_rows = np.arange(threads.num_lanes) // threads.lanes_per_block
        self._num_used_rows = blocks

    def advance_time(self) -> int:
        """Time passes."""
        self.time += 1
        return self.time

    def add_agent(self) -> int:
        """Another agent in each cluster, besides the lanes."""
        agent = len(self._agent_columns)
        column = self._lanes_per_cluster + agent - self._num_lanes
        if column == self._clocks.shape[2]:
            added_columns = np.ones((*self._clocks.shape[:2], _AGENTS_PER_GROWTH), np.int32)
            self._clocks = np.concatenate([self._clocks, added_columns], axis=2)
        self._agent_columns = np.append(self._agent_columns, column)
        return agent

    def find_columns(self, agents: Any) -> Any:
        """Where in a clock agents are."""
        return self._agent_columns[agents]

    def read_times(self, lanes: NDArray[Any], agents: NDArray[Any], proxy: int = GENERIC_PROXY) -> NDArray[np.int32]:
        """What lanes know of agents, of the same shape."""
        times: NDArray[np.int32] = self._clocks[self._lane_rows[lanes], proxy, self.find_columns(agents)]
        return times

    def read_latest_times(self, lanes: Lanes, agents: NDArray[Any]) -> NDArray[np.int32]:
        """The latest time that each of some lanes knows of any of its agents, which are a row of an array."""
        times: NDArray[np.int32] = self._clocks[
            self._lane_rows[lanes][:, None], GENERIC_PROXY, self.find_columns(agents)
        ].max(axis=1)
        return times

    def merge_lanes(self, lanes: Lanes) -> NDArray[np.int32]:
        """What lanes of one cluster know together, as a clock."""
        clock_rows = self._lane_rows[lanes]
        if (clock_rows == clock_rows[0]).all():
            return self._clocks[clock_rows[0]].copy()
        merged: NDArray[np.int32] = self._clocks[np.unique(clock_rows)].max(axis=0)
        return merged

    def intersect_groups(self, groups: NDArray[np.intp]) -> NDArray[np.int32]:
        """What all lanes of a group know, of each group (a row of an array); of shape (groups, 2, agents)."""
        clock_rows = self._lane_rows[groups]
        common_clocks: NDArray[np.int32] = self._clocks[clock_rows[:, 0]]
        for group in np.flatnonzero((clock_rows != clock_rows[:, :1]).any(axis=1)):
            common_clocks[group] = self._clocks[np.unique(clock_rows[group])].min(axis=0)
        return common_clocks

    def release(self, lanes: Lanes) -> NDArray[np.int32]:
        """What lanes of one cluster make known now: what they know, and what they did themselves."""
        clock = self.merge_lanes(lanes)
        clock[GENERIC_PROXY, self.find_columns(lanes)] = self.advance_time()
        return clock

    def make_empty_clock(self) -> NDArray[np.int32]:
        """A clock that knows nothing."""
        return np.zeros(self._clocks.shape[1:], np.int32)

    def join(self, clock: NDArray[np.int32], other_clock: NDArray[np.int32]) -> NDArray[np.int32]:
        """What two clocks know together."""
        if clock.shape != other_clock.shape:
            width = max(clock.shape[1], other_clock.shape[1])
            clock, other_clock = (
                np.pad(narrow_clock, ((0, 0), (0, width - narrow_clock.shape[1])))
                for narrow_clock in (clock, other_clock)
            )
        return np.maximum(clock, other_clock)

    def acquire(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Lanes come to know what a clock knows."""
        clock = self.join(clock, self.make_empty_clock())
        for row_lanes in self._group_by_row(lanes):
            self._set_clock(row_lanes, np.maximum(self._clocks[self._lane_rows[row_lanes[0]]], clock))

    def fence_async_proxy(self, lanes: Lanes) -> None:
        """What lanes know, and what they did, may be seen by the async proxy."""
        time = self.advance_time()
        for row_lanes in self._group_by_row(lanes):
            clock = self._clocks[self._lane_rows[row_lanes[0]]].copy()
            np.maximum(clock[ASYNC_PROXY], clock[GENERIC_PROXY], out=clock[ASYNC_PROXY])
            clock[ASYNC_PROXY, self.find_columns(row_lanes)] = time
            self._set_clock(row_lanes, clock)

    def _group_by_row(self, lanes: Lanes) -> list[Lanes]:
        """Lanes by the row that they have."""
        clock_rows = self._lane_rows[lanes]
        return [lanes[clock_rows == row] for row in np.unique(clock_rows)]

    def _set_clock(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Lanes that share a row have this clock now."""
        row = self._lane_rows[lanes[0]]
        if np.array_equal(clock, self._clocks[row]):
            return
        if np.count_nonzero(self._lane_rows == row) > len(lanes):
            (row,) = self._allocate_rows(1)
            self._lane_rows[lanes] = row
        self._clocks[row] = clock

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """Lanes wait for each other: those of a group, which is a row of an array, and is within a cluster."""
        time = self.advance_time()
        clock_rows = self._lane_rows[groups]
        clocks = self._clocks[clock_rows[:, 0]]
        for group in np.flatnonzero((clock_rows != clock_rows[:, :1]).any(axis=1)):
            clocks[group] = self._clocks[np.unique(clock_rows[group])].max(axis=0)
        clocks[np.arange(len(groups))[:, None], GENERIC_PROXY, self.find_columns(groups)] = time
        new_rows = self._allocate_rows(len(groups))
        self._clocks[new_rows] = clocks
        self._lane_rows[groups] = new_rows[:, None]

    def _allocate_rows(self, count: int) -> NDArray[np.intp]:
        """Rows that nobody has."""
        if self._num_used_rows + count > len(self._clocks):
            used_rows, self._lane_rows = np.unique(self._lane_rows, return_inverse=True)
            size = max(len(self._clocks), 2 * (len(used_rows) + count))
            used_clocks = self._clocks[used_rows]
            self._clocks = np.ones((size, *self._clocks.shape[1:]), np.int32)
            self._clocks[: len(used_rows)] = used_clocks
            self._num_used_rows = len(used_rows)
        self._num_used_rows += count
        return np.arange(self._num_used_rows - count, self._num_used_rows)
