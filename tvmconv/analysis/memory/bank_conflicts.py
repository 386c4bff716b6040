"""Shared-memory bank conflicts, counted from the lowered TIR without running the kernel.

The model is that of the CUDA C++ Programming Guide for compute capability 5.0 and up ("Shared Memory" under "Compute
Capability 5.x"). There are 32 banks of 4 bytes. Different words of one bank are served one after the other, and threads
that access the same word are served together. A request of a warp takes as many wavefronts as the busiest bank has
words, and all but the first of them are conflicts.

The accesses of the TIR are counted. Two 16-bit elements share a word. Accesses of 8 bytes are served by half-warps, and
accesses of 16 bytes by quarter-warps, so they take 2 and 4 wavefronts without any conflict. (The guide says so for
compute capability 3.x; it is assumed to hold since.) Two such parts are served at once if every thread has the address
of its neighbor, or of the one after it. On an H200, a 16-byte load from one address takes 2 wavefronts, and an 8-byte
load takes 1. The 16-byte rows of `ldmatrix` and `stmatrix`, and the writes of asynchronous copies, are served 8 at a
time. The compiler may merge neighboring loads of a thread; conflicts of strides of 2 or 4 words can vanish then.

Buffer indices are evaluated for all threads and iterations at once. If a kernel uses GPU instructions by name, whose
addresses lie in registers, the emulator executes its first block on arrays of zeros. Three kinds of accesses are not
counted: loads from other blocks of the cluster, writes of TMA, and reads of wgmma. The hardware's way to serve the last
two is not documented; the swizzles of 32, 64 and 128 bytes exist to spread 8 rows of 16 bytes over different banks. The
threads' own stores for TMA, and their loads after it, are counted.
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
    """Counts of one load or store of shared memory in a kernel, over all its executions in one block.

    Attributes:
        kind: "load" or "store".
        buffer: Name of the shared buffer.
        num_requests: Number of warp requests with at least one active thread.
        wavefronts: Number of wavefronts that the requests take.
        min_wavefronts: Number of wavefronts that the requests would take without conflicts.
        nbytes: Bytes per thread, or per matrix row.
        statement_index: Index of the statement in the order of `tvmconv.analysis.tir.scopes.iterate_statements`.
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
        """Number of wavefronts beyond the minimum."""
        return self.wavefronts - self.min_wavefronts


def count_shared_accesses(
    kernel: Kernel, selected_kernel: LoweredKernel | None = None, block: BlockIndex = FIRST_BLOCK
) -> list[SharedAccess]:
    """Count each shared-memory access of a kernel over one block.

    Args:
        kernel: A built kernel for any target.
        selected_kernel: One of `kernel.kernels`; all of them by default.
        block: Index of the block in the grid as (x, y, z).

    Returns:
        The accesses in the order of the TIR.

    Raises:
        AnalysisError: An access cannot be executed (`tvmconv.analysis.tir.scopes.execute_scope`,
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
    """Return the number of bank conflicts of all shared loads or stores of a kernel's first block.

    Args:
        kernel: A built kernel for any target.
        kind: "load" or "store".
    """
    return sum(access.num_conflicts for access in count_shared_accesses(kernel) if access.kind == kind)


def is_shared(buffer: Any) -> bool:
    """Return whether a TIR buffer lies in shared memory."""
    return str(buffer.scope()) in SHARED_SCOPES


def count_access(access: Access, launch: LaunchConfig, block: BlockIndex) -> SharedAccess:
    """Count one access of the TIR over a block."""
    itemsize, nbytes = access.itemsize, access.nbytes
    totals = np.zeros(3, np.int64)
    for execution in execute_scope(access.scope, [access.index], launch, block, allow_sampling=True):
        (elements,) = execution.values
        addresses, active = group_by_warp(elements * itemsize), group_by_warp(execution.is_active)
        num_wavefronts, min_wavefronts = count_wavefronts_by_request(addresses, active, nbytes)
        num_requests = int(active.any(axis=1).sum()) * ceil_div(nbytes, VECTOR_BYTES)
        totals += execution.num_repeats * np.array([num_requests, num_wavefronts.sum(), min_wavefronts.sum()])
    requests, wavefronts, min_wavefronts = totals.tolist()
    buffer = str(access.buffer.name)
    return SharedAccess(access.kind, buffer, requests, wavefronts, min_wavefronts, nbytes, access.statement_index)


class BankConflictObserver(AccessObserver):
    """Observer that sums the shared-memory accesses of the executed blocks.

    Args:
        lanes_per_block: Number of lanes per block, to count only the first block; None to count all blocks.
    """

    def __init__(self, lanes_per_block: int | None = None) -> None:
        self._lanes_per_block = lanes_per_block
        self._counts: dict[AccessSite, NDArray[np.int64]] = {}
        self._pattern_cache: dict[tuple[bytes, bytes, int], tuple[int, int, int]] = {}

    def on_access(self, event: MemoryAccess) -> None:
        """Count a shared access; vectors wider than 16 bytes count as several accesses."""
        block_event = event.restrict_to_first_block(self._lanes_per_block)
        if block_event is None or block_event.space != "shared":
            return
        width = min(block_event.nbytes, VECTOR_BYTES)
        total = self._counts.setdefault(block_event.access_site, np.zeros(3, np.int64))
        if block_event.source_addresses is not None and block_event.nbytes == VECTOR_BYTES:
            total += count_copy_wavefronts(block_event.lanes, block_event.addresses, block_event.source_addresses)
            return
        # The same banks are busy if all addresses are shifted by the same number of words.
        relative_addresses = block_event.addresses - block_event.addresses[0] // BANK_BYTES * BANK_BYTES
        pattern = block_event.lanes.tobytes(), relative_addresses.tobytes(), width
        if pattern not in self._pattern_cache:
            self._pattern_cache[pattern] = count_wavefronts(block_event.lanes, block_event.addresses, width)
        total += ceil_div(block_event.nbytes, VECTOR_BYTES) * np.array(self._pattern_cache[pattern])

    def list_accesses(self) -> list[SharedAccess]:
        """Return the counted accesses in the order of the TIR."""
        accesses = []
        for site, total in sorted(self._counts.items(), key=lambda item: item[0]):
            requests, wavefronts, minimum = total.tolist()
            counts = requests, wavefronts, minimum
            accesses.append(SharedAccess(site.kind, site.name, *counts, site.nbytes, site.statement_index))
        return accesses


def count_wavefronts(lanes: NDArray[np.intp], addresses: NDArray[np.int64], nbytes: int) -> tuple[int, int, int]:
    """Return the requests, the wavefronts and the minimum of wavefronts of shared accesses of 2, 4, 8 or 16 bytes.

    Args:
        lanes: Indices of the active lanes; a lane occurs several times if its vector's elements are not neighbors.
        addresses: Address of each access in bytes.
        nbytes: Bytes per access.
    """
    table, active = group_by_request(lanes, addresses)
    num_wavefronts, min_wavefronts = count_wavefronts_by_request(table, active, nbytes)
    return len(table), int(num_wavefronts.sum()), int(min_wavefronts.sum())


def count_copy_wavefronts(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64], source_addresses: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the requests, the wavefronts and the minimum of wavefronts of asynchronous copies of 16 bytes.

    Args:
        lanes: Indices of the copying lanes.
        addresses: Destination addresses in bytes.
        source_addresses: Source addresses in bytes; -1 where the copy stores zeros.
    """
    table, active = group_by_request(lanes, addresses)
    source_table, _ = group_by_request(lanes, source_addresses)
    is_read = active & (source_table >= 0)
    num_wavefronts, min_wavefronts = count_copy_wavefronts_by_request(table, active, source_table, is_read)
    return np.array([len(table), num_wavefronts.sum(), min_wavefronts.sum()])


def count_copy_wavefronts_by_request(
    addresses: NDArray[np.int64],
    active: NDArray[np.bool_],
    source_addresses: NDArray[np.int64],
    is_read: NDArray[np.bool_],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the wavefronts of each request of asynchronous copies of 16 bytes, and their minimum.

    Data from a line of 128 bytes is written to a row of the banks in one wavefront, 8 threads at a time. If some
    threads of a warp store zeros, all rows of the warp are written once more (measured on an H200).

    Args:
        addresses: Destination addresses in bytes, of shape (requests, threads per warp).
        active: Whether the thread takes part, of the same shape.
        source_addresses: Source addresses in bytes, of the same shape.
        is_read: Whether the thread copies data instead of storing zeros, of the same shape.
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
    """Return the wavefronts of each request, and their minimum.

    Args:
        addresses: Addresses in bytes, of shape (requests, threads per warp).
        active: Whether the thread takes part, of the same shape.
        nbytes: Bytes that a thread accesses from its address on; more than 16 bytes are several accesses.
    """
    access_bytes = min(nbytes, VECTOR_BYTES)
    num_words = max(1, access_bytes // BANK_BYTES)
    pair_width = WARP_SIZE // max(1, num_words // 2)
    totals = np.zeros((2, len(addresses)), np.int64)
    for first_lane in range(0, WARP_SIZE, pair_width):
        pair = slice(first_lane, first_lane + pair_width)
        passes = _count_passes(addresses[:, pair], active[:, pair], num_words)
        if num_words > 1:
            middle_lane = first_lane + WARP_SIZE // num_words
            parts = slice(first_lane, middle_lane), slice(middle_lane, pair.stop)
            separate = sum(_count_passes(addresses[:, part], active[:, part], num_words) for part in parts)
            passes = np.where(_has_paired_addresses(addresses[:, pair], active[:, pair]), passes, separate)
        totals += passes
    num_wavefronts, min_wavefronts = totals * ceil_div(nbytes, VECTOR_BYTES)
    return num_wavefronts, min_wavefronts


def _count_passes(addresses: NDArray[np.int64], active: NDArray[np.bool_], words: int) -> NDArray[np.int64]:
    """Return per request the words of the busiest bank and whether any thread is active, if all are served together."""
    word_indices = (addresses // BANK_BYTES)[:, :, None] + np.arange(words)
    is_active = np.broadcast_to(active[:, :, None], word_indices.shape)
    sorted_words = np.sort(np.where(is_active, word_indices, -1).reshape(len(addresses), -1), axis=1)
    is_distinct = (sorted_words >= 0) & (np.diff(sorted_words, axis=1, prepend=-1) != 0)
    row, column = is_distinct.nonzero()
    per_bank = np.zeros((len(addresses), NUM_BANKS), np.int64)
    np.add.at(per_bank, (row, sorted_words[row, column] % NUM_BANKS), 1)
    return np.stack([per_bank.max(axis=1), active.any(axis=1)])


def _has_paired_addresses(addresses: NDArray[np.int64], active: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return, per request, whether all threads share the address of their neighbor, or all that of the one after it."""
    threads = np.arange(addresses.shape[1])
    is_same_address = [
        ((addresses == addresses[:, threads ^ distance]) | ~active | ~active[:, threads ^ distance]).all(axis=1)
        for distance in (1, 2)
    ]
    return is_same_address[0] | is_same_address[1]
