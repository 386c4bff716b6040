"""Vector clocks, which record the accesses of other agents that are ordered before a thread.

Synchronization advances the time: barriers, arrivals, and completed copies. An agent's access is ordered before a
thread's next access if it happened before the time that the thread's clock has for the agent. Agents are the threads of
a cluster, and others that write on their behalf, such as the copies of one mbarrier. Source: Mattern, "Virtual Time and
Global States of Distributed Systems" (1989).

A second clock records which of these accesses have passed a fence for the async proxy; TMA and wgmma see a thread's
writes only after it. Source: PTX ISA, "Memory Consistency Model", "Causality order".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.threads import EmulatedThreads, Lanes

GENERIC_PROXY, ASYNC_PROXY = 0, 1
_AGENTS_PER_GROWTH = 16  # number of agent columns that are added at a time


class VectorClocks:
    """Vector clock of each lane; lanes with equal clocks share one row. The current `time` starts at 1."""

    def __init__(self, threads: EmulatedThreads) -> None:
        blocks = len(threads.block_indices)
        self.time = 1
        self._num_lanes = threads.num_lanes
        self._lanes_per_cluster = threads.lanes_per_block * threads.cluster_size  # lanes with columns in a clock
        self._agent_columns = np.arange(threads.num_lanes) % self._lanes_per_cluster  # column of each agent
        self._clocks = np.ones((2 * blocks, 2, self._lanes_per_cluster), np.int32)  # by row, proxy and agent's column
        self._lane_rows = np.arange(threads.num_lanes) // threads.lanes_per_block
        self._num_used_rows = blocks

    def advance_time(self) -> int:
        """Advance the time and return it."""
        self.time += 1
        return self.time

    def add_agent(self) -> int:
        """Add an agent besides the lanes to each cluster, and return its index."""
        agent = len(self._agent_columns)
        column = self._lanes_per_cluster + agent - self._num_lanes
        if column == self._clocks.shape[2]:
            added_columns = np.ones((*self._clocks.shape[:2], _AGENTS_PER_GROWTH), np.int32)
            self._clocks = np.concatenate([self._clocks, added_columns], axis=2)
        self._agent_columns = np.append(self._agent_columns, column)
        return agent

    def find_columns(self, agents: Any) -> Any:
        """Return the columns of agents in a clock."""
        return self._agent_columns[agents]

    def read_times(self, lanes: NDArray[Any], agents: NDArray[Any], proxy: int = GENERIC_PROXY) -> NDArray[np.int32]:
        """Return the times that lanes know of agents, element by element."""
        times: NDArray[np.int32] = self._clocks[self._lane_rows[lanes], proxy, self.find_columns(agents)]
        return times

    def read_latest_times(self, lanes: Lanes, agents: NDArray[Any]) -> NDArray[np.int32]:
        """Return the latest time that each lane knows of any agent in its row of `agents`."""
        columns = self.find_columns(agents)
        times: NDArray[np.int32] = self._clocks[self._lane_rows[lanes][:, None], GENERIC_PROXY, columns].max(axis=1)
        return times

    def merge_lanes(self, lanes: Lanes) -> NDArray[np.int32]:
        """Return the union of the clocks of lanes of one cluster."""
        clock_rows = self._lane_rows[lanes]
        if (clock_rows == clock_rows[0]).all():
            return self._clocks[clock_rows[0]].copy()
        merged: NDArray[np.int32] = self._clocks[np.unique(clock_rows)].max(axis=0)
        return merged

    def intersect_groups(self, groups: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return the intersection of the clocks of each row of `groups`, of shape (groups, 2, agents)."""
        clock_rows = self._lane_rows[groups]
        common_clocks: NDArray[np.int32] = self._clocks[clock_rows[:, 0]]
        for group in np.flatnonzero((clock_rows != clock_rows[:, :1]).any(axis=1)):
            common_clocks[group] = self._clocks[np.unique(clock_rows[group])].min(axis=0)
        return common_clocks

    def release(self, lanes: Lanes) -> NDArray[np.int32]:
        """Return the clock that lanes of one cluster publish: what they know, and their own accesses."""
        clock = self.merge_lanes(lanes)
        clock[GENERIC_PROXY, self.find_columns(lanes)] = self.advance_time()
        return clock

    def make_empty_clock(self) -> NDArray[np.int32]:
        """Return a clock without any accesses."""
        return np.zeros(self._clocks.shape[1:], np.int32)

    def join(self, clock: NDArray[np.int32], other_clock: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the union of two clocks."""
        if clock.shape != other_clock.shape:
            width = max(clock.shape[1], other_clock.shape[1])
            clock, other_clock = (np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in (clock, other_clock))
        return np.maximum(clock, other_clock)

    def acquire(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Add a clock to the clocks of lanes."""
        clock = self.join(clock, self.make_empty_clock())
        for row_lanes in self._group_by_row(lanes):
            self._set_clock(row_lanes, np.maximum(self._clocks[self._lane_rows[row_lanes[0]]], clock))

    def fence_async_proxy(self, lanes: Lanes) -> None:
        """Make the accesses that lanes know of, and their own, visible to the async proxy."""
        time = self.advance_time()
        for row_lanes in self._group_by_row(lanes):
            clock = self._clocks[self._lane_rows[row_lanes[0]]].copy()
            np.maximum(clock[ASYNC_PROXY], clock[GENERIC_PROXY], out=clock[ASYNC_PROXY])
            clock[ASYNC_PROXY, self.find_columns(row_lanes)] = time
            self._set_clock(row_lanes, clock)

    def _group_by_row(self, lanes: Lanes) -> list[Lanes]:
        clock_rows = self._lane_rows[lanes]
        return [lanes[clock_rows == row] for row in np.unique(clock_rows)]

    def _set_clock(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Set the clock of lanes that share a row."""
        row = self._lane_rows[lanes[0]]
        if np.array_equal(clock, self._clocks[row]):
            return
        if np.count_nonzero(self._lane_rows == row) > len(lanes):
            (row,) = self._allocate_rows(1)
            self._lane_rows[lanes] = row
        self._clocks[row] = clock

    def synchronize_groups(self, groups: NDArray[np.intp]) -> None:
        """Synchronize the lanes of each row of `groups`, which are within a cluster."""
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
        """Return the indices of unused rows, and compact the used ones if there are too few."""
        if self._num_used_rows + count > len(self._clocks):
            used_rows, self._lane_rows = np.unique(self._lane_rows, return_inverse=True)
            size = max(len(self._clocks), 2 * (len(used_rows) + count))
            used_clocks = self._clocks[used_rows]
            self._clocks = np.ones((size, *self._clocks.shape[1:]), np.int32)
            self._clocks[: len(used_rows)] = used_clocks
            self._num_used_rows = len(used_rows)
        self._num_used_rows += count
        return np.arange(self._num_used_rows - count, self._num_used_rows)
