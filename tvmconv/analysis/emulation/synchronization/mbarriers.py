"""mbarriers: objects in shared memory at which threads arrive, and on whose phases they wait.

A phase is complete when so many arrivals as the barrier was made for have come, and all the bytes that it was told to
expect. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.addresses import SHARED_BASE
from tvmconv.analysis.emulation.errors import ExecutionError, RaceError
from tvmconv.analysis.emulation.memory.arrays import check_aligned
from tvmconv.analysis.emulation.memory.clocks import SEEN

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.memory.shared import Address, Shared
    from tvmconv.analysis.emulation.synchronization.strands import Wait
    from tvmconv.analysis.emulation.threads import Lanes, Threads

NBYTES = 8
MAX_COUNT, MAX_BYTES = (1 << 20) - 1, (1 << 20) - 1


@dataclass
class Mbarrier:
    """One mbarrier.

    Attributes:
        name: in messages.
        block: in whose shared memory it lies.
        count: of arrivals in a phase.
        agent: who writes for it: what copies that it waits for have written.
        maker: the lane that has made it, and when.
        made: when.
        fenced: whether others than its block's threads can see that.
        phase: how many are complete.
        left: arrivals that this phase lacks.
        expected: bytes that it lacks; negative where they came before it was told.
        under_way: copies of it that have not landed.
        gathered: what those who have arrived in this phase know.
        clock: what those of the last complete phase knew.
        landed: when its last copy has landed.
    """

    name: str
    block: int
    count: int
    agent: int
    maker: int
    made: int
    gathered: NDArray[np.int32]
    clock: NDArray[np.int32]
    fenced: bool = False
    phase: int = 0
    left: int = 0
    expected: int = 0
    under_way: int = 0
    landed: int = 0

    def __str__(self) -> str:
        missing = [f"{self.left} of {self.count} arrivals"] if self.left else []
        missing += [f"{self.expected} bytes"] if self.expected else []
        return f"{self.name}, whose phase {self.phase} lacks {' and '.join(missing)}"


@dataclass
class _Wait:
    """Lanes that wait for a phase, by its parity, of some barriers."""

    threads: Threads
    waiting: list[tuple[Mbarrier, int, Lanes]]

    def ready(self) -> bool:
        """Whether all phases are complete."""
        return all(barrier.phase & 1 != parity for barrier, parity, _ in self.waiting)

    def __str__(self) -> str:
        return "; ".join(
            f"{self.threads.names(lanes)} at {barrier}"
            for barrier, parity, lanes in self.waiting
            if barrier.phase & 1 == parity
        )


@dataclass
class Mbarriers:
    """The mbarriers of all blocks.

    Attributes:
        shared: the memory that they are in.
    """

    shared: Shared
    _known: dict[tuple[int, int], Mbarrier] = field(default_factory=dict)
    _agents: dict[tuple[int, int], int] = field(default_factory=dict)  # by rank in the cluster and address

    def make(self, where: Address, lanes: Lanes, counts: NDArray[Any]) -> None:
        """mbarrier.init."""
        shared = self.shared
        check_aligned(where.at, NBYTES, "shared memory")
        for block, at in zip((lanes // shared.threads.padded).tolist(), where.at.tolist(), strict=True):
            if (block, at) in self._known:
                raise ExecutionError(f"{self._known[block, at].name} is made again with no mbarrier.inval between")
        shared.reserve(shared.at(where.at, lanes, NBYTES), lanes)
        for lane, at, count in zip(lanes.tolist(), where.at.tolist(), counts.tolist(), strict=True):
            if not 1 <= count <= MAX_COUNT:
                raise ExecutionError(f"an mbarrier of {count} arrivals")
            block = lane // shared.threads.padded
            agent = self._agents.setdefault((block % shared.threads.cluster, at), -1)
            if agent < 0:
                agent = self._agents[block % shared.threads.cluster, at] = shared.clocks.agent()
            clock = shared.clocks.blank()
            name = (
                f"the mbarrier at byte {at - SHARED_BASE} of shared memory of block {shared.threads.block_name(block)}"
            )
            made = shared.clocks.now
            self._known[block, at] = Mbarrier(name, block, count, agent, lane, made, clock, clock.copy(), left=count)

    def end(self, where: Address, lanes: Lanes) -> None:
        """mbarrier.inval."""
        for barrier, lane in zip(self.find(where, lanes), lanes.tolist(), strict=True):
            at = next(key for key, value in self._known.items() if value is barrier)
            del self._known[at]
            one = np.array([lane])
            self.shared.free(self.shared.at(np.array([at[1]]), one, NBYTES), one)

    def fence(self, lanes: Lanes) -> None:
        """What lanes have made can be seen by other blocks, and by the async proxy."""
        inside = set(lanes.tolist())
        for barrier in self._known.values():
            barrier.fenced |= barrier.maker in inside

    def find(self, where: Address, lanes: Lanes, *, by_async: bool = False) -> list[Mbarrier]:
        """The barriers at addresses.

        Raises:
            ExecutionError: there is none.
            RaceError: the lane that uses it does not know that it has been made, or who does cannot see it.
        """
        shared = self.shared
        blocks = lanes // shared.threads.padded if where.blocks is None else where.blocks
        found = []
        for lane, block, at in zip(lanes.tolist(), blocks.tolist(), where.at.tolist(), strict=True):
            barrier = self._known.get((block, at))
            who = shared.threads.name(lane)
            if barrier is None:
                raise ExecutionError(
                    f"{who}: no mbarrier at byte {at - SHARED_BASE} of shared memory of block "
                    f"{shared.threads.block_name(block)}"
                )
            known = shared.clocks.of(np.array(lane), np.array(barrier.maker))
            if lane != barrier.maker and barrier.made >= known:
                raise RaceError(f"race: {who} uses {barrier.name} with no barrier behind its mbarrier.init")
            away = block != lane // shared.threads.padded
            if (by_async or away) and not barrier.fenced:
                raise RaceError(f"race: {who} uses {barrier.name} with no fence.mbarrier_init behind its mbarrier.init")
            if away and not by_async:
                shared.from_afar(np.array([block]), np.array([lane]))
            found.append(barrier)
        return found

    def arrive(self, barrier: Mbarrier, lane: int, count: int, nbytes: int = 0) -> None:
        """Arrive so often, behind a word on how many bytes more to expect."""
        if count > barrier.left:
            raise ExecutionError(
                f"{self.shared.threads.name(lane)} arrives at {barrier.name}, where phase {barrier.phase} has had "
                f"all of its {barrier.count} arrivals"
            )
        self.expect(barrier, nbytes)
        self.shared.settle()
        clocks = self.shared.clocks
        barrier.gathered = clocks.joined(barrier.gathered, clocks.released(np.array([lane])))
        barrier.left -= count
        self._complete(barrier)

    def expect(self, barrier: Mbarrier, nbytes: int) -> None:
        """Expect so many bytes more; what is negative has come."""
        barrier.expected += nbytes
        if abs(barrier.expected) > MAX_BYTES:
            raise ExecutionError(f"{barrier.name} expects {barrier.expected} bytes at a time")

    def land(self, barrier: Mbarrier, nbytes: int) -> None:
        """So many bytes have been written for it."""
        self.expect(barrier, -nbytes)
        barrier.under_way -= 1
        clocks = self.shared.clocks
        barrier.landed = clocks.now
        clock = clocks.blank()
        clock[SEEN, clocks.column(barrier.agent)] = clocks.tick()
        barrier.gathered = clocks.joined(barrier.gathered, clock)
        self._complete(barrier)

    def _complete(self, barrier: Mbarrier) -> None:
        if barrier.left or barrier.expected:
            return
        if barrier.under_way:
            raise RaceError(
                f"race: phase {barrier.phase} of {barrier.name} is complete while copies for it are under way: it was "
                "told to expect too few bytes"
            )
        barrier.clock, barrier.gathered = barrier.gathered, self.shared.clocks.blank()
        barrier.phase += 1
        barrier.left = barrier.count

    def wait(self, where: Address, lanes: Lanes, parities: NDArray[Any]) -> Iterator[Wait]:
        """Wait until the phase of a parity is complete, and know what those who have arrived in it did."""
        keys = (lanes // self.shared.threads.padded << 25 | where.at) << 1 | parities & 1
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        whose = None if where.blocks is None else where.blocks[first]
        barriers = self.find(replace(where, at=where.at[first], blocks=whose), lanes[first])
        waiting = [
            (barrier, int(parities[i]) & 1, lanes[inverse == n])
            for n, (barrier, i) in enumerate(zip(barriers, first.tolist(), strict=True))
        ]
        wait = _Wait(self.shared.threads, waiting)
        if not wait.ready():
            yield wait
        self.shared.settle()
        for barrier, _, inside in waiting:
            self.shared.clocks.learn(inside, barrier.clock)

    def leave(self) -> None:
        """Raise RaceError if a block ends that has not waited for its copies."""
        clocks, padded = self.shared.clocks, self.shared.threads.padded
        for barrier in self._known.values():
            known = clocks.united(barrier.block * padded + np.arange(padded))[SEEN, clocks.column(barrier.agent)]
            if barrier.under_way or barrier.landed >= max(int(known), 1):
                raise RaceError(f"a block ends that has not waited for what is copied: for {barrier.name}")
