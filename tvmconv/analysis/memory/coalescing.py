"""Coalescing: the sectors of global memory that each warp request touches, counted without running the kernel.

Global memory is moved in sectors of 32 bytes. A request takes as many sectors as its threads touch, in any order (CUDA
C++ Best Practices Guide, "Coalesced Access to Global Memory"): 4 for 32 neighboring float32, 32 if each lies in its own
sector. Accesses of 16 bytes are served by quarter-warps, and a sector counts once per quarter that touches it. Two
exceptions were measured on an H200. A sector counts once if the last thread of a quarter shares it with the first of
the next. A quarter that requests the same sectors as the previous one is free, except for asynchronous copies. Nsight
Compute counts sectors as `l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, requests as `l1tex__t_requests_...`.

The accesses of the TIR are counted over one block. The default is the middle block of the grid, because blocks at the
border do less. Arrays are assumed to begin at a sector, as allocators align them. Kernels that use GPU instructions by
name are emulated, as in `bank_conflicts`. Copies of TMA are not counted because they need no requests of threads. Loads
from constant memory and through textures are not counted either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import execute_scope, group_by_warp, has_instructions
from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.blocks import BlockIndex, count_lanes
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import AccessObserver, AccessSite, MemoryAccess
from tvmconv.gpu_specs import VECTOR_BYTES, WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.executable import LaunchConfig
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

SECTOR_BYTES = 32
LINE_BYTES = 128  # L1 cache line
GLOBAL = "global"


@dataclass(frozen=True)
class GlobalAccess:
    """Counts of one load or store of global memory in a kernel, over all its executions in one block.

    Attributes:
        kind: "load" or "store".
        array: Name of the array.
        num_requests: Number of warp requests with at least one active thread.
        sectors: Number of 32-byte sectors that the requests touch.
        min_sectors: Number of sectors if the bytes of each request were contiguous.
        nbytes: Bytes per thread.
        num_lines: Number of 128-byte lines that the requests touch; L1 looks up one line at a time.
        statement_index: Index of the statement in the order of `tvmconv.analysis.tir.scopes.iterate_statements`.
    """

    kind: Literal["load", "store"]
    array: str
    num_requests: int
    sectors: int
    min_sectors: int
    nbytes: int
    num_lines: int
    statement_index: int

    @property
    def efficiency(self) -> float:
        """Requested fraction of the bytes that move, from 0 to 1."""
        return self.min_sectors / self.sectors if self.sectors else 1.0


def count_global_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel | None = None, block: BlockIndex | None = None
) -> list[GlobalAccess]:
    """Count each global-memory access of a device kernel over one block.

    Args:
        kernel: A built kernel for any target.
        lowered_kernel: One of `kernel.kernels`; the first by default.
        block: Index of the block in the grid as (x, y, z); the middle block by default.

    Returns:
        The accesses in the order of the TIR.

    Raises:
        AnalysisError: An access cannot be executed (`tvmconv.analysis.tir.scopes.execute_scope`,
            `tvmconv.emulator.execution.execute`), or it depends on the data.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    return next(iterate_block_accesses(kernel, lowered_kernel, [block or select_middle_block(lowered_kernel)]))


def iterate_block_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel, blocks: Iterable[BlockIndex]
) -> Iterator[list[GlobalAccess]]:
    """Yield the result of `count_global_accesses` for each block; the TIR is traversed only once."""
    if has_instructions(lowered_kernel.function):
        for block in blocks:
            observer = SectorObserver(count_lanes(lowered_kernel))
            run_with_observer(lowered_kernel, kernel.memory_scopes, [block], observer)
            yield observer.list_accesses()
        return
    accesses = list(iterate_accesses(lowered_kernel.function, lambda buffer: is_global(kernel, buffer)))
    yield from ([_count_access(access, lowered_kernel.launch, block) for access in accesses] for block in blocks)


def is_global(kernel: Kernel, buffer: Any) -> bool:
    """Return whether a TIR buffer of a kernel lies in global memory, not in constant memory or a texture."""
    return str(buffer.scope()) == GLOBAL and kernel.memory_scopes.get(str(buffer.name), GLOBAL) == GLOBAL


def select_middle_block(lowered_kernel: LoweredKernel) -> BlockIndex:
    """Return the index of the middle block of a device kernel's grid as (x, y, z)."""
    x, y, z = lowered_kernel.launch.grid
    return x // 2, y // 2, z // 2


def _count_access(access: Access, launch: LaunchConfig, block: BlockIndex) -> GlobalAccess:
    totals = np.zeros(4, np.int64)
    for execution in execute_scope(access.scope, [access.index], launch, block, allow_sampling=True):
        (elements,) = execution.values
        addresses, active = group_by_warp(elements * access.itemsize), group_by_warp(execution.is_active)
        totals += execution.num_repeats * np.array(count_sectors(addresses, active, access.nbytes))
    requests, num_sectors, min_sectors, lines = totals.tolist()
    name = str(access.buffer.name)
    counts = requests, num_sectors, min_sectors
    return GlobalAccess(access.kind, name, *counts, access.nbytes, lines, access.statement_index)


def count_sectors(
    addresses: NDArray[Any], active: NDArray[np.bool_], nbytes: int, *, is_copy: bool = False
) -> tuple[int, int, int, int]:
    """Return the numbers of requests, of sectors, of sectors at least, and of lines that accesses touch.

    Args:
        addresses: Addresses in bytes, of shape (requests, threads per warp).
        active: Whether the thread takes part, of the same shape.
        nbytes: Bytes that a thread accesses from its address on.
        is_copy: Whether the accesses are asynchronous copies.
    """
    is_request = active.any(axis=1)
    if not is_request.any():
        return 0, 0, 0, 0
    addresses, active = addresses[is_request].astype(np.int64), active[is_request]
    num_sectors, min_sectors = count_sectors_by_request(addresses, active, nbytes, is_copy=is_copy)
    lines = _count_touched_pieces(addresses, active, nbytes, LINE_BYTES)
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
    """Return how many pieces of `piece_bytes` bytes each request touches."""
    first_pieces, last_pieces = addresses // piece_bytes, (addresses + nbytes - 1) // piece_bytes
    spans = int((last_pieces - first_pieces)[active].max(initial=0)) + 1
    piece_indices = np.minimum(first_pieces[:, :, None] + np.arange(spans), last_pieces[:, :, None])
    return count_distinct(np.where(active[:, :, None], piece_indices, -1).reshape(len(addresses), -1))


def count_distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of different values in each row, negative values excluded."""
    sorted_values = np.sort(values, axis=1)
    return ((sorted_values >= 0) & (np.diff(sorted_values, axis=1, prepend=-1) != 0)).sum(axis=1)


class SectorObserver(AccessObserver):
    """Observer that sums the global-memory accesses of the executed blocks.

    Args:
        lanes_per_block: Number of lanes per block, to count only the first block; None to count all blocks.
    """

    def __init__(self, lanes_per_block: int | None = None) -> None:
        self._lanes_per_block = lanes_per_block
        self._counts: dict[AccessSite, NDArray[np.int64]] = {}
        self._pattern_cache: dict[tuple[bytes, bytes, int], NDArray[np.int64]] = {}

    def on_access(self, event: MemoryAccess) -> None:
        """Count a global access."""
        block_event = event.restrict_to_first_block(self._lanes_per_block)
        if block_event is None or block_event.space != GLOBAL:
            return
        # The counts are the same if all addresses are shifted by the same number of lines.
        relative_addresses = block_event.addresses - block_event.addresses[0] // LINE_BYTES * LINE_BYTES
        pattern = block_event.lanes.tobytes(), relative_addresses.tobytes(), block_event.nbytes
        if pattern not in self._pattern_cache:
            # Negative addresses would count as inactive lanes.
            relative_addresses += LINE_BYTES - relative_addresses.min() // LINE_BYTES * LINE_BYTES
            self._pattern_cache[pattern] = np.array(
                count_sectors(*group_by_request(block_event.lanes, relative_addresses), block_event.nbytes)
            )
        self._counts.setdefault(block_event.access_site, np.zeros(4, np.int64))
        self._counts[block_event.access_site] += self._pattern_cache[pattern]

    def list_accesses(self) -> list[GlobalAccess]:
        """Return the counted accesses in the order of the TIR."""
        accesses = []
        for site, total in sorted(self._counts.items(), key=lambda item: item[0]):
            requests, sectors, minimum, lines = total.tolist()
            counts = requests, sectors, minimum
            accesses.append(GlobalAccess(site.kind, site.name, *counts, site.nbytes, lines, site.statement_index))
        return accesses


def group_by_request(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Arrange lanes and their addresses in a table of requests for `count_sectors`.

    Args:
        lanes: Indices of lanes in any order; a lane that occurs several times takes part in several requests.
        addresses: Address of each lane in bytes.

    Returns:
        Addresses and whether the thread takes part, each of shape (requests, threads per warp).
    """
    if (np.diff(lanes) > 0).all():  # each lane occurs once, and the lanes are sorted
        (request_warps,) = np.bincount(lanes // WARP_SIZE).nonzero()
        shape = len(request_warps), WARP_SIZE
        table, active = np.zeros(shape, np.int64), np.zeros(shape, bool)
        row = np.searchsorted(request_warps, lanes // WARP_SIZE)
        table[row, lanes % WARP_SIZE], active[row, lanes % WARP_SIZE] = addresses, True
        return table, active
    order = np.argsort(lanes, kind="stable")
    lanes, addresses = lanes[order], addresses[order]
    run_starts = np.flatnonzero(np.diff(lanes, prepend=-1))
    repetition = np.arange(len(lanes)) - np.repeat(run_starts, np.diff(np.append(run_starts, len(lanes))))
    requests, row = np.unique(np.stack([lanes // WARP_SIZE, repetition]), axis=1, return_inverse=True)
    table = np.zeros((requests.shape[1], WARP_SIZE), np.int64)
    active = np.zeros(table.shape, bool)
    table[row.reshape(-1), lanes % WARP_SIZE], active[row.reshape(-1), lanes % WARP_SIZE] = addresses, True
    return table, active
