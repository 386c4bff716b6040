"""Shared-memory bank conflicts, counted from the lowered TIR without running the kernel.

The model is the one of the CUDA C++ Programming Guide for compute capability 5.0 and up ("Shared Memory" under "Compute
Capability 5.x"): 32 banks of 4 bytes; the threads of a warp that touch different words of one bank are served one after
the other, those that touch the same word are served together. An access of a warp then takes as many wavefronts as the
busiest bank has words, and all but the first are conflicts.

Counted are the accesses that the TIR makes. Two 16-bit elements share a word. Of 8 bytes the threads of half a warp
are served together, of 16 those of a quarter: such accesses take 2 and 4 wavefronts without any conflict. Where every
thread has the address of its neighbour, or of the one after that, two such parts are served at once (measured on an
H200: a load of 16 bytes from one address takes 2 wavefronts, one of 8 bytes 1). So are the rows of 16 bytes that
`ldmatrix` and `stmatrix` move, 8 at a time, and what asynchronous copies write. (The guide tells this of 64 and 128
bits for compute capability 3.x; it is taken to hold for all since.) The compiler may merge a thread's neighbouring
loads into wider ones: conflicts of strides of 2 or 4 words can vanish then.

Indices of buffers are evaluated for all threads and iterations at once. Where a kernel has GPU instructions by name,
with addresses that lie in registers, its first block is executed instead (`emulation.execute`), on arrays of
zeros. What a block reads of the shared memory of others of its cluster is not counted. Nor is what TMA writes and
wgmma reads: how the hardware serves these is not documented; the swizzles of 32, 64 and 128 bytes are there so that 8
rows of 16 bytes lie in different banks. What threads store for TMA, or load behind it, is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import Block, lanes_of
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Accessed, Place, Watch
from tvmconv.analysis.lowered.accesses import Access, accesses
from tvmconv.analysis.lowered.tir import SHARED, executions, has_instructions, warps
from tvmconv.analysis.memory.coalescing import LINE_BYTES, by_request, distinct
from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import BANK_BYTES, BANKS, VECTOR_BYTES, WARP

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.program import Launch
    from tvmconv.kernel import Kernel

FIRST_BLOCK = (0, 0, 0)


@dataclass(frozen=True)
class SharedAccess:
    """One load or store of shared memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        buffer: the shared buffer's name.
        requests: how often a warp executes it, with at least one thread taking part.
        wavefronts: how many passes over the banks these take.
        least: how many they would take without any conflict.
        nbytes: that a thread accesses, or the row of a matrix.
        statement: the index of the statement that it is of, in the order of `tvmconv.analysis.lowered.tir.statements`.
    """

    kind: Literal["load", "store"]
    buffer: str
    requests: int
    wavefronts: int
    least: int
    nbytes: int
    statement: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond those that there have to be: one of a request of at most a word for each thread."""
        return self.wavefronts - self.least


def shared_accesses(kernel: Kernel, only: LoweredStep | None = None, block: Block = FIRST_BLOCK) -> list[SharedAccess]:
    """Every shared-memory access of a kernel's text, each counted over one block.

    Args:
        kernel: a built kernel, for any target.
        only: of one of `kernel.steps`; by default of all.
        block: of the grid, as (x, y, z).

    Raises:
        AnalysisError: an access cannot be executed (`tvmconv.analysis.lowered.tir.executions`,
            `tvmconv.analysis.emulation.execute.execute`), or it depends on the data.
    """
    found: list[SharedAccess] = []
    for step in [only] if only else kernel.steps:
        if has_instructions(step.function):
            watch = BankWatch(lanes_of(step))
            observe(step, kernel.spaces, [block], watch)
            found += watch.accesses()
        else:
            found += [count(access, step.launch, block) for access in accesses(step.function, is_shared)]
    return found


def conflicts(kernel: Kernel, kind: Literal["load", "store"]) -> int:
    """Bank conflicts of all shared loads or stores of a kernel's first block."""
    return sum(access.conflicts for access in shared_accesses(kernel) if access.kind == kind)


def is_shared(buffer: Any) -> bool:
    """Whether a buffer lies in shared memory."""
    return str(buffer.scope()) in SHARED


def count(access: Access, launch: Launch, block: Block) -> SharedAccess:
    """One access as it stands in the text, counted over a block."""
    itemsize, nbytes = access.itemsize, access.nbytes
    total = np.zeros(3, np.int64)
    for executed in executions(access.scope, [access.index], launch, block, sampled=True):
        (elements,) = executed.values
        addresses, active = warps(elements * itemsize), warps(executed.active)
        takes, least = wavefronts_of_each(addresses, active, nbytes)
        taking = int(active.any(axis=1).sum()) * ceil_div(nbytes, VECTOR_BYTES)
        total += executed.repeats * np.array([taking, takes.sum(), least.sum()])
    requests, wavefronts, least = total.tolist()
    return SharedAccess(access.kind, str(access.buffer.name), requests, wavefronts, least, nbytes, access.statement)


class BankWatch(Watch):
    """Adds up the shared accesses of the blocks that are executed.

    Args:
        lanes: of a block, for those of the first alone; None for all.
    """

    def __init__(self, lanes: int | None = None) -> None:
        self._lanes = lanes
        self._counts: dict[Place, NDArray[np.int64]] = {}
        self._known: dict[tuple[bytes, bytes, int], tuple[int, int, int]] = {}  # patterns that repeat

    def access(self, found: Accessed) -> None:
        """Count a shared access; vectors wider than 16 bytes are several."""
        own = found.of_first(self._lanes)
        if own is None or own.space != "shared":
            return
        width = min(own.nbytes, VECTOR_BYTES)
        total = self._counts.setdefault(own.place, np.zeros(3, np.int64))
        if own.source is not None and own.nbytes == VECTOR_BYTES:
            total += copy_wavefronts(own.lanes, own.addresses, own.source)
            return
        # Which banks are busy is the same for addresses that are all moved on by as many words.
        moved = own.addresses - own.addresses[0] // BANK_BYTES * BANK_BYTES
        pattern = own.lanes.tobytes(), moved.tobytes(), width
        if pattern not in self._known:
            self._known[pattern] = wide_wavefronts(own.lanes, own.addresses, width)
        total += ceil_div(own.nbytes, VECTOR_BYTES) * np.array(self._known[pattern])

    def accesses(self) -> list[SharedAccess]:
        """What was counted, in the order of the text."""
        found = []
        for place, total in sorted(self._counts.items(), key=lambda each: each[0]):
            requests, wavefronts, least = total.tolist()
            access = SharedAccess(place.kind, place.name, requests, wavefronts, least, place.nbytes, place.statement)
            found.append(access)
        return found


def wide_wavefronts(lanes: NDArray[np.intp], addresses: NDArray[np.int64], nbytes: int) -> tuple[int, int, int]:
    """Requests and wavefronts of shared accesses of 2, 4, 8 or 16 bytes, and how few wavefronts there can be.

    Args:
        lanes: that take part; each may do so several times, of a vector whose elements are no neighbours.
        addresses: in bytes, of each.
        nbytes: of an access.
    """
    table, active = by_request(lanes, addresses)
    takes, least = wavefronts_of_each(table, active, nbytes)
    return len(table), int(takes.sum()), int(least.sum())


def copy_wavefronts(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64], sources: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Requests and wavefronts of asynchronous copies of 16 bytes, and how few wavefronts there can be.

    Args:
        lanes: that copy.
        addresses: to where, in bytes.
        sources: from where; -1 for zeros.
    """
    table, active = by_request(lanes, addresses)
    source, _ = by_request(lanes, sources)
    takes, least = copy_wavefronts_of_each(table, active, source, active & (source >= 0))
    return np.array([len(table), takes.sum(), least.sum()])


def copy_wavefronts_of_each(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], sources: NDArray[np.int64], reads: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The wavefronts that each request of asynchronous copies of 16 bytes takes, and how few would do.

    What comes of a line of 128 bytes goes to a row of the banks in one wavefront, 8 threads at a time; where some
    threads of a warp store zeros, all of its rows are written once more (measured on an H200).

    Args:
        addresses: to where, in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        sources: from where, same shape.
        reads: whether it copies; where not, it stores zeros.
    """
    quarter = np.arange(WARP) // (WARP // 4)
    rows = addresses // LINE_BYTES * 4 + quarter
    served = distinct(np.where(reads, rows + (sources // LINE_BYTES << 32), -1))
    fills = (active & ~reads).any(axis=1)
    served = served + np.where(fills, distinct(np.where(active, rows, -1)), 0)
    return served, wavefronts_of_each(addresses, active, VECTOR_BYTES)[1]


def wavefronts_of_each(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The wavefronts that each request takes, and how few would do.

    Args:
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        nbytes: that a thread accesses from its address on; those wider than 16 bytes are several accesses.
    """
    width = min(nbytes, VECTOR_BYTES)
    words = max(1, width // BANK_BYTES)
    served = np.zeros((2, len(addresses)), np.int64)
    for first in range(0, WARP, WARP // max(1, words // 2)):
        two = slice(first, first + WARP // max(1, words // 2))
        if words == 1:
            served += _passes(addresses[:, two], active[:, two], words)
            continue
        half = WARP // words
        apart = [
            _passes(addresses[:, one], active[:, one], words)
            for one in (slice(first, first + half), slice(first + half, two.stop))
        ]
        together = _passes(addresses[:, two], active[:, two], words)
        served += np.where(_in_pairs(addresses[:, two], active[:, two]), together, np.add(*apart))
    takes, least = served * ceil_div(nbytes, VECTOR_BYTES)
    return takes, least


def _passes(addresses: NDArray[np.int64], active: NDArray[np.bool_], words: int) -> NDArray[np.int64]:
    """Of threads that are served together: the words of the busiest bank, and whether there are any."""
    touched = (addresses // BANK_BYTES)[:, :, None] + np.arange(words)
    taking = np.broadcast_to(active[:, :, None], touched.shape)
    ordered = np.sort(np.where(taking, touched, -1).reshape(len(addresses), -1), axis=1)
    distinct = (ordered >= 0) & (np.diff(ordered, axis=1, prepend=-1) != 0)
    row, place = distinct.nonzero()
    per_bank = np.zeros((len(addresses), BANKS), np.int64)
    np.add.at(per_bank, (row, ordered[row, place] % BANKS), 1)
    return np.stack([per_bank.max(axis=1), active.any(axis=1)])


def _in_pairs(addresses: NDArray[np.int64], active: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether all threads have the address of their neighbour, or all that of the one after it."""
    threads = np.arange(addresses.shape[1])
    same = [
        ((addresses == addresses[:, threads ^ apart]) | ~active | ~active[:, threads ^ apart]).all(axis=1)
        for apart in (1, 2)
    ]
    return same[0] | same[1]
