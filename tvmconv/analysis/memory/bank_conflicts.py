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

Three kinds of accesses are not counted: loads from other blocks of the cluster, writes of TMA, and reads of wgmma. The
hardware's way to serve the last two is not documented; the swizzles of 32, 64 and 128 bytes exist to spread 8 rows of
16 bytes over different banks. The threads' own stores for TMA, and their loads after it, are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.coalescing import count_distinct
from tvmconv.analysis.tir.accesses import AccessTotals, CachedCount, RequestBatch, visit_requests
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.kernel import Kernel
from tvmconv.target import BANK_BYTES, LINE_BYTES, NUM_BANKS, VECTOR_BYTES, WARP_SIZE


@dataclass(frozen=True)
class SharedAccess:
    """Counts of one load or store of shared memory in a kernel, over all its executions in one block."""

    kind: Literal["load", "store"]
    buffer: str
    num_requests: int  # warp requests with at least one active thread
    wavefronts: int  # wavefronts that the requests take
    min_wavefronts: int  # wavefronts that the requests would take without conflicts
    nbytes: int  # per thread, or per matrix row
    statement_index: int  # in the order of `tvmconv.analysis.tir.scopes.iterate_statements`

    @property
    def num_conflicts(self) -> int:
        """Number of wavefronts beyond the minimum."""
        return self.wavefronts - self.min_wavefronts


def count_shared_accesses(kernel: Kernel, selected_kernel: LoweredKernel | None = None) -> list[SharedAccess]:
    """Count each shared-memory access of one device kernel, or of all, in the first block, in the order of the TIR."""
    accesses: list[SharedAccess] = []
    for lowered_kernel in [selected_kernel] if selected_kernel else kernel.kernels:
        totals = AccessTotals({"shared": make_wavefront_counter()})
        visit_requests(kernel, lowered_kernel, ("shared",), totals.add, (0, 0, 0))
        accesses += list_shared_accesses(totals)
    return accesses


def count_conflicts(kernel: Kernel, kind: Literal["load", "store"]) -> int:
    """Return the number of bank conflicts of all shared loads or stores of a kernel's first block."""
    return sum(access.num_conflicts for access in count_shared_accesses(kernel) if access.kind == kind)


def make_wavefront_counter() -> Callable[[RequestBatch], Sequence[int]]:
    """Return a function that counts requests for `list_shared_accesses`."""
    count = CachedCount(count_wavefronts)

    def count_batch(batch: RequestBatch) -> Sequence[int]:
        if batch.source_addresses is None or batch.site.nbytes != VECTOR_BYTES:
            return count(batch.addresses, batch.active, batch.site.nbytes)
        is_read = batch.active & (batch.source_addresses >= 0)
        return count_copy_wavefronts(batch.addresses, batch.active, batch.source_addresses, is_read)

    return count_batch


def list_shared_accesses(totals: AccessTotals) -> list[SharedAccess]:
    """Return the shared-memory accesses that were counted, in the order of the TIR."""
    return [
        SharedAccess(site.kind, site.name, requests, wavefronts, min_wavefronts, site.nbytes, site.statement_index)
        for site, (requests, wavefronts, min_wavefronts) in totals.list_totals("shared")
    ]


def count_wavefronts(addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int) -> tuple[int, int, int]:
    """Return the number of requests, of wavefronts, and of wavefronts at least; see `count_wavefronts_by_request`."""
    num_wavefronts, min_wavefronts = count_wavefronts_by_request(addresses, active, nbytes)
    num_requests = int(active.any(axis=1).sum()) * ceil_div(nbytes, VECTOR_BYTES)
    return num_requests, int(num_wavefronts.sum()), int(min_wavefronts.sum())


def count_copy_wavefronts(
    addresses: NDArray[np.int64],
    active: NDArray[np.bool_],
    source_addresses: NDArray[np.int64],
    is_read: NDArray[np.bool_],
) -> tuple[int, int, int]:
    """Return the same as `count_wavefronts` for asynchronous copies of 16 bytes.

    See `count_copy_wavefronts_by_request` for the arguments.
    """
    num_wavefronts = count_copy_wavefronts_by_request(addresses, active, source_addresses, is_read)
    num_requests, _, min_wavefronts = count_wavefronts(addresses, active, VECTOR_BYTES)
    return num_requests, int(num_wavefronts.sum()), min_wavefronts


def count_copy_wavefronts_by_request(
    addresses: NDArray[np.int64],
    active: NDArray[np.bool_],
    source_addresses: NDArray[np.int64],
    is_read: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return the wavefronts of each request of asynchronous copies of 16 bytes.

    Data from a line of 128 bytes is written to a row of the banks in one wavefront, 8 threads at a time. If some
    threads of a warp store zeros instead of reading a source, all rows of the warp are written once more (measured on
    an H200). The arrays have the shape (requests, threads per warp).
    """
    quarter = np.arange(WARP_SIZE) // (WARP_SIZE // 4)
    bank_rows = addresses // LINE_BYTES * 4 + quarter
    num_wavefronts = count_distinct(np.where(is_read, bank_rows + (source_addresses // LINE_BYTES << 32), -1))
    stores_zeros = (active & ~is_read).any(axis=1)
    return num_wavefronts + np.where(stores_zeros, count_distinct(np.where(active, bank_rows, -1)), 0)


def count_wavefronts_by_request(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the wavefronts of each request, and their minimum.

    Addresses in bytes, and whether a thread takes part, have the shape (requests, threads per warp). A thread accesses
    `nbytes` bytes from its address on; more than 16 bytes are several accesses.
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
