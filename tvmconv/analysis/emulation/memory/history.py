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

from tvmconv.analysis.emulation.addresses import CHUNK, SHARED_BASE
from tvmconv.analysis.emulation.errors import ExecutionError, RaceError
from tvmconv.analysis.emulation.memory.arrays import check_aligned
from tvmconv.analysis.emulation.memory.clocks import FENCED, SEEN, Clocks
from tvmconv.analysis.emulation.memory.readers import PENDING, Readers
from tvmconv.analysis.emulation.threads import Lanes, Threads
from tvmconv.arithmetic import round_up
from tvmconv.gpu import WARP

ALIGNMENT = 128  # bytes, of a shared buffer
MBARRIER = -2  # the writer of what is an mbarrier


@dataclass
class History:
    """The units of the shared memory of all blocks that are executed together, and who touched each of them when.

    Attributes:
        threads: the lanes.
        nbytes: of a block.
        unit: bytes that are told apart.
        clocks: what each lane knows of the others.
        readers: what reads behind its thread's back.
    """

    threads: Threads
    nbytes: int
    unit: int

    def __post_init__(self) -> None:
        """Nobody has touched anything."""
        self.nbytes = round_up(max(self.nbytes, ALIGNMENT), ALIGNMENT)
        lanes, size = self.threads.lanes, len(self.threads.blocks) * self.nbytes // self.unit
        self._written = np.zeros(size, np.int32)  # when, and by which lane
        self._writer = np.full(size, -1, np.int32)
        # Reads that nothing is ordered behind yet: the first and the last of the lanes, and when each of them has read.
        self._first, self._last = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self._read_first, self._read_last = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._log: list[tuple[NDArray[np.int64], Lanes, Lanes, int]] = []  # reads that are not in these yet
        self._block = np.arange(lanes) // self.threads.padded  # of a lane
        self.clocks = Clocks(self.threads)
        self.readers = Readers(self.threads, self.clocks, self.nbytes // CHUNK)
        self._ordered = 1  # what happened before this time is ordered before everything, within a block

    def at(self, addresses: NDArray[np.int64], lanes: Lanes, nbytes: int, blocks: Lanes | None = None) -> Any:
        """Which units accesses touch, of shape (accesses, units).

        Args:
            addresses: in the block's shared memory, behind `SHARED_BASE`.
            lanes: that access them.
            nbytes: of an access.
            blocks: whose memory it is, if not the lane's own.
        """
        offsets = addresses - SHARED_BASE
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self.nbytes):
            worst = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {worst} of shared memory, which has {self.nbytes} bytes"
            )
        check_aligned(offsets, nbytes, "shared memory")
        blocks = self._block[lanes] if blocks is None else blocks
        first = (blocks * self.nbytes + offsets) // self.unit
        count = nbytes // self.unit
        return first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def chunks(self, addresses: NDArray[np.int64], blocks: Lanes) -> NDArray[np.int64]:
        """Which chunks of 16 bytes lie at addresses, of shape (accesses, chunks), in the memory of a block for each."""
        offsets = addresses - SHARED_BASE
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + CHUNK > self.nbytes):
            worst = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {CHUNK} bytes at byte {worst} of shared memory, which has {self.nbytes} bytes"
            )
        if np.bitwise_or.reduce(offsets, axis=None) % CHUNK:
            raise ExecutionError(f"misaligned: chunks of {CHUNK} bytes of shared memory")
        return (blocks[:, None] * self.nbytes + offsets) // CHUNK

    def meet(self, groups: NDArray[np.intp]) -> None:
        """A barrier of lanes that wait for each other: each row of an array, within a cluster."""
        everybody = groups.size == len(self.threads.blocks) * self.threads.real
        whole = everybody and groups.shape[1] == self.threads.cluster * self.threads.real
        if not whole:
            self.settle()
        self._log.clear()  # as everything is ordered behind them now
        self.clocks.meet(groups)
        if whole:
            self._ordered = self.clocks.now

    def settle(self) -> None:
        """Take the logged reads into account, before anybody comes to know more."""
        for units, first, last, when in self._log:
            flat = units.reshape(-1)
            low = np.broadcast_to(first[:, None], units.shape).reshape(-1).astype(np.int32)
            high = np.broadcast_to(last[:, None], units.shape).reshape(-1).astype(np.int32)
            # Reads that this one is ordered behind are forgotten.
            gone = self._read_first[flat] < self.clocks.of(low, np.maximum(self._first[flat], 0))
            gone &= self._read_last[flat] < self.clocks.of(low, np.maximum(self._last[flat], 0))
            self._first[flat[gone]], self._last[flat[gone]] = np.int32(2**30), np.int32(-1)
            np.minimum.at(self._first, flat, low)
            np.maximum.at(self._last, flat, high)
            self._read_first[flat[self._first[flat] == low]] = when
            self._read_last[flat[self._last[flat] == high]] = when
        self._log.clear()

    # --- races ---

    def _check_read(self, units: NDArray[np.int64], lanes: Lanes, whole_warp: bool) -> None:
        """Raise RaceError unless lanes may read units; remember that they have."""
        written = self._written[units]
        if written.size and int(written.max()) >= self._ordered:
            self._check(written, self._writer[units], units, lanes, "reads", whole_warp)
        first, last = (lanes // WARP * WARP, lanes // WARP * WARP + WARP - 1) if whole_warp else (lanes, lanes)
        self._log.append((units, first, last, self.clocks.now))

    def _check_write(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        written = self._written[units]
        if written.size and int(written.max()) >= self._ordered:
            self._check(written, self._writer[units], units, lanes, "writes")
        self.settle()
        for when, readers in ((self._read_first, self._first), (self._read_last, self._last)):
            read = when[units]
            if read.size and int(read.max()) >= self._ordered:
                self._check(read, readers[units], units, lanes, "overwrites")
        self._check_readers(units // (CHUNK // self.unit), lanes)

    def _check_readers(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        if found := self.readers.violated(chunks, lanes):
            lane, chunk, reader, pending = found
            why = "nobody has waited for it" if pending else "nothing orders this behind its end"
            place = self._place(chunk * (CHUNK // self.unit))
            raise RaceError(
                f"race: {self.threads.name(lane)} writes {place}, which a {reader.kind} may still read: {why}"
            )

    def _check(
        self,
        when: NDArray[np.int32],
        who: NDArray[np.int32],
        units: NDArray[np.int64],
        lanes: Lanes,
        what: str,
        whole_warp: bool = False,
    ) -> None:
        """Raise RaceError if an access is not ordered behind that of the lanes `who` before it."""
        mine = np.broadcast_to(lanes[:, None], units.shape)
        known = self.clocks.of(mine, who)
        bad = (when >= known) & ((who != mine) | whole_warp) | (when == PENDING)
        if bad.any():
            at = tuple(index[0] for index in np.nonzero(bad))
            self._race(int(mine[at]), int(who[at]), int(when[at]), int(units[at]), what, whole_warp)

    def _race(self, lane: int, other: int, when: int, unit: int, what: str, whole_warp: bool) -> None:
        who, place = self.threads.name(lane), self._place(unit)
        who = f"the warp of {who}" if whole_warp else who
        if other == MBARRIER:
            raise RaceError(f"{who} {what} {place}, where an mbarrier lies")
        if when == PENDING:
            raise RaceError(f"{who} {what} {place}, where an asynchronous copy goes that nobody has waited for")
        if other >= self.threads.lanes:
            raise RaceError(f"race: {who} {what} {place}, whose copy it has not waited for")
        before = "has read" if what == "overwrites" else "has written"
        raise RaceError(
            f"race: {who} {what} {place}, which {self.threads.name(other)} {before} with no barrier between"
        )

    # --- races with the async proxy ---

    def _check_proxy(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], what: str) -> None:
        """Raise RaceError unless all lanes of a group know who wrote chunks, and that the async proxy sees it."""
        written, writer = self._rows(self._written)[chunks], self._rows(self._writer)[chunks]
        if (written == written[..., :1]).all() and (writer == writer[..., :1]).all():
            written, writer = written[..., 0], writer[..., 0]
        else:
            written, writer = (each.reshape(len(chunks), -1) for each in (written, writer))
        clocks, column = self.clocks.common(groups), self.clocks.column(writer)
        row = np.arange(len(chunks))[:, None]
        own = (writer == groups[:, :1]) & (groups.shape[1] == 1)
        unseen = (written >= clocks[row, SEEN, column]) & ~own | (written == PENDING)
        unfenced = (written >= clocks[row, FENCED, column]) & (written > 0) & (writer < self.threads.lanes)
        for bad in (unseen, unfenced):
            if bad.any():
                i, j = np.argwhere(bad)[0].tolist()
                unit = int(chunks[i, j * chunks.shape[1] // written.shape[1]]) * (CHUNK // self.unit)
                lane, other = int(groups[i, 0]), int(writer[i, j])
                if bad is unseen:
                    self._race(lane, other, int(written[i, j]), unit, what, False)
                raise RaceError(
                    f"race: {self.threads.name(lane)} {what} {self._place(unit)}, which {self.threads.name(other)} "
                    "has written with no fence.proxy.async behind it"
                )

    def _check_write_async(self, chunks: NDArray[np.int64], lanes: Lanes) -> None:
        """Raise RaceError unless the async proxy may write chunks for lanes."""
        self._check_proxy(chunks, lanes[:, None], "has a bulk copy write")
        self.settle()
        for when, readers in ((self._read_first, self._first), (self._read_last, self._last)):
            read = self._rows(when)[chunks]
            if read.any():
                units = np.arange(CHUNK // self.unit) + chunks[:, :, None] * (CHUNK // self.unit)
                units = units.reshape(len(chunks), -1)
                self._check(read.reshape(units.shape), readers[units], units, lanes, "overwrites")
        self._check_readers(chunks, lanes)

    def _rows(self, of: NDArray[Any]) -> NDArray[Any]:
        """An array of something for each unit, by chunk."""
        return of.reshape(-1, CHUNK // self.unit)

    def _place(self, units: Any) -> str:
        unit = int(np.asarray(units).reshape(-1)[0])
        return f"byte {unit * self.unit % self.nbytes} of shared memory"
