"""The memory of an executed kernel: arrays in global memory, registers, and shared memory that knows who touched it.

Memory that nobody has written is full of ones in every bit, which is NaN in every floating-point type, so that what is
computed from it shows. What is out of bounds, misaligned or a race is an `ExecutionError`.

Lanes are threads: those of all blocks that are executed together, a multiple of a warp for each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.memory.clocks import FENCED, SEEN, Clocks
from tvmconv.analysis.emulation.memory.readers import CHUNK, PENDING, Readers
from tvmconv.analysis.emulation.threads import Lanes, Threads
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvmconv.tensor_map import TensorMap

VECTOR_BYTES = 16  # the widest access of a thread; wider vectors are several of them
SHARED_BASE = 1024  # where shared memory begins, so that the address 0 is nowhere
ALIGNMENT = 128  # bytes, of a shared buffer

Bytes = NDArray[np.uint8]


class ExecutionError(AnalysisError):
    """A kernel does what no kernel may: it races, leaves its arrays, or is misaligned."""


class RaceError(ExecutionError):
    """Threads race for memory, do not wait for a copy, or do not all reach a barrier."""


@dataclass
class Array:
    """An array in global memory.

    Attributes:
        name: of the parameter.
        dtype: of an element.
        size: elements.
        raw: its bytes, filled up to whole 16.
    """

    name: str
    dtype: np.dtype[Any]
    size: int
    raw: Bytes

    @classmethod
    def of(cls, name: str, values: NDArray[Any]) -> Array:
        """A copy of an array."""
        found = cls.unwritten(name, values.dtype, values.size)
        found.raw[: values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return found

    @classmethod
    def unwritten(cls, name: str, dtype: np.dtype[Any], size: int) -> Array:
        """An array that nobody has written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.full(-(-nbytes // VECTOR_BYTES) * VECTOR_BYTES, 0xFF, np.uint8))

    @classmethod
    def zeros(cls, name: str, dtype: np.dtype[Any], size: int) -> Array:
        """An array of zeros, which takes no memory where nothing is written."""
        nbytes = size * dtype.itemsize
        return cls(name, dtype, size, np.zeros(-(-nbytes // VECTOR_BYTES) * VECTOR_BYTES, np.uint8))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def values(self) -> NDArray[Any]:
        """The elements: a view."""
        return self.raw[: self.nbytes].view(self.dtype)

    def check(self, offsets: NDArray[np.int64], nbytes: int) -> None:
        """Raise ExecutionError unless accesses of so many bytes lie in the array, and are aligned to their size."""
        check_aligned(offsets, nbytes, self.name)
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) + nbytes > self.nbytes):
            at = int(offsets.min()) if int(offsets.min()) < 0 else int(offsets.max())
            raise ExecutionError(
                f"out of bounds: {nbytes} bytes at byte {at} of {self.name}, which has {self.nbytes} bytes"
            )

    def read(self, offsets: NDArray[np.int64], nbytes: int) -> Bytes:
        """The bytes at offsets, of shape (accesses, nbytes)."""
        self.check(offsets, nbytes)
        unit = np.dtype(f"u{_unit(nbytes)}")
        first = offsets // unit.itemsize
        found = self.raw.view(unit)[first[:, None] + np.arange(nbytes // unit.itemsize)]
        return found.view(np.uint8)

    def write(self, offsets: NDArray[np.int64], given: Bytes) -> None:
        """Write rows of bytes at offsets."""
        nbytes = given.shape[1]
        self.check(offsets, nbytes)
        unit = np.dtype(f"u{_unit(nbytes)}")
        where = (offsets // unit.itemsize)[:, None] + np.arange(nbytes // unit.itemsize)
        words = given.view(unit)
        self.raw.view(unit)[where] = words
        if not np.array_equal(self.raw.view(unit)[where], words):
            raise RaceError(f"race: threads store different values to one element of {self.name} at a time")


def _unit(nbytes: int) -> int:
    """The widest integer, in bytes, that bytes are whole numbers of."""
    return next(unit for unit in (8, 4, 2, 1) if nbytes % unit == 0)


def check_aligned(offsets: NDArray[np.int64], nbytes: int, name: str) -> None:
    """Raise ExecutionError unless accesses are aligned to their size, or to 16 bytes if they are wider."""
    aligned = min(nbytes & -nbytes, VECTOR_BYTES)
    if offsets.size and np.bitwise_or.reduce(offsets) & (aligned - 1):
        raise ExecutionError(f"misaligned: {nbytes} bytes at byte {int(offsets[offsets % aligned != 0][0])} of {name}")


@dataclass
class _Copies:
    """Asynchronous copies of one instruction that have not landed.

    Attributes:
        lanes: that issued them.
        group: of each lane.
        units: of shared memory that each writes, shape (lanes, units).
        data: what lands there.
    """

    lanes: Lanes
    group: NDArray[np.int64]
    units: NDArray[np.int64]
    data: NDArray[Any]


MBARRIER = -2  # the writer of what is an mbarrier


@dataclass
class Shared:
    """The shared memory of all blocks that are executed together, in bytes behind one another, and who touched it when.

    A write is ordered before another thread's access by what makes it known to that thread, such as a barrier between
    them (`clocks`). An access that is not ordered behind a write, and a write that is not ordered behind an access, is
    a race. An asynchronous copy is a write at the time at which its thread waits for it; until then nobody may touch
    where it goes. A copy of TMA is a write by its mbarrier, when it lands. Of many threads that read a place, the first
    and the last are remembered.

    Attributes:
        threads: the lanes.
        nbytes: of a block.
        unit: bytes that are told apart.
        clocks: what each lane knows of the others.
        readers: what reads behind its thread's back.
        checked: whether races are looked for, and values kept.
    """

    checked: ClassVar[bool] = True
    threads: Threads
    nbytes: int
    unit: int
    _data: NDArray[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Nobody has touched anything."""
        self.nbytes = -(-max(self.nbytes, ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        blocks, lanes = len(self.threads.blocks), self.threads.lanes
        size = blocks * self.nbytes // self.unit
        self._data = np.full(size, -1, f"i{self.unit}").view(f"u{self.unit}")
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
        self._copies: list[_Copies] = []
        self._committed = np.zeros(lanes, np.int64)  # groups of asynchronous copies, by lane
        self._from_afar: dict[tuple[int, int], int] = {}  # when a block's memory was last accessed by a lane of another

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

    def read(self, units: NDArray[np.int64], lanes: Lanes, *, whole_warp: bool = False) -> NDArray[Any]:
        """What lies in units.

        Args:
            units: of shape (accesses, units).
            lanes: that read them.
            whole_warp: whether all lanes of the warp read them, not only the one that is named.
        """
        written = self._written[units]
        if written.size and int(written.max()) >= self._ordered:
            self._check(written, self._writer[units], units, lanes, "reads", whole_warp)
        first, last = (lanes // WARP * WARP, lanes // WARP * WARP + WARP - 1) if whole_warp else (lanes, lanes)
        self._log.append((units, first, last, self.clocks.now))
        return self._data[units]

    def write(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Write to units, each as wide as the memory's unit."""
        self._check_write(units, lanes)
        self._put(units, lanes, data)

    def _put(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        self._data[units] = data
        if not np.array_equal(self._data[units], data):
            raise RaceError(f"race: threads store different values to {self._place(units)} at a time")
        self._writer[units] = lanes[:, None]
        self._written[units] = self.clocks.now

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

    def copy(self, units: NDArray[np.int64], lanes: Lanes, data: NDArray[Any]) -> None:
        """Start an asynchronous copy."""
        self._check_write(units, lanes)
        self._copies.append(_Copies(lanes, self._committed[lanes], units, data))
        self._written[units] = PENDING
        self._writer[units] = lanes[:, None]

    def commit(self, lanes: Lanes) -> None:
        """Make a group of each lane's copies since its last group."""
        self._committed[lanes] += 1

    def wait(self, lanes: Lanes, pending: int) -> None:
        """Let all groups of each lane land but its last so many."""
        waiting = np.zeros(self.threads.lanes, bool)
        waiting[lanes] = True
        left = []
        for copies in self._copies:
            landed = waiting[copies.lanes] & (copies.group < self._committed[copies.lanes] - pending)
            if landed.any():
                self._put(copies.units[landed], copies.lanes[landed], copies.data[landed])
            if not landed.all():
                kept = ~landed
                left.append(_Copies(copies.lanes[kept], copies.group[kept], copies.units[kept], copies.data[kept]))
        self._copies = left

    # --- the async proxy ---

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

    def _rows(self, of: NDArray[Any]) -> NDArray[Any]:
        """An array of something for each unit, by chunk."""
        return of.reshape(-1, CHUNK // self.unit)

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

    def read_async(self, chunks: NDArray[np.int64], groups: NDArray[np.intp], reader: str) -> Bytes:
        """What lies in chunks, of shape (groups, chunks, 16), read by the async proxy for groups of lanes."""
        self._check_proxy(chunks, groups, f"has {reader} read")
        found: Bytes = self._data.view(np.uint8).reshape(-1, CHUNK)[chunks]
        return found

    def write_async(self, chunks: NDArray[np.int64], lanes: Lanes, agents: Lanes) -> None:
        """Begin to write chunks by the async proxy.

        Args:
            chunks: of shape (copies, chunks).
            lanes: that have them written, one for each copy.
            agents: who writes, for each copy.
        """
        self._check_proxy(chunks, lanes[:, None], "has a bulk copy write")
        self.settle()
        for when, readers in ((self._read_first, self._first), (self._read_last, self._last)):
            read = self._rows(when)[chunks]
            if read.any():
                units = np.arange(CHUNK // self.unit) + chunks[:, :, None] * (CHUNK // self.unit)
                units = units.reshape(len(chunks), -1)
                self._check(read.reshape(units.shape), readers[units], units, lanes, "overwrites")
        self._check_readers(chunks, lanes)
        self._rows(self._written)[chunks] = PENDING
        self._rows(self._writer)[chunks] = agents[:, None, None]

    def land(self, chunks: NDArray[np.int64], data: Bytes) -> None:
        """What the async proxy writes is there."""
        self._data.view(np.uint8).reshape(-1, CHUNK)[chunks] = data
        self._rows(self._written)[chunks] = self.clocks.now

    def reserve(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make units an mbarrier, which nothing else may access."""
        self._check_write(units, lanes)
        self._written[units], self._writer[units] = PENDING, MBARRIER

    def free(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        """Make them memory again, that a lane writes."""
        self._written[units], self._writer[units] = self.clocks.now, lanes[:, None]

    # --- what orders ---

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

    def from_afar(self, blocks: Lanes, lanes: Lanes) -> None:
        """Note that lanes access the memory of other blocks of the cluster, which must not end before they have."""
        for block, lane in set(zip(blocks.tolist(), lanes.tolist(), strict=True)):
            self._from_afar[block, lane] = self.clocks.now

    def end(self) -> None:
        """Raise RaceError if a block may have ended while others access its memory, or its own copies do."""
        home = np.arange(self.threads.padded)
        for (block, lane), when in self._from_afar.items():
            known = self.clocks.united(block * self.threads.padded + home)[SEEN, self.clocks.column(lane)]
            if block != lane // self.threads.padded and when >= known:
                raise RaceError(
                    f"a block may end, and its shared memory with it, while others of its cluster access it: "
                    f"{self.threads.name(lane)} that of block {self.threads.block_name(block)}"
                )
        if pending := self.readers.pending():
            raise RaceError(
                f"block {self.threads.block_name(pending[1])} may end while a bulk copy still reads its shared memory"
            )

    def _place(self, units: Any) -> str:
        unit = int(np.asarray(units).reshape(-1)[0])
        return f"byte {unit * self.unit % self.nbytes} of shared memory"


@dataclass(frozen=True)
class Address:
    """Where an access goes.

    Attributes:
        memory: which.
        at: bytes, of each lane.
        name: of the array or buffer.
        blocks: whose shared memory it is, if it may be another block's.
    """

    memory: Array | Shared
    at: NDArray[np.int64]
    name: str
    blocks: Lanes | None = None


@dataclass(frozen=True)
class Mapped:
    """An array as TMA is told of it: what a kernel is given that takes a tensor map.

    Attributes:
        array: the array.
        told: how it lies, and what one copy takes.

    Raises:
        ExecutionError: the array is smaller than that.
    """

    array: Array
    told: TensorMap

    def __post_init__(self) -> None:
        if self.told.nbytes > self.array.nbytes:
            raise ExecutionError(f"{self.told}, of {self.told.nbytes} bytes: {self.array.name} has {self.array.nbytes}")

    @property
    def name(self) -> str:
        """Of the array."""
        return self.array.name


class Accumulators:
    """How registers are used that wgmma writes.

    Args:
        name: of their buffer.
        elements: of it.
        lanes: that have them.

    Attributes:
        busy: whether something is being written to them, shape (elements, warps).
        used: whether any is busy.
        dirty: whether they were accessed otherwise since the last wgmma.fence, by warp.
    """

    def __init__(self, name: str, elements: int, lanes: int) -> None:
        self.name = name
        self.busy = np.zeros((elements, lanes // WARP), bool)
        self.used = False
        self.dirty = np.ones(lanes // WARP, bool)

    def touch(self, at: Any, lanes: NDArray[np.bool_] | None) -> None:
        """Elements are read or written by lanes, of a mask or all.

        Raises:
            RaceError: they are busy.
        """
        warps = np.ones(len(self.dirty), bool) if lanes is None else lanes.reshape(-1, WARP).any(axis=1)
        if self.used and self.busy[np.unique(at)][:, warps].any():
            raise RaceError(f"race: {self.name} is accessed while wgmma writes it: no wgmma.wait_group covers that")
        self.dirty[warps] = True


class Later:
    """A load that is told of when what it loads is read, by those lanes that read it.

    Args:
        told: tells of it, for the lanes of a mask.
        mask: of the lanes that load.
    """

    def __init__(self, told: Callable[[NDArray[np.bool_] | None], None], mask: NDArray[np.bool_] | None) -> None:
        self._told, self._mask = told, mask
        self._left: NDArray[np.bool_] | None = mask if mask is None else mask.copy()
        self._open = True

    def is_of(self, mask: NDArray[np.bool_] | None) -> bool:
        """Whether it is of the lanes of a mask."""
        return self._mask is mask or (self._mask is not None and mask is not None and bool((self._mask == mask).all()))

    def tell(self, mask: NDArray[np.bool_] | None) -> None:
        """Those of its lanes that are of a mask read it; None for all."""
        if not self._open:
            return
        if mask is None or (self._left is not None and not (self._left & ~mask).any()):
            self._open = False
            self._told(self._left)
            return
        reading = mask if self._left is None else mask & self._left
        if reading.any():
            self._told(reading)
        self._left = ~mask if self._left is None else self._left & ~mask


@dataclass
class Registers:
    """A buffer of registers: each thread has its own.

    Attributes:
        name: of the buffer.
        data: its elements, shape (elements, lanes).
        written: whether they have been, same shape.
        loaded: whether what is in them depends on what is in memory, shape (elements,).
        accumulators: how they are used, if wgmma writes them.
        waiting: by element, what is to be told of the load that it comes from, if it is ever read.
    """

    name: str
    data: NDArray[Any]
    written: NDArray[np.bool_]
    loaded: NDArray[np.bool_]
    accumulators: Accumulators | None = None
    waiting: dict[int, Later] = field(default_factory=dict)

    @classmethod
    def unwritten(cls, name: str, dtype: str, size: int, lanes: int) -> Registers:
        """Registers that nobody has written."""
        kind = numpy_dtype(dtype)
        data = np.full(size * lanes * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(size, lanes)
        return cls(name, data, np.zeros((size, lanes), bool), np.zeros(size, bool))

    def read(self, at: Any, mask: NDArray[np.bool_] | None) -> None:
        """Elements are read by the lanes of a mask: tell of the loads that they come from."""
        for each in [at] if isinstance(at, int) else np.unique(at).tolist():
            if later := self.waiting.get(each):
                later.tell(mask)

    def forget(self) -> None:
        """Nobody has written them."""
        self.data.view(np.uint8)[:] = 0xFF
        self.written[:] = False
