"""Barriers at which threads meet: of a warp, a block, a part of a block by number, or a cluster.

Source: PTX ISA, "bar, barrier", "barrier.cluster" and "bar.warp.sync".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory import ExecutionError, RaceError
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from tvmconv.analysis.machine import Machine, Mask
    from tvmconv.analysis.memory import Lanes
    from tvmconv.analysis.strands import Wait

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
        machine: what they run on.
    """

    meetings: list[tuple[Meeting, Lanes]]
    machine: Machine

    def ready(self) -> bool:
        """Whether all have come."""
        return all(meeting.clock is not None for meeting, _ in self.meetings)

    def __str__(self) -> str:
        told = []
        for meeting, lanes in self.meetings:
            if meeting.clock is None:
                who = self.machine.who(lanes)
                told.append(
                    f"{who} at {meeting.name} that not all of its threads reach ({meeting.came} of {meeting.count})"
                )
        return "; ".join(told)


class Meetings:
    """The barriers of all blocks.

    Args:
        machine: what their threads run on.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._open: dict[tuple[int, int], Meeting] = {}  # by block or cluster, and number
        self._of_cluster: dict[int, Meeting] = {}  # the one at which a lane has arrived last

    def warp(self, mask: Mask) -> None:
        """A barrier of the warps that lanes are all of; it never waits, as warps are executed in lock step."""
        machine = self._machine
        taking = machine.real if mask is None else mask
        by_warp, real = taking.reshape(-1, WARP), machine.real.reshape(-1, WARP)
        some: NDArray[np.bool_] = np.asarray(by_warp.any(axis=1))
        if not np.array_equal(by_warp & real, real & some[:, None]):
            raise RaceError("a barrier of the warp that not all of its threads reach")
        groups = machine.all_lanes.reshape(-1, WARP)[some]
        whole: NDArray[np.bool_] = np.asarray(real[some].all(axis=1))
        if whole.any():
            machine.shared.meet(groups[whole])
        for group in groups[~whole]:
            machine.shared.meet(group[machine.real[group]][None, :])

    def sync(self, mask: Mask, number: Any = WHOLE, count: int | None = None) -> Iterator[Wait]:
        """Arrive at a barrier, and wait until so many threads have; by default all of the block, or the cluster."""
        lanes = self._machine.lanes(mask)
        meetings = self._arrive(lanes, number, count)
        if meetings:
            wait = _Wait(meetings, self._machine)
            if not wait.ready():
                yield wait
            self._learn(meetings)

    def arrive(self, mask: Mask, number: Any, count: int | None = None) -> None:
        """Arrive at a barrier, and do not wait."""
        lanes = self._machine.lanes(mask)
        for meeting, inside in self._arrive(lanes, number, count, at_once=False):
            if isinstance(number, int) and number == CLUSTER:
                self._of_cluster.update(dict.fromkeys(inside.tolist(), meeting))

    def wait_cluster(self, mask: Mask) -> Iterator[Wait]:
        """Wait until all threads of the cluster have arrived.

        Raises:
            ExecutionError: these have not arrived themselves.
        """
        lanes = self._machine.lanes(mask)
        by_meeting: dict[int, tuple[Meeting, list[int]]] = {}
        for lane in lanes.tolist():
            meeting = self._of_cluster.pop(lane, None)
            if meeting is None:
                raise ExecutionError(
                    f"{self._machine.shared.thread(lane)} waits at a barrier of the cluster at which it has not arrived"
                )
            by_meeting.setdefault(id(meeting), (meeting, []))[1].append(lane)
        meetings = [(meeting, np.array(inside)) for meeting, inside in by_meeting.values()]
        wait = _Wait(meetings, self._machine)
        if not wait.ready():
            yield wait
        self._learn(meetings)

    def _learn(self, meetings: list[tuple[Meeting, Lanes]]) -> None:
        self._machine.shared.settle()
        for meeting, lanes in meetings:
            assert meeting.clock is not None
            self._machine.clocks.learn(lanes, meeting.clock)

    def _arrive(
        self, lanes: Lanes, number: Any, count: int | None, *, at_once: bool = True
    ) -> list[tuple[Meeting, Lanes]]:
        """The meetings at which lanes have arrived, with these; none if they all are whole `at_once`, and have met."""
        machine = self._machine
        cluster = isinstance(number, int) and number == CLUSTER
        threads = machine.threads
        size = threads.padded * (threads.cluster if cluster else 1)
        count = count or threads.real * (threads.cluster if cluster else 1)
        homes = lanes // size
        if at_once and np.ndim(number) == 0:
            present, counts = np.unique(homes, return_counts=True)
            alone = not self._open or not any((home, int(number)) in self._open for home in present.tolist())
            if alone and (counts == count).all():
                machine.shared.meet(lanes.reshape(-1, count))
                return []
        numbers = np.broadcast_to(np.asarray(number), machine.all_lanes.shape)[lanes]
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
                    f"{machine.who(inside)} at {name}, for {count} threads, of which {meeting.came} have come"
                )
            if meeting.came == count:
                machine.shared.settle()
                meeting.clock = machine.clocks.released(np.concatenate(meeting.lanes))
                del self._open[home, which]
            found.append((meeting, inside))
        return found


def _name(number: int, count: int) -> str:
    if number == CLUSTER:
        return "a barrier of the cluster"
    return "a barrier of the block" if number == WHOLE else f"the barrier {number} of {count} threads"
