"""Coalescing: the sectors of global memory that each warp request touches, counted without running the kernel.

Global memory is moved in sectors of 32 bytes. A request takes as many sectors as its threads touch, in any order (CUDA
C++ Best Practices Guide, "Coalesced Access to Global Memory"): 4 for 32 neighboring float32, 32 if each lies in its own
sector. Accesses of 16 bytes are served by quarter-warps, and a sector counts once per quarter that touches it. Two
exceptions were measured on an H200. A sector counts once if the last thread of a quarter shares it with the first of
the next. A quarter that requests the same sectors as the previous one is free, except for asynchronous copies. Nsight
Compute counts sectors as `l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, requests as `l1tex__t_requests_...`.

Arrays are assumed to begin at a sector, as allocators align them. Copies of TMA are not counted because they need no
requests of threads. Loads from constant memory and through textures are not counted either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.accesses import AccessTotals, CachedCount, RequestBatch, visit_requests
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.kernel import Kernel
from tvmconv.target import LINE_BYTES, SECTOR_BYTES, VECTOR_BYTES


@dataclass(frozen=True)
class GlobalAccess:
    """Counts of one load or store of global memory in a kernel, over all its executions in one block."""

    kind: Literal["load", "store"]
    array: str
    num_requests: int  # warp requests with at least one active thread
    sectors: int  # 32-byte sectors that the requests touch
    min_sectors: int  # sectors if the bytes of each request were contiguous
    num_lines: int  # 128-byte lines that the requests touch; L1 looks up one line at a time
    nbytes: int  # per thread
    statement_index: int  # in the order of `tvmconv.analysis.tir.scopes.iterate_statements`


def count_global_accesses(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> list[GlobalAccess]:
    """Count each global-memory access of a device kernel, or the first one, in the middle block of its grid.

    The accesses are in the order of the TIR.
    """
    totals = AccessTotals({"global": make_sector_counter()})
    visit_requests(kernel, lowered_kernel or kernel.kernels[0], ("global",), totals.add)
    return list_global_accesses(totals)


def make_sector_counter() -> Callable[[RequestBatch], Sequence[int]]:
    """Return a function that counts requests for `list_global_accesses`."""
    count = CachedCount(count_sectors)
    return lambda batch: count(batch.addresses, batch.active, batch.site.nbytes)


def list_global_accesses(totals: AccessTotals) -> list[GlobalAccess]:
    """Return the global-memory accesses that were counted, in the order of the TIR."""
    return [
        GlobalAccess(site.kind, site.name, requests, sectors, min_sectors, lines, site.nbytes, site.statement_index)
        for site, (requests, sectors, min_sectors, lines) in totals.list_totals("global")
    ]


def count_sectors(
    addresses: NDArray[Any], active: NDArray[np.bool_], nbytes: int, *, is_copy: bool = False
) -> tuple[int, int, int, int]:
    """Return the numbers of requests, of sectors, of sectors at least, and of lines that accesses touch.

    Addresses in bytes, and whether a thread takes part, have the shape (requests, threads per warp). A thread accesses
    `nbytes` bytes from its address on. Asynchronous copies are counted differently.
    """
    is_request = active.any(axis=1)
    if not is_request.any():
        return 0, 0, 0, 0
    addresses, active = addresses[is_request].astype(np.int64), active[is_request]
    num_sectors, min_sectors = count_sectors_by_request(addresses, active, nbytes, is_copy=is_copy)
    lines = count_lines_by_request(addresses, active, nbytes)
    return int(is_request.sum()), int(num_sectors.sum()), int(min_sectors.sum()), int(lines.sum())


def count_sectors_by_request(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, *, is_copy: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sectors that each request touches, and their minimum; see `count_sectors` for the arguments."""
    # Threads that read the same bytes read them from the same address.
    requested_bytes = count_distinct(np.where(active, addresses, -1)) * nbytes
    num_sectors = _count_touched_pieces(addresses, active, nbytes, SECTOR_BYTES)
    if nbytes == VECTOR_BYTES:
        num_sectors = _count_by_quarter(addresses // SECTOR_BYTES, active, is_copy=is_copy)
    return num_sectors, ceil_div(requested_bytes, SECTOR_BYTES)


def count_lines_by_request(addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int) -> NDArray[np.int64]:
    """Return the lines that each request touches; see `count_sectors` for the arguments."""
    return _count_touched_pieces(addresses, active, nbytes, LINE_BYTES)


def _count_by_quarter(sectors: NDArray[np.int64], active: NDArray[np.bool_], *, is_copy: bool) -> NDArray[np.int64]:
    """Return the sectors that the quarter-warps of each request touch.

    A sector that two quarters share at their ends counts once. So does one that two quarters request thread by thread,
    unless the accesses are copies.
    """
    quarter_sectors = np.where(active, sectors, -1).reshape(len(sectors), 4, -1)
    num_sectors = count_distinct(quarter_sectors.reshape(-1, quarter_sectors.shape[2])).reshape(-1, 4)
    shares_sector = (quarter_sectors[:, 1:, 0] == quarter_sectors[:, :-1, -1]) & (quarter_sectors[:, 1:, 0] >= 0)
    added_sectors = num_sectors[:, 1:] - shares_sector
    if not is_copy:
        added_sectors = np.where((quarter_sectors[:, 1:] == quarter_sectors[:, :-1]).all(axis=2), 0, added_sectors)
    return num_sectors[:, 0] + added_sectors.sum(axis=1)


def _count_touched_pieces(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, piece_bytes: int
) -> NDArray[np.int64]:
    first_pieces, last_pieces = addresses // piece_bytes, (addresses + nbytes - 1) // piece_bytes
    spans = int((last_pieces - first_pieces)[active].max(initial=0)) + 1
    piece_indices = np.minimum(first_pieces[:, :, None] + np.arange(spans), last_pieces[:, :, None])
    return count_distinct(np.where(active[:, :, None], piece_indices, -1).reshape(len(addresses), -1))


def count_distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of different values in each row, negative values excluded."""
    sorted_values = np.sort(values, axis=1)
    return ((sorted_values >= 0) & (np.diff(sorted_values, axis=1, prepend=-1) != 0)).sum(axis=1)
