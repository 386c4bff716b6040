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
with addresses that lie in registers, its first block is executed instead (`emulation.execute_blocks`), on arrays of
zeros. What a block reads of the shared memory of others of its cluster is not counted. Nor is what TMA writes and
wgmma reads: how the hardware serves these is not documented; the swizzles of 32, 64 and 128 bytes are there so that 8
rows of 16 bytes lie in different banks. What threads store for TMA, or load behind it, is counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.coalescing import LINE_BYTES, count_distinct, group_by_request
from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import SHARED_SCOPES, execute_scope, group_by_warp, has_instructions
from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.blocks import BlockIndex, count_lanes
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import AccessObserver, AccessSite, MemoryAccess
from tvmconv.gpu_specs import BANK_BYTES, NUM_BANKS, VECTOR_BYTES, WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.executable import LaunchConfig
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

FIRST_BLOCK = (0, 0, 0)


@dataclass(frozen=True)
class SharedAccess:
    """One load or store of shared memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        buffer: the shared buffer's name.
        num_requests: how often a warp executes it, with at least one thread taking part.
        wavefronts: how many passes over the banks these take.
        min_wavefronts: how many they would take without any conflict.
        nbytes: that a thread accesses, or the row of a matrix.
        statement_index: the index of the statement that it is of, in the order of
            `tvmconv.analysis.tir.scopes.iterate_statements`.
    """

    kind: Literal["load", "store"]
    buffer: str
    num_requests: int
    wavefronts: int
    min_wavefronts: int
    nbytes: int
    statement_index: int

    @property
    def num_conflicts(self) -> int:
        """Wavefronts beyond those that there have to be: one of a request of at most a word for each thread."""
        return self.wavefronts - self.min_wavefronts


def count_shared_accesses(
    kernel: Kernel, selected_kernel: LoweredKernel | None = None, block: BlockIndex = FIRST_BLOCK
) -> list[SharedAccess]:
    """Every shared-memory access of a kernel's text, each counted over one block.

    Args:
        kernel: a built kernel, for any target.
        selected_kernel: of one of `kernel.steps`; by default of all.
        block: of the grid, as (x, y, z).

    Raises:
        AnalysisError: an access cannot be executed (`tvmconv.analysis.tir.scopes.execute_scope`,
            `tvmconv.emulator.execution.execute`), or it depends on the data.
    """
    shared: list[SharedAccess] = []
    for lowered_kernel in [selected_kernel] if selected_kernel else kernel.kernels:
        if has_instructions(lowered_kernel.function):
            observer = BankConflictObserver(count_lanes(lowered_kernel))
            run_with_observer(lowered_kernel, kernel.memory_scopes, [block], observer)
            shared += observer.list_accesses()
        else:
            shared += [
                count_access(access, lowered_kernel.launch, block)
                for access in iterate_accesses(lowered_kernel.function, is_shared)
            ]
    return shared


def count_conflicts(kernel: Kernel, kind: Literal["load", "store"]) -> int:
    """Bank conflicts of all shared loads or stores of a kernel's first block."""
    return sum(access.num_conflicts for access in count_shared_accesses(kernel) if access.kind == kind)


def is_shared(buffer: Any) -> bool:
    """Whether a buffer lies in shared memory."""
    return str(buffer.scope()) in SHARED_SCOPES


def count_access(access: Access, launch: LaunchConfig, block: BlockIndex) -> SharedAccess:
    """One access as it stands in the text, counted over a block."""
    itemsize, nbytes = access.itemsize, access.nbytes
    totals = np.zeros(3, np.int64)
    for execution in execute_scope(access.scope, [access.index], launch, block, allow_sampling=True):
        (elements,) = execution.values
        addresses, active = group_by_warp(elements * itemsize), group_by_warp(execution.is_active)
        num_wavefronts, min_wavefronts = count_wavefronts_by_request(addresses, active, nbytes)
        num_requests = int(active.any(axis=1).sum()) * ceil_div(nbytes, VECTOR_BYTES)
        totals += execution.num_repeats * np.array([num_requests, num_wavefronts.sum(), min_wavefronts.sum()])
    requests, wavefronts, min_wavefronts = totals.tolist()
    return SharedAccess(
        access.kind, str(access.buffer.name), requests, wavefronts, min_wavefronts, nbytes, access.statement_index
    )


class BankConflictObserver(AccessObserver):
    """Adds up the shared accesses of the blocks that are executed.

    Args:
        lanes_per_block: of a block, for those of the first alone; None for all.
    """

    def __init__(self, lanes_per_block: int | None = None) -> None:
        self._lanes_per_block = lanes_per_block
        self._counts: dict[AccessSite, NDArray[np.int64]] = {}
        self._pattern_cache: dict[tuple[bytes, bytes, int], tuple[int, int, int]] = {}  # patterns that repeat

    def on_access(self, event: MemoryAccess) -> None:
        """Count a shared access; vectors wider than 16 bytes are several."""
        block_event = event.restrict_to_first_block(self._lanes_per_block)
        if block_event is None or block_event.space != "shared":
            return
        width = min(block_event.nbytes, VECTOR_BYTES)
        total = self._counts.setdefault(block_event.access_site, np.zeros(3, np.int64))
        if block_event.source_addresses is not None and block_event.nbytes == VECTOR_BYTES:
            total += count_copy_wavefronts(block_event.lanes, block_event.addresses, block_event.source_addresses)
            return
        # Which banks are busy is the same for addresses that are all moved on by as many words.
        relative_addresses = block_event.addresses - block_event.addresses[0] // BANK_BYTES * BANK_BYTES
        pattern = block_event.lanes.tobytes(), relative_addresses.tobytes(), width
        if pattern not in self._pattern_cache:
            self._pattern_cache[pattern] = count_wavefronts(block_event.lanes, block_event.addresses, width)
        total += ceil_div(block_event.nbytes, VECTOR_BYTES) * np.array(self._pattern_cache[pattern])

    def list_accesses(self) -> list[SharedAccess]:
        """What was counted, in the order of the text."""
        shared = []
        for site, total in sorted(self._counts.items(), key=lambda item: item[0]):
            requests, wavefronts, min_wavefronts = total.tolist()
            access = SharedAccess(
                site.kind, site.name, requests, wavefronts, min_wavefronts, site.nbytes, site.statement_index
            )
            shared.append(access)
        return shared


def count_wavefronts(lanes: NDArray[np.intp], addresses: NDArray[np.int64], nbytes: int) -> tuple[int, int, int]:
    """Requests and wavefronts of shared accesses of 2, 4, 8 or 16 bytes, and how few wavefronts there can be.

    Args:
        lanes: that take part; each may do so several times, of a vector whose elements are no neighbours.
        addresses: in bytes, of each.
        nbytes: of an access.
    """
    table, active = group_by_request(lanes, addresses)
    num_wavefronts, min_wavefronts = count_wavefronts_by_request(table, active, nbytes)
    return len(table), int(num_wavefronts.sum()), int(min_wavefronts.sum())


def count_copy_wavefronts(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64], source_addresses: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Requests and wavefronts of asynchronous copies of 16 bytes, and how few wavefronts there can be.

    Args:
        lanes: that copy.
        addresses: to where, in bytes.
        source_addresses: from where; -1 for zeros.
    """
    table, active = group_by_request(lanes, addresses)
    source_table, _ = group_by_request(lanes, source_addresses)
    num_wavefronts, min_wavefronts = count_copy_wavefronts_by_request(
        table, active, source_table, active & (source_table >= 0)
    )
    return np.array([len(table), num_wavefronts.sum(), min_wavefronts.sum()])


def count_copy_wavefronts_by_request(
    addresses: NDArray[np.int64],
    active: NDArray[np.bool_],
    source_addresses: NDArray[np.int64],
    is_read: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The wavefronts that each request of asynchronous copies of 16 bytes takes, and how few would do.

    What comes of a line of 128 bytes goes to a row of the banks in one wavefront, 8 threads at a time; where some
    threads of a warp store zeros, all of its rows are written once more (measured on an H200).

    Args:
        addresses: to where, in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        source_addresses: from where, same shape.
        is_read: whether it copies; where not, it stores zeros.
    """
    quarter = np.arange(WARP_SIZE) // (WARP_SIZE // 4)
    bank_rows = addresses // LINE_BYTES * 4 + quarter
    num_wavefronts = count_distinct(np.where(is_read, bank_rows + (source_addresses // LINE_BYTES << 32), -1))
    stores_zeros = (active & ~is_read).any(axis=1)
    num_wavefronts = num_wavefronts + np.where(stores_zeros, count_distinct(np.where(active, bank_rows, -1)), 0)
    return num_wavefronts, count_wavefronts_by_request(addresses, active, VECTOR_BYTES)[1]


def count_wavefronts_by_request(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The wavefronts that each request takes, and how few would do.

    Args:
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        nbytes: that a thread accesses from its address on; those wider than 16 bytes are several accesses.
    """
    access_bytes = min(nbytes, VECTOR_BYTES)
    words_per_access = max(1, access_bytes // BANK_BYTES)
    wavefront_counts = np.zeros((2, len(addresses)), np.int64)
    for first_lane in range(0, WARP_SIZE, WARP_SIZE // max(1, words_per_access // 2)):
        pair_slice = slice(first_lane, first_lane + WARP_SIZE // max(1, words_per_access // 2))
        if words_per_access == 1:
            wavefront_counts += _count_passes(addresses[:, pair_slice], active[:, pair_slice], words_per_access)
            continue
        lanes_per_part = WARP_SIZE // words_per_access
        separate_counts = [
            _count_passes(addresses[:, lane_slice], active[:, lane_slice], words_per_access)
            for lane_slice in (
                slice(first_lane, first_lane + lanes_per_part),
                slice(first_lane + lanes_per_part, pair_slice.stop),
            )
        ]
        paired_counts = _count_passes(addresses[:, pair_slice], active[:, pair_slice], words_per_access)
        wavefront_counts += np.where(
            _has_paired_addresses(addresses[:, pair_slice], active[:, pair_slice]),
            paired_counts,
            np.add(*separate_counts),
        )
    num_wavefronts, min_wavefronts = wavefront_counts * ceil_div(nbytes, VECTOR_BYTES)
    return num_wavefronts, min_wavefronts


def _count_passes(addresses: NDArray[np.int64], active: NDArray[np.bool_], words: int) -> NDArray[np.int64]:
    """Of threads that are served together: the words of the busiest bank, and whether there are any."""
    word_indices = (addresses // BANK_BYTES)[:, :, None] + np.arange(words)
    is_active = np.broadcast_to(active[:, :, None], word_indices.shape)
    sorted_words = np.sort(np.where(is_active, word_indices, -1).reshape(len(addresses), -1), axis=1)
    is_distinct = (sorted_words >= 0) & (np.diff(sorted_words, axis=1, prepend=-1) != 0)
    row, column = is_distinct.nonzero()
    per_bank = np.zeros((len(addresses), NUM_BANKS), np.int64)
    np.add.at(per_bank, (row, sorted_words[row, column] % NUM_BANKS), 1)
    return np.stack([per_bank.max(axis=1), active.any(axis=1)])


def _has_paired_addresses(addresses: NDArray[np.int64], active: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether all threads have the address of their neighbour, or all that of the one after it."""
    threads = np.arange(addresses.shape[1])
    is_same_address = [
        ((addresses == addresses[:, threads ^ distance]) | ~active | ~active[:, threads ^ distance]).all(axis=1)
        for distance in (1, 2)
    ]
    return is_same_address[0] | is_same_address[1]
