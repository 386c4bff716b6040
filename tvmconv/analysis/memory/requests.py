"""Costliest warp request of each memory access, with the address of each lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.bank_conflicts import count_wavefronts_by_request
from tvmconv.analysis.memory.coalescing import count_sectors_by_request
from tvmconv.analysis.tir.accesses import RequestBatch, visit_requests
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.emulator.observers import AccessSite, MemorySpace
from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class CostliestRequest:
    """Costliest request of one access."""

    memory_space: MemorySpace
    kind: Literal["load", "store"]
    name: str  # of the array or the shared buffer
    statement_index: int  # in `tvmconv.analysis.tir.scopes.iterate_statements`
    access_bytes: int  # per lane
    lanes: tuple[int, ...]  # active lanes of the warp, from 0 to 31 in ascending order
    addresses: tuple[int, ...]  # of each active lane in bytes
    cost: int  # wavefronts of shared memory, or sectors of global memory
    min_cost: int  # minimum of the cost for the same bytes


def find_worst_requests(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> list[CostliestRequest]:
    """Return the first request of maximum cost of each access of a device kernel, in the order of the TIR."""
    worst_requests: dict[AccessSite, CostliestRequest | None] = {}

    def note_requests(batch: RequestBatch) -> None:
        worst = worst_requests.get(batch.site)
        worst_requests[batch.site] = select_costlier(worst, batch.site, batch.addresses, batch.active)

    visit_requests(kernel, lowered_kernel or kernel.kernels[0], ("shared", "global"), note_requests)
    return [request for site in sorted(worst_requests) if (request := worst_requests[site])]


def select_costlier(
    costliest: CostliestRequest | None,
    site: AccessSite,
    addresses: NDArray[Any],
    active: NDArray[np.bool_],
    *,
    is_copy: bool = False,
) -> CostliestRequest | None:
    """Return `costliest`, or the first of the given requests that costs more; None if there is none.

    Addresses in bytes, and whether a thread takes part, have the shape (requests, threads per warp).
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
