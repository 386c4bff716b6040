"""Coalescing: the sectors of global memory that each access of a warp touches, counted without running the kernel.

Global memory is moved in sectors of 32 bytes. A request of a warp takes as many as its threads touch different ones,
whatever order they touch them in (CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory"): 4 for 32
neighbouring float32, 32 where each lies in a sector of its own. Accesses of 16 bytes are served by quarters of a warp:
what one touches again that another has touched counts again, but for a sector that the last thread of one has in common
with the first of the next, and but for a quarter whose threads ask for the same sectors as those of the quarter before
it, asynchronous copies excepted (measured on an H200). Nsight Compute counts sectors as
`l1tex__t_sectors_pipe_lsu_mem_global_op_ld` and `_st`, requests as `l1tex__t_requests_...`.

Counted are the accesses that the TIR makes, in one block: by default the middle one of the grid, as those at its
border take less. Arrays begin at a sector, as whatever allocates them makes them. Kernels that have GPU instructions by
name are executed, as in `banks`; what TMA copies goes another way, without requests of threads, and is not counted
here. Nor is what is read from constant memory or through a texture.
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
LINE_BYTES = 128  # of L1
GLOBAL = "global"


@dataclass(frozen=True)
class GlobalAccess:
    """One load or store of global memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        array: its name.
        num_requests: how often a warp executes it, with at least one thread taking part.
        sectors: that these touch.
        min_sectors: how many it would be if the bytes that each request touches lay side by side.
        nbytes: that a thread accesses.
        num_lines: of 128 bytes that the requests touch; L1 looks one up at a time.
        statement_index: the index of the statement that it is of, in the order of
            `tvmconv.analysis.tir.scopes.iterate_statements`.
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
        """The share of what is moved that is asked for, 0 to 1."""
        return self.min_sectors / self.sectors if self.sectors else 1.0


def count_global_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel | None = None, block: BlockIndex | None = None
) -> list[GlobalAccess]:
    """Every global access of a kernel's step, each counted over one block.

    Args:
        kernel: a built kernel, for any target.
        lowered_kernel: one of `kernel.steps`; the first by default.
        block: of the grid, as (x, y, z); the one in the middle by default.

    Raises:
        AnalysisError: an access cannot be executed (`tvmconv.analysis.tir.scopes.execute_scope`,
            `tvmconv.emulator.execution.execute`), or it depends on the data.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    return next(iterate_block_accesses(kernel, lowered_kernel, [block or select_middle_block(lowered_kernel)]))


def iterate_block_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel, blocks: Iterable[BlockIndex]
) -> Iterator[list[GlobalAccess]]:
    """What `count_global_accesses` counts over each of several blocks of a step: its text is read but once."""
    if has_instructions(lowered_kernel.function):
        yield from (_count_by_execution(lowered_kernel, kernel, block) for block in blocks)
        return

    def is_global(buffer: Any) -> bool:
        return str(buffer.scope()) == GLOBAL and kernel.memory_scopes.get(str(buffer.name), GLOBAL) == GLOBAL

    global_loads_and_stores = list(iterate_accesses(lowered_kernel.function, is_global))
    yield from (
        [_count_access(access, lowered_kernel.launch, block) for access in global_loads_and_stores] for block in blocks
    )


def select_middle_block(lowered_kernel: LoweredKernel) -> BlockIndex:
    """The block in the middle of a step's grid, as (x, y, z)."""
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
    return GlobalAccess(
        access.kind, name, requests, num_sectors, min_sectors, access.nbytes, lines, access.statement_index
    )


def count_sectors(
    addresses: NDArray[Any], active: NDArray[np.bool_], nbytes: int, *, is_copy: bool = False
) -> tuple[int, int, int, int]:
    """Requests, the sectors that they touch, the fewest that could hold what they touch, and the lines they touch.

    Args:
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        nbytes: that a thread accesses from its address on.
        is_copy: whether these are asynchronous copies.
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
    """The sectors that each request touches, and the fewest that could hold what it touches; as for `count_sectors`."""
    # Threads that read the same bytes do so from the same address on.
    requested_bytes = count_distinct(np.where(active, addresses, -1)) * nbytes
    num_sectors = _count_touched_pieces(addresses, active, nbytes, SECTOR_BYTES)
    if nbytes == VECTOR_BYTES:
        num_sectors = _count_quarter_sectors(addresses // SECTOR_BYTES, active, is_copy=is_copy)
    return num_sectors, ceil_div(requested_bytes, SECTOR_BYTES)


def _count_quarter_sectors(
    sector_indices: NDArray[np.int64], active: NDArray[np.bool_], *, is_copy: bool
) -> NDArray[np.int64]:
    """How many sectors the quarters of each request touch.

    One that two share at their ends counts once, and so do, but of copies, those of quarters that ask for the same,
    thread by thread.
    """
    quarter_sectors = np.where(active, sector_indices, -1).reshape(len(sector_indices), 4, -1)
    num_sectors = count_distinct(quarter_sectors.reshape(-1, quarter_sectors.shape[2])).reshape(-1, 4)
    shares_sector = (quarter_sectors[:, 1:, 0] == quarter_sectors[:, :-1, -1]) & (quarter_sectors[:, 1:, 0] >= 0)
    added_sectors = num_sectors[:, 1:] - shares_sector
    if not is_copy:
        added_sectors = np.where((quarter_sectors[:, 1:] == quarter_sectors[:, :-1]).all(axis=2), 0, added_sectors)
    return num_sectors[:, 0] + added_sectors.sum(axis=1)


def _count_touched_pieces(
    addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, piece_bytes: int
) -> NDArray[np.int64]:
    """How many pieces of so many bytes each request touches."""
    first_pieces, last_pieces = addresses // piece_bytes, (addresses + nbytes - 1) // piece_bytes
    spans = int((last_pieces - first_pieces)[active].max(initial=0)) + 1
    piece_indices = np.minimum(first_pieces[:, :, None] + np.arange(spans), last_pieces[:, :, None])
    return count_distinct(np.where(active[:, :, None], piece_indices, -1).reshape(len(addresses), -1))


def count_distinct(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many different values each row has, those below zero not counted."""
    sorted_values = np.sort(values, axis=1)
    return ((sorted_values >= 0) & (np.diff(sorted_values, axis=1, prepend=-1) != 0)).sum(axis=1)


def _count_by_execution(lowered_kernel: LoweredKernel, kernel: Kernel, block: BlockIndex) -> list[GlobalAccess]:
    observer = SectorObserver(count_lanes(lowered_kernel))
    run_with_observer(lowered_kernel, kernel.memory_scopes, [block], observer)
    return observer.list_accesses()


class SectorObserver(AccessObserver):
    """Adds up the global accesses of the blocks that are executed.

    Args:
        lanes_per_block: of a block, for those of the first alone; None for all.
    """

    def __init__(self, lanes_per_block: int | None = None) -> None:
        self._lanes_per_block = lanes_per_block
        self._counts: dict[AccessSite, NDArray[np.int64]] = {}
        self._pattern_cache: dict[tuple[bytes, bytes, int], NDArray[np.int64]] = {}  # patterns that repeat

    def on_access(self, event: MemoryAccess) -> None:
        """Count a global access."""
        block_event = event.restrict_to_first_block(self._lanes_per_block)
        if block_event is None or block_event.space != GLOBAL:
            return
        # What is touched is the same for addresses that are all moved on by as many lines.
        relative_addresses = block_event.addresses - block_event.addresses[0] // LINE_BYTES * LINE_BYTES
        pattern = block_event.lanes.tobytes(), relative_addresses.tobytes(), block_event.nbytes
        if pattern not in self._pattern_cache:
            relative_addresses += (
                LINE_BYTES - relative_addresses.min() // LINE_BYTES * LINE_BYTES
            )  # addresses below zero stand for nobody
            self._pattern_cache[pattern] = np.array(
                count_sectors(*group_by_request(block_event.lanes, relative_addresses), block_event.nbytes)
            )
        self._counts.setdefault(block_event.access_site, np.zeros(4, np.int64))
        self._counts[block_event.access_site] += self._pattern_cache[pattern]

    def list_accesses(self) -> list[GlobalAccess]:
        """What was counted, in the order of the text."""
        global_list = []
        for site, total in sorted(self._counts.items(), key=lambda item: item[0]):
            requests, num_sectors, min_sectors, lines = total.tolist()
            access = GlobalAccess(
                site.kind, site.name, requests, num_sectors, min_sectors, site.nbytes, lines, site.statement_index
            )
            global_list.append(access)
        return global_list


def group_by_request(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Addresses and activity by request, as for `count_sectors`.

    Args:
        lanes: in any order; each may take part several times, once in a request.
        addresses: of each, in bytes.
    """
    if (np.diff(lanes) > 0).all():  # each once, in order
        (request_warps,) = np.bincount(lanes // WARP_SIZE).nonzero()
        table, active = (
            np.zeros((len(request_warps), WARP_SIZE), np.int64),
            np.zeros((len(request_warps), WARP_SIZE), bool),
        )
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
