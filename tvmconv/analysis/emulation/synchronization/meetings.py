"""Barriers at which threads meet: of a warp, a block, a part of a block by number, or a cluster.

Source: PTX ISA, "bar, barrier", "barrier.cluster" and "bar.warp.sync".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.errors import ExecutionError, RaceError
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.memory.shared import Shared
    from tvmconv.analysis.emulation.synchronization.strands import Wait
    from tvmconv.analysis.emulation.threads import Lanes, Threads

CLUSTER = -1  # the number of the barrier of a cluster
WHOLE = 0  # that of the barrier of a block


@dataclass
class Meeting:
    """Threads that wait for each other.

    Attributes:
        name: of the barrier, in messages.
        count: how many threads have to come.
        lanes: those that have.
        clock: what they know together, when all have.
    """

    name: str
    count: int
    lanes: list[Lanes] = field(default_factory=list)
    clock: NDArray[np.int32] | None = None

    @property
    def came(self) -> int:
        """How many threads have come."""
        return sum(map(len, self.lanes))


@dataclass
class _Wait:
    """Lanes that wait at barriers.

    Attributes:
        meetings: each with the lanes that wait for it.
        threads: all lanes.
    """

    meetings: list[tuple[Meeting, Lanes]]
    threads: Threads

    def ready(self) -> bool:
        """Whether all have come."""
        return all(meeting.clock is not None for meeting, _ in self.meetings)

    def __str__(self) -> str:
        told = []
        for meeting, lanes in self.meetings:
            if meeting.clock is None:
                who = self.threads.names(lanes)
                told.append(
                    f"{who} at {meeting.name} that not all of its threads reach ({meeting.came} of {meeting.count})"
                )
        return "; ".join(told)


class Meetings:
    """The barriers of all blocks.

    Args:
        shared: the memory that they order.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared, self._threads = shared, shared.threads
        self._open: dict[tuple[int, int], Meeting] = {}  # by block or cluster, and number
        self._of_cluster: dict[int, Meeting] = {}  # the one at which a lane has arrived last

    def warp(self, taking: NDArray[np.bool_], real: NDArray[np.bool_]) -> None:
        """A barrier of warps, which never waits, as these are executed in lock step.

        Args:
            taking: which lanes take part.
            real: which there are.

        Raises:
            RaceError: only some of a warp.
        """
        by_warp, there = taking.reshape(-1, WARP), real.reshape(-1, WARP)
        some: NDArray[np.bool_] = np.asarray(by_warp.any(axis=1))
        if not np.array_equal(by_warp & there, there & some[:, None]):
            raise RaceError("a barrier of the warp that not all of its threads reach")
        groups = np.arange(len(taking)).reshape(-1, WARP)
        whole: NDArray[np.bool_] = np.asarray(there.all(axis=1))
        if (some & whole).any():
            self._shared.meet(groups[some & whole])
        for group in groups[some & ~whole]:
            self._shared.meet(group[real[group]][None, :])

    def sync(self, lanes: Lanes, number: Any = WHOLE, count: int | None = None) -> Iterator[Wait]:
        """Arrive at a barrier, and wait until so many threads have; by default all of the block, or the cluster.

        Args:
            lanes: that arrive.
            number: of the barrier, one for all or for each of them.
            count: of threads.
        """
        meetings = self._arrive(lanes, number, count)
        if meetings:
            wait = _Wait(meetings, self._threads)
            if not wait.ready():
                yield wait
            self._learn(meetings)

    def arrive(self, lanes: Lanes, number: Any, count: int | None = None) -> None:
        """Arrive at a barrier, as `sync` does, and do not wait."""
        for meeting, inside in self._arrive(lanes, number, count, at_once=False):
            if isinstance(number, int) and number == CLUSTER:
                self._of_cluster.update(dict.fromkeys(inside.tolist(), meeting))

    def wait_cluster(self, lanes: Lanes) -> Iterator[Wait]:
        """Wait until all threads of the cluster have arrived.

        Raises:
            ExecutionError: these have not arrived themselves.
        """
        by_meeting: dict[int, tuple[Meeting, list[int]]] = {}
        for lane in lanes.tolist():
            meeting = self._of_cluster.pop(lane, None)
            if meeting is None:
                raise ExecutionError(
                    f"{self._threads.name(lane)} waits at a barrier of the cluster at which it has not arrived"
                )
            by_meeting.setdefault(id(meeting), (meeting, []))[1].append(lane)
        meetings = [(meeting, np.array(inside)) for meeting, inside in by_meeting.values()]
        wait = _Wait(meetings, self._threads)
        if not wait.ready():
            yield wait
        self._learn(meetings)

    def _learn(self, meetings: list[tuple[Meeting, Lanes]]) -> None:
        self._shared.settle()
        for meeting, lanes in meetings:
            assert meeting.clock is not None
            self._shared.clocks.learn(lanes, meeting.clock)

    def _arrive(
        self, lanes: Lanes, number: Any, count: int | None, *, at_once: bool = True
    ) -> list[tuple[Meeting, Lanes]]:
        """The meetings at which lanes have arrived, with these; none if they all are whole `at_once`, and have met."""
        cluster = isinstance(number, int) and number == CLUSTER
        threads = self._threads
        size = threads.padded * (threads.cluster if cluster else 1)
        count = count or threads.real * (threads.cluster if cluster else 1)
        homes, numbers = lanes // size, np.broadcast_to(np.asarray(number), lanes.shape)
        if at_once and (numbers == numbers[0]).all():
            present, counts = np.unique(homes, return_counts=True)
            alone = not self._open or not any((home, int(numbers[0])) in self._open for home in present.tolist())
            if alone and (counts == count).all():
                self._shared.meet(lanes.reshape(-1, count))
                return []
        keys = homes * (1 << 8) + numbers + 1
        found = []
        for key in np.unique(keys).tolist():
            inside = lanes[keys == key]
            home, which = key >> 8, (key & 255) - 1
            name = _name(which, count)
            meeting = self._open.setdefault((home, which), Meeting(name, count))
            meeting.lanes.append(inside)
            if meeting.count != count or meeting.came > count:
                raise ExecutionError(
                    f"{threads.names(inside)} at {name}, for {count} threads, of which {meeting.came} have come"
                )
            if meeting.came == count:
                self._shared.settle()
                meeting.clock = self._shared.clocks.released(np.concatenate(meeting.lanes))
                del self._open[home, which]
            found.append((meeting, inside))
        return found


def _name(number: int, count: int) -> str:
    if number == CLUSTER:
        return "a barrier of the cluster"
    return "a barrier of the block" if number == WHOLE else f"the barrier {number} of {count} threads"
