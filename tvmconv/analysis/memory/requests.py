"""Costliest warp request of each memory access, with the address of each lane.

A request is one access of one warp. `bank_conflicts` and `coalescing` count all requests by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.bank_conflicts import count_wavefronts_by_request, is_shared
from tvmconv.analysis.memory.coalescing import (
    count_sectors_by_request,
    group_by_request,
    is_global,
    select_middle_block,
)
from tvmconv.analysis.tir.accesses import Access, iterate_accesses
from tvmconv.analysis.tir.scopes import execute_scope, group_by_warp, has_instructions
from tvmconv.emulator.blocks import count_lanes
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import SITES_PER_STATEMENT, AccessObserver, AccessSite, MemoryAccess, MemorySpace

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class CostliestRequest:
    """Costliest request of one access.

    Attributes:
        memory_space: "global" or "shared".
        kind: "load" or "store".
        name: Name of the array or the shared buffer.
        statement_index: Index of the statement in `tvmconv.analysis.tir.scopes.iterate_statements`.
        access_bytes: Bytes per lane.
        lanes: Active lanes of the warp, from 0 to 31 in ascending order.
        addresses: Address of each active lane in bytes.
        cost: Number of wavefronts of shared memory, or of sectors of global memory.
        min_cost: Minimum of the cost for the same bytes.
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
    """Return the first request of maximum cost of each access of a device kernel, in the order of the TIR.

    Shared accesses are those of the first block, and global ones those of the middle block, as where they are counted.

    Args:
        kernel: A built kernel for any target.
        lowered_kernel: One of `kernel.kernels`; the first by default.

    Raises:
        AnalysisError: An access cannot be executed, or it depends on the data.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    if has_instructions(lowered_kernel.function):
        observer = _CostliestRequests(count_lanes(lowered_kernel))
        run_with_observer(lowered_kernel, kernel.memory_scopes, [select_middle_block(lowered_kernel)], observer)
        return observer.list_requests()
    return [request for request in _iterate_evaluated_requests(kernel, lowered_kernel) if request]


def _iterate_evaluated_requests(kernel: Kernel, lowered_kernel: LoweredKernel) -> Iterator[CostliestRequest | None]:
    def is_selected(buffer: Any) -> bool:
        return is_shared(buffer) or is_global(kernel, buffer)

    for access in iterate_accesses(lowered_kernel.function, is_selected):
        memory_space: MemorySpace = "shared" if is_shared(access.buffer) else "global"
        yield _find_worst_request(access, lowered_kernel, memory_space)


def _find_worst_request(access: Access, lowered_kernel: LoweredKernel, space: MemorySpace) -> CostliestRequest | None:
    block = (0, 0, 0) if space == "shared" else select_middle_block(lowered_kernel)
    site_number = access.statement_index * SITES_PER_STATEMENT
    site = AccessSite(site_number, space, access.kind, str(access.buffer.name), access.nbytes)
    costliest: CostliestRequest | None = None
    for execution in execute_scope(access.scope, [access.index], lowered_kernel.launch, block, allow_sampling=True):
        (elements,) = execution.values
        addresses, active = group_by_warp(elements * access.itemsize), group_by_warp(execution.is_active)
        costliest = select_costlier(costliest, site, addresses, active)
    return costliest


def select_costlier(
    costliest: CostliestRequest | None,
    site: AccessSite,
    addresses: NDArray[Any],
    active: NDArray[np.bool_],
    *,
    is_copy: bool = False,
) -> CostliestRequest | None:
    """Return `costliest`, or the first of the given requests that costs more.

    Args:
        costliest: Costliest request so far; None if there is none.
        site: Site of the access.
        addresses: Addresses in bytes, of shape (requests, threads per warp).
        active: Whether the thread takes part, of the same shape.
        is_copy: Whether the accesses are asynchronous copies.
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
    """Observer that keeps the costliest request of each access of the first executed block.

    Args:
        lanes_per_block: Number of lanes per block.
    """

    def __init__(self, lanes_per_block: int) -> None:
        self._lanes_per_block = lanes_per_block
        self._requests: dict[AccessSite, CostliestRequest | None] = {}

    def on_access(self, event: MemoryAccess) -> None:
        """Compare the requests of one access of all lanes with the costliest so far."""
        if block_event := event.restrict_to_first_block(self._lanes_per_block):
            site = block_event.access_site
            self._requests[site] = select_costlier(
                self._requests.get(site), site, *group_by_request(block_event.lanes, block_event.addresses)
            )

    def list_requests(self) -> list[CostliestRequest]:
        """Return the costliest requests in the order of the TIR."""
        return [request for site in sorted(self._requests) if (request := self._requests[site])]
