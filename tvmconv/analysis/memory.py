"""The memory of an executed kernel: arrays in global memory, registers, and shared memory that knows who touched it.

Memory that nobody has written is full of ones in every bit, which is NaN in every floating-point type, so that what is
computed from it shows. What is out of bounds, misaligned or a race is an `ExecutionError`.

Lanes are threads: those of all blocks that are executed together, a multiple of a warp for each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP
from tvmconv.workloads.dtypes import numpy_dtype

VECTOR_BYTES = 16  # the widest access of a thread; wider vectors are several of them
SHARED_BASE = 1024  # where shared memory begins, so that the address 0 is nowhere
ALIGNMENT = 128  # bytes, of a shared buffer

Lanes = NDArray[np.intp]
Bytes = NDArray[np.uint8]


class ExecutionError(AnalysisError):
    """A kernel does what no kernel may: it races, leaves its arrays, or is misaligned."""


class RaceError(ExecutionError):
    """Threads race for memory, do not wait for a copy, or do not all reach a barrier."""


@dataclass(frozen=True)
class Threads:
    """The threads that are executed together.

    Attributes:
        block: threads of a block, as (x, y, z).
        blocks: the place of each block in the grid, shape (blocks, 3), in x, y, z; those of a cluster in a row.
        clusters: blocks of a cluster, as (x, y, z).
    """

    block: tuple[int, int, int]
    blocks: NDArray[np.int64]
    clusters: tuple[int, int, int] = (1, 1, 1)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return math.prod(self.clusters)

    @property
    def real(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    @property
    def padded(self) -> int:
        """Lanes of a block: whole warps."""
        return -(-self.real // WARP) * WARP

    @property
    def lanes(self) -> int:
        """Lanes of all blocks."""
        return len(self.blocks) * self.padded


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


PENDING = 1 << 30  # the time of a write that has not landed


@dataclass
class Shared:
    """The shared memory of all blocks that are executed together, in bytes behind one another, and who touched it when.

    A write is ordered before another thread's access by a barrier of the block between them, by one of the warp if
    both are of it, or by one of the cluster if they are of different blocks. An access that is not ordered behind a
    write, and a write that is not ordered behind an access, is a race. An asynchronous copy is a write at the time at
    which its thread waits for it; until then nobody may touch where it goes.

    Attributes:
        threads: the lanes.
        nbytes: of a block.
        unit: bytes that are told apart.
    """

    threads: Threads
    nbytes: int
    unit: int
    _data: NDArray[Any] = field(init=False)
    _clock: int = 1

    def __post_init__(self) -> None:
        """Nobody has touched anything."""
        self.nbytes = -(-max(self.nbytes, ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        blocks, lanes = len(self.threads.blocks), self.threads.lanes
        size = blocks * self.nbytes // self.unit
        self._data = np.full(size, -1, f"i{self.unit}").view(f"u{self.unit}")
        self._written = np.zeros(size, np.int32)  # when, and by which lane
        self._writer = np.full(size, -1, np.int32)
        self._read = np.zeros(size, np.int32)  # when last, and by which lanes, the first and the last of them
        self._first, self._last = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        self._log: list[tuple[NDArray[np.int64], Lanes, Lanes, int]] = []  # reads that are not in these yet
        self._block = np.arange(lanes) // self.threads.padded  # of a lane
        self._synced = {  # when each lane last passed a barrier
            "warp": np.ones(lanes, np.int32),
            "block": np.ones(lanes, np.int32),
            "cluster": np.ones(lanes, np.int32),
        }
        self._ordered = 1  # what happened before this time is ordered before everything, within a block
        self._copies: list[_Copies] = []
        self._committed = np.zeros(lanes, np.int64)  # groups of asynchronous copies, by lane
        self._read_from_afar = np.zeros(blocks, np.int32)

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
            self._check(written, self._writer[units], self._writer[units], units, lanes, "reads", whole_warp)
        first, last = (lanes // WARP * WARP, lanes // WARP * WARP + WARP - 1) if whole_warp else (lanes, lanes)
        self._log.append((units, first, last, self._clock))
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
        self._written[units] = self._clock

    def _check_write(self, units: NDArray[np.int64], lanes: Lanes) -> None:
        written = self._written[units]
        if written.size and int(written.max()) >= self._ordered:
            self._check(written, self._writer[units], self._writer[units], units, lanes, "writes", False)
        self._settle()
        read = self._read[units]
        if read.size and int(read.max()) >= self._ordered:
            self._check(read, self._first[units], self._last[units], units, lanes, "overwrites", False)

    def _check(
        self,
        when: NDArray[np.int32],
        first: NDArray[np.int32],
        last: NDArray[np.int32],
        units: NDArray[np.int64],
        lanes: Lanes,
        what: str,
        whole_warp: bool,
    ) -> None:
        """Raise ExecutionError if an access is not ordered behind those of lanes first to last before it."""
        mine = np.broadcast_to(lanes[:, None], units.shape)
        same_lane = (first == mine) & (last == mine) & (not whole_warp)
        same_warp = (first // WARP == mine // WARP) & (last // WARP == mine // WARP)
        home = self.threads.padded
        same_block = (first // home == mine // home) & (last // home == mine // home)
        synced = np.where(
            same_warp,
            self._synced["warp"][mine],
            np.where(same_block, self._synced["block"][mine], self._synced["cluster"][mine]),
        )
        bad = (when >= synced) & ~same_lane | (when == PENDING)
        if bad.any():
            at = tuple(index[0] for index in np.nonzero(bad))
            who, other, place = self._thread(int(mine[at])), int(first[at]), self._place(units[at])
            if when[at] == PENDING:
                raise RaceError(f"{who} {what} {place}, where an asynchronous copy goes that nobody has waited for")
            before = "has read" if what == "overwrites" else "has written"
            raise RaceError(f"race: {who} {what} {place}, which {self._thread(other)} {before} with no barrier between")

    def _settle(self) -> None:
        """Take the logged reads into account."""
        for units, first, last, when in self._log:
            flat = units.reshape(-1)
            low = np.broadcast_to(first[:, None], units.shape).reshape(-1).astype(np.int32)
            high = np.broadcast_to(last[:, None], units.shape).reshape(-1).astype(np.int32)
            # Reads that everything is ordered behind are forgotten: by a barrier of the block, or by one of the warp
            # if that is all that has read.
            before, early, late = self._read[flat], self._first[flat], self._last[flat]
            home = self.threads.padded
            same_warp = (early // WARP == low // WARP) & (late // WARP == low // WARP)
            same_block = (early // home == low // home) & (late // home == low // home)
            sync = np.where(
                same_warp,
                self._synced["warp"][low],
                np.where(same_block, self._synced["block"][low], self._synced["cluster"][low]),
            )
            gone = before < np.minimum(sync, when + 1)
            self._first[flat[gone]], self._last[flat[gone]] = np.int32(2**30), np.int32(-1)
            np.minimum.at(self._first, flat, low)
            np.maximum.at(self._last, flat, high)
            self._read[flat] = when
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

    def barrier(self, lanes: Lanes, kind: str) -> None:
        """A barrier of the warps, blocks or clusters that lanes are all of."""
        everybody = len(lanes) == len(self.threads.blocks) * self.threads.real
        if kind == "warp" or not everybody or self.threads.cluster > 1:
            self._settle()
        self._log.clear()  # as everything is ordered behind them now
        self._clock += 1
        for level in {"warp": ("warp",), "block": ("warp", "block")}.get(kind, ("warp", "block", "cluster")):
            if everybody:
                self._synced[level][:] = self._clock
            else:
                self._synced[level][lanes] = self._clock
        if kind == "cluster":
            self._read_from_afar[:] = 0
        if kind != "warp" and everybody and (self.threads.cluster == 1 or kind == "cluster"):
            self._ordered = self._clock

    def from_afar(self, blocks: Lanes) -> None:
        """Note that other blocks of the cluster read a block's memory, which it must not leave before they have."""
        self._read_from_afar[blocks] = self._clock

    def end(self) -> None:
        """Raise ExecutionError if a block may have ended while others read its memory."""
        if self._read_from_afar.any():
            raise RaceError("a block may end, and its shared memory with it, while others of its cluster read it")

    def _thread(self, lane: int) -> str:
        block, thread = divmod(lane, self.threads.padded)
        return f"thread {thread} of block {tuple(self.threads.blocks[block].tolist())}"

    def _place(self, units: Any) -> str:
        unit = int(np.asarray(units).reshape(-1)[0])
        return f"byte {unit * self.unit % self.nbytes} of shared memory"


@dataclass
class Registers:
    """A buffer of registers: each thread has its own.

    Attributes:
        name: of the buffer.
        data: its elements, shape (elements, lanes).
        written: whether they have been, same shape.
        loaded: whether what is in them depends on what is in memory, shape (elements,).
    """

    name: str
    data: NDArray[Any]
    written: NDArray[np.bool_]
    loaded: NDArray[np.bool_]

    @classmethod
    def unwritten(cls, name: str, dtype: str, size: int, lanes: int) -> Registers:
        """Registers that nobody has written."""
        kind = numpy_dtype(dtype)
        data = np.full(size * lanes * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(size, lanes)
        return cls(name, data, np.zeros((size, lanes), bool), np.zeros(size, bool))

    def forget(self) -> None:
        """Nobody has written them."""
        self.data.view(np.uint8)[:] = 0xFF
        self.written[:] = False
