"""The lanes of a warp on the banks and sectors of memory: of each access, the request that takes most.

A request is one access of one warp. Counts of all of them are in `banks` and `coalescing`, whose rules are the same;
here is what one looks like: where each lane's bytes lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.bank_conflicts import count_wavefronts_by_request
from tvmconv.analysis.memory.coalescing import GLOBAL, count_sectors_by_request, group_by_request, select_middle_block
from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import SHARED_SCOPES, execute_scope, group_by_warp, has_instructions
from tvmconv.emulator.blocks import count_lanes
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import SITES_PER_STATEMENT, AccessObserver, AccessSite, MemoryAccess, MemorySpace

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class CostliestRequest:
    """The costliest request of one access.

    Attributes:
        memory_space: global or shared memory.
        kind: load or store.
        name: of the array or the shared buffer.
        statement_index: its index in `tvmconv.analysis.tir.scopes.iterate_statements`.
        access_bytes: that a lane accesses.
        lanes: that take part, of the warp: 0 to 31, in order.
        addresses: where each begins, in bytes.
        cost: wavefronts of shared memory, or sectors.
        min_cost: how few would do for the same bytes.
    """

    memory_space: MemorySpace
    kind: Literal["load", "store"]
    name: str
    statement_index: int
    access_bytes: int
    lanes: tuple[int, ...]
    addresses: tuple[int, ...]
    cost: int
    min_cost: int


def find_worst_requests(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> list[CostliestRequest]:
    """Of each access of a kernel's step, the first request that takes most, in the order of the text.

    Shared accesses are those of the first block, global ones those of the middle one, as where they are counted.

    Args:
        kernel: a built kernel, for any target.
        lowered_kernel: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: an access cannot be executed, or depends on the data.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    if has_instructions(lowered_kernel.function):
        observer = _CostliestRequests(count_lanes(lowered_kernel))
        run_with_observer(lowered_kernel, kernel.memory_scopes, [select_middle_block(lowered_kernel)], observer)
        return observer.list_requests()
    return [request for request in _iterate_evaluated_requests(kernel, lowered_kernel) if request]


def _iterate_evaluated_requests(kernel: Kernel, lowered_kernel: LoweredKernel) -> Iterator[CostliestRequest | None]:
    def is_selected(buffer: Any) -> bool:
        scope = str(buffer.scope())
        return scope in SHARED_SCOPES or (
            scope == GLOBAL and kernel.memory_scopes.get(str(buffer.name), GLOBAL) == GLOBAL
        )

    for access in iterate_accesses(lowered_kernel.function, is_selected):
        memory_space: MemorySpace = "shared" if str(access.buffer.scope()) in SHARED_SCOPES else "global"
        yield _find_worst_request(access, lowered_kernel, memory_space)


def _find_worst_request(
    access: Access, lowered_kernel: LoweredKernel, memory_space: MemorySpace
) -> CostliestRequest | None:
    block = (0, 0, 0) if memory_space == "shared" else select_middle_block(lowered_kernel)
    site = AccessSite(
        access.statement_index * SITES_PER_STATEMENT, memory_space, access.kind, str(access.buffer.name), access.nbytes
    )
    costliest: CostliestRequest | None = None
    for execution in execute_scope(access.scope, [access.index], lowered_kernel.launch, block, allow_sampling=True):
        (elements,) = execution.values
        costliest = select_costlier(
            costliest, site, group_by_warp(elements * access.itemsize), group_by_warp(execution.is_active)
        )
    return costliest


def select_costlier(
    costliest: CostliestRequest | None,
    site: AccessSite,
    addresses: NDArray[Any],
    active: NDArray[np.bool_],
    *,
    is_copy: bool = False,
) -> CostliestRequest | None:
    """What was found, or one of these requests that takes more.

    Args:
        costliest: before, if there was one.
        site: of the access.
        addresses: in bytes, of shape (requests, threads of a warp).
        active: whether the thread takes part, same shape.
        is_copy: whether these are asynchronous copies.
    """
    is_request = active.any(axis=1)
    if not is_request.any():
        return costliest
    addresses, active = addresses[is_request].astype(np.int64), active[is_request]
    if site.space == "shared":
        costs, min_costs = count_wavefronts_by_request(addresses, active, site.nbytes)
    else:
        costs, min_costs = count_sectors_by_request(addresses, active, site.nbytes, is_copy=is_copy)
    worst_index = int(costs.argmax())
    if costliest and costliest.cost >= costs[worst_index]:
        return costliest
    (lanes,) = active[worst_index].nonzero()
    return CostliestRequest(
        memory_space=site.space,
        kind=site.kind,
        name=site.name,
        statement_index=site.statement_index,
        access_bytes=site.nbytes,
        lanes=tuple(lanes.tolist()),
        addresses=tuple(addresses[worst_index, lanes].tolist()),
        cost=int(costs[worst_index]),
        min_cost=int(min_costs[worst_index]),
    )


class _CostliestRequests(AccessObserver):
    """Keeps the costliest request of each access of the first of the blocks that are executed.

    Args:
        lanes_per_block: of a block.
    """

    def __init__(self, lanes_per_block: int) -> None:
        self._lanes_per_block = lanes_per_block
        self._requests: dict[AccessSite, CostliestRequest | None] = {}

    def on_access(self, event: MemoryAccess) -> None:
        """Look at one access of all lanes."""
        if block_event := event.restrict_to_first_block(self._lanes_per_block):
            site = block_event.access_site
            self._requests[site] = select_costlier(
                self._requests.get(site), site, *group_by_request(block_event.lanes, block_event.addresses)
            )

    def list_requests(self) -> list[CostliestRequest]:
        """What was found, in the order of the text."""
        return [request for site in sorted(self._requests) if (request := self._requests[site])]
