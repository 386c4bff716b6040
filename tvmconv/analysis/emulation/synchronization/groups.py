"""Groups of what is under way for a thread or a warpgroup: multiplications by wgmma, and bulk copies that store.

Both are issued, made a group of, and waited for but so many of the last groups. Source: PTX ISA, "Async Proxy" and
"wgmma.commit_group", "wgmma.wait_group", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.memory.readers import Reader
from tvmconv.analysis.emulation.memory.registers import Accumulators, Registers
from tvmconv.gpu import WARP, WARPGROUP

if TYPE_CHECKING:
    from tvmconv.analysis.emulation.memory.shared import Shared
    from tvmconv.analysis.emulation.threads import Lanes


@dataclass(frozen=True)
class _Multiplication:
    """What one instruction multiplies.

    Attributes:
        lanes: the first of each warpgroup.
        number: of the group, for each of these.
        chunks: of shared memory that each reads, shape (warpgroups, chunks).
        accumulators: where the result goes.
        rows: which of these registers.
    """

    lanes: Lanes
    number: NDArray[np.int64]
    chunks: NDArray[np.int64]
    accumulators: Accumulators
    rows: NDArray[np.intp]

    def only(self, which: NDArray[np.bool_]) -> _Multiplication:
        """That of some of its warpgroups."""
        return replace(self, lanes=self.lanes[which], number=self.number[which], chunks=self.chunks[which])


@dataclass
class Multiplications:
    """Multiplications by wgmma that are under way, of all warpgroups.

    Attributes:
        shared: the memory that they read.
    """

    shared: Shared
    _under_way: list[_Multiplication] = field(default_factory=list)
    _all: list[Accumulators] = field(default_factory=list)

    def __post_init__(self) -> None:
        """None has been issued."""
        self._committed = np.zeros(self.shared.threads.lanes, np.int64)  # groups, by the first lane of a warpgroup

    def accumulators(self, registers: Registers) -> Accumulators:
        """Have it watched that registers are used as accumulators have to be."""
        if registers.accumulators is None:
            registers.accumulators = Accumulators(registers.name, *registers.data.shape)
            self._all.append(registers.accumulators)
        return registers.accumulators

    def fence(self, lanes: Lanes) -> None:
        """wgmma.fence: what was done with registers is done before what is multiplied into them."""
        for each in self._all:
            each.dirty[lanes // WARP] = False

    def issue(self, groups: NDArray[np.intp], chunks: NDArray[np.int64], into: Accumulators, rows: Lanes) -> None:
        """Warpgroups, which are rows of lanes, begin to read chunks, and to write registers."""
        one = _Multiplication(groups[:, 0], self._committed[groups[:, 0]], chunks, into, rows)
        self._begin(one)
        self._under_way.append(one)

    def commit(self, groups: NDArray[np.intp]) -> None:
        """Make a group of what each warpgroup has issued since its last."""
        self._committed[groups[:, 0]] += 1

    def wait(self, groups: NDArray[np.intp], pending: int) -> None:
        """Wait for all groups of warpgroups but their last so many."""
        waiting = np.zeros(self.shared.threads.lanes, bool)
        waiting[groups[:, 0]] = True
        left = []
        for one in self._under_way:
            done = waiting[one.lanes] & (one.number < self._committed[one.lanes] - pending)
            if done.any():
                self._end(one.only(done))
            if not done.all():
                left.append(one if not done.any() else one.only(~done))
        self._under_way = left
        for one in left:  # of those that have ended some may share chunks or registers with them
            self._begin(one)

    def _begin(self, one: _Multiplication) -> None:
        for reader, which in self._readers(one):
            self.shared.readers.begin(reader, one.chunks[which])
        one.accumulators.busy[one.rows[:, None], self._warps(one)] = True
        one.accumulators.used = True

    def _end(self, one: _Multiplication) -> None:
        for reader, which in self._readers(one):
            self.shared.readers.end(reader, one.chunks[which])
        one.accumulators.busy[one.rows[:, None], self._warps(one)] = False
        one.accumulators.used = bool(one.accumulators.busy.any())

    def _warps(self, one: _Multiplication) -> NDArray[np.intp]:
        return (one.lanes[:, None] // WARP + np.arange(WARPGROUP // WARP)).reshape(-1)

    def _readers(self, one: _Multiplication) -> list[tuple[Reader, NDArray[np.bool_]]]:
        indices = one.lanes % self.shared.threads.padded // WARPGROUP
        return [(Reader("wgmma", i), indices == i) for i in np.unique(indices).tolist()]


@dataclass
class BulkGroups:
    """Bulk copies from shared memory that are under way, of all threads.

    Attributes:
        shared: the memory that they read.
    """

    shared: Shared
    _under_way: list[tuple[int, int, NDArray[np.int64]]] = field(default_factory=list)  # lane, group, chunks

    def __post_init__(self) -> None:
        """None has been issued."""
        self._committed = np.zeros(self.shared.threads.lanes, np.int64)

    def issue(self, lane: int, chunks: NDArray[np.int64]) -> None:
        """A thread has chunks read."""
        self.shared.readers.begin(self._reader(lane), chunks)
        self._under_way.append((lane, int(self._committed[lane]), chunks))

    def commit(self, lanes: Lanes) -> None:
        """Make a group of what each thread has issued since its last."""
        self._committed[lanes] += 1

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Wait for all groups of threads but their last so many."""
        waiting = set(lanes.tolist())
        left = []
        for lane, group, chunks in self._under_way:
            if lane in waiting and group < self._committed[lane] - pending:
                self.shared.readers.end(self._reader(lane), chunks)
            else:
                left.append((lane, group, chunks))
        self._under_way = left
        for lane, _, chunks in left:
            self.shared.readers.begin(self._reader(lane), chunks)

    def _reader(self, lane: int) -> Reader:
        return Reader("bulk copy", lane % self.shared.threads.padded)
