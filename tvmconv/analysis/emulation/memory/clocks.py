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
    from tvmconv.analysis.emulation.threads import Lanes, Threads

SEEN, FENCED = 0, 1
_MORE = 16  # agents besides threads, that are added at a time


class Clocks:
    """A clock for each lane; lanes that know the same have one together.

    Args:
        threads: the lanes.

    Attributes:
        now: the time, from 1 on.
    """

    def __init__(self, threads: Threads) -> None:
        blocks = len(threads.blocks)
        self.now = 1
        self._lanes = threads.lanes
        self._span = threads.padded * threads.cluster  # lanes that can know of each other
        self._columns = np.arange(threads.lanes) % self._span  # of a clock, by agent
        self._known = np.ones((2 * blocks, 2, self._span), np.int32)  # by row, SEEN or FENCED, agent of the cluster
        self._row = np.arange(threads.lanes) // threads.padded
        self._used = blocks

    def tick(self) -> int:
        """Time passes."""
        self.now += 1
        return self.now

    def agent(self) -> int:
        """Another agent in each cluster, besides the lanes."""
        agent = len(self._columns)
        column = self._span + agent - self._lanes
        if column == self._known.shape[2]:
            more = np.ones((*self._known.shape[:2], _MORE), np.int32)
            self._known = np.concatenate([self._known, more], axis=2)
        self._columns = np.append(self._columns, column)
        return agent

    def column(self, agents: Any) -> Any:
        """Where in a clock agents are."""
        return self._columns[agents]

    def of(self, lanes: NDArray[Any], agents: NDArray[Any], which: int = SEEN) -> NDArray[np.int32]:
        """What lanes know of agents, of the same shape."""
        found: NDArray[np.int32] = self._known[self._row[lanes], which, self.column(agents)]
        return found

    def latest(self, lanes: Lanes, agents: NDArray[Any]) -> NDArray[np.int32]:
        """The latest time that each of some lanes knows of any of its agents, which are a row of an array."""
        found: NDArray[np.int32] = self._known[self._row[lanes][:, None], SEEN, self.column(agents)].max(axis=1)
        return found

    def united(self, lanes: Lanes) -> NDArray[np.int32]:
        """What lanes of one cluster know together, as a clock."""
        rows = self._row[lanes]
        if (rows == rows[0]).all():
            return self._known[rows[0]].copy()
        found: NDArray[np.int32] = self._known[np.unique(rows)].max(axis=0)
        return found

    def common(self, groups: NDArray[np.intp]) -> NDArray[np.int32]:
        """What all lanes of a group know, of each group (a row of an array); of shape (groups, 2, agents)."""
        rows = self._row[groups]
        found: NDArray[np.int32] = self._known[rows[:, 0]]
        for i in np.flatnonzero((rows != rows[:, :1]).any(axis=1)):
            found[i] = self._known[np.unique(rows[i])].min(axis=0)
        return found

    def released(self, lanes: Lanes) -> NDArray[np.int32]:
        """What lanes of one cluster make known now: what they know, and what they did themselves."""
        clock = self.united(lanes)
        clock[SEEN, self.column(lanes)] = self.tick()
        return clock

    def blank(self) -> NDArray[np.int32]:
        """A clock that knows nothing."""
        return np.zeros(self._known.shape[1:], np.int32)

    def joined(self, clock: NDArray[np.int32], other: NDArray[np.int32]) -> NDArray[np.int32]:
        """What two clocks know together."""
        if clock.shape != other.shape:
            wide = max(clock.shape[1], other.shape[1])
            clock, other = (np.pad(each, ((0, 0), (0, wide - each.shape[1]))) for each in (clock, other))
        return np.maximum(clock, other)

    def learn(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Lanes come to know what a clock knows."""
        clock = self.joined(clock, self.blank())
        for inside in self._sharing(lanes):
            self._change(inside, np.maximum(self._known[self._row[inside[0]]], clock))

    def fence(self, lanes: Lanes) -> None:
        """What lanes know, and what they did, may be seen by the async proxy."""
        now = self.tick()
        for inside in self._sharing(lanes):
            clock = self._known[self._row[inside[0]]].copy()
            np.maximum(clock[FENCED], clock[SEEN], out=clock[FENCED])
            clock[FENCED, self.column(inside)] = now
            self._change(inside, clock)

    def _sharing(self, lanes: Lanes) -> list[Lanes]:
        """Lanes by the row that they have."""
        rows = self._row[lanes]
        return [lanes[rows == row] for row in np.unique(rows)]

    def _change(self, lanes: Lanes, clock: NDArray[np.int32]) -> None:
        """Lanes that share a row have this clock now."""
        row = self._row[lanes[0]]
        if np.array_equal(clock, self._known[row]):
            return
        if np.count_nonzero(self._row == row) > len(lanes):
            (row,) = self._rows(1)
            self._row[lanes] = row
        self._known[row] = clock

    def meet(self, groups: NDArray[np.intp]) -> None:
        """Lanes wait for each other: those of a group, which is a row of an array, and is within a cluster."""
        now = self.tick()
        rows = self._row[groups]
        clocks = self._known[rows[:, 0]]
        for i in np.flatnonzero((rows != rows[:, :1]).any(axis=1)):
            clocks[i] = self._known[np.unique(rows[i])].max(axis=0)
        clocks[np.arange(len(groups))[:, None], SEEN, self.column(groups)] = now
        fresh = self._rows(len(groups))
        self._known[fresh] = clocks
        self._row[groups] = fresh[:, None]

    def _rows(self, count: int) -> NDArray[np.intp]:
        """Rows that nobody has."""
        if self._used + count > len(self._known):
            used, self._row = np.unique(self._row, return_inverse=True)
            size = max(len(self._known), 2 * (len(used) + count))
            kept = self._known[used]
            self._known = np.ones((size, *self._known.shape[1:]), np.int32)
            self._known[: len(used)] = kept
            self._used = len(used)
        self._used += count
        return np.arange(self._used - count, self._used)
