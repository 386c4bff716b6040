"""Memory accesses of a device kernel, and the requests of warps that execute them in one block.

The indices of most accesses are expressions of the TIR, which are evaluated for all threads and iterations at once. A
kernel that uses GPU instructions by name has addresses in registers. The emulator executes it on arrays of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.scopes import (
    ASYNC_COPY,
    SHARED_SCOPES,
    Scope,
    execute_scope,
    group_by_warp,
    iterate_parts,
    iterate_statements,
    needs_execution,
)
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.emulator.execution import run_with_observer
from tvmconv.emulator.observers import SITES_PER_STATEMENT, AccessObserver, AccessSite, MemoryAccess, MemorySpace
from tvmconv.emulator.threads import BlockIndex, count_lanes
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import LINE_BYTES, WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

_MAX_CACHED_THREADS = 1 << 14  # of a batch of requests whose counts are kept


@dataclass(frozen=True)
class Access:
    """One access to contiguous elements of a buffer."""

    kind: Literal["load", "store"]
    buffer: Any  # TIR buffer
    index: Any  # expression of the first element's index
    num_elements: int
    scope: Scope  # loops and conditions around the access
    statement_index: int  # in the order of `tvmconv.analysis.tir.scopes.iterate_statements`

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return get_numpy_dtype(str(self.buffer.dtype)).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a thread accesses."""
        return self.num_elements * self.itemsize


def iterate_accesses(function: PrimFunc, is_selected: Callable[[Any], bool]) -> Iterator[Access]:
    """Yield the accesses to some buffers in the order of the TIR; an asynchronous copy is a load and a store."""
    for statement_index, (statement, scope) in enumerate(iterate_statements(function)):
        for expression, part_scope in iterate_parts(statement.value, scope):
            kind = type(expression).__name__
            if kind == "TensorLoad" and is_selected(expression.source):
                index = _split_vector_index(expression.indices[0])
                yield Access("load", expression.source, *index, part_scope, statement_index)
            elif kind == "Call" and expression.op.name == ASYNC_COPY:
                yield from _iterate_copy_accesses(expression, part_scope, is_selected, statement_index)
        if type(statement).__name__ == "BufferStore" and is_selected(statement.buffer):
            yield Access("store", statement.buffer, *_split_vector_index(statement.indices[0]), scope, statement_index)


def _iterate_copy_accesses(
    call: Any, scope: Scope, is_selected: Callable[[Any], bool], statement_index: int
) -> Iterator[Access]:
    """Yield the load and the store of a copy; if the copy's condition is false, it stores zeros without a load."""
    target, source = call.args[0].args[0], call.args[2].args[0]
    for kind, buffer, index in (("load", source, call.args[3]), ("store", target, call.args[1])):
        if is_selected(buffer):
            load_scope = scope.add_condition(call.args[5], True) if kind == "load" and len(call.args) > 5 else scope
            num_elements = int(call.args[4]) // get_numpy_dtype(str(buffer.dtype)).itemsize
            yield Access(kind, buffer, index, num_elements, load_scope, statement_index)  # type: ignore[arg-type]


def _split_vector_index(index: Any) -> tuple[Any, int]:
    if type(index).__name__ != "Ramp":
        return index, 1
    if int(index.stride) != 1:
        raise AnalysisError(f"the vector {index} has a stride of {index.stride}; only contiguous vectors are supported")
    return index.base, int(index.lanes)


def is_shared(buffer: Any) -> bool:
    """Return whether a TIR buffer lies in shared memory."""
    return str(buffer.scope()) in SHARED_SCOPES


def is_global(kernel: Kernel, buffer: Any) -> bool:
    """Return whether a TIR buffer of a kernel lies in global memory, not in constant memory or a texture."""
    return str(buffer.scope()) == "global" and kernel.memory_scopes.get(str(buffer.name), "global") == "global"


def select_middle_block(lowered_kernel: LoweredKernel) -> BlockIndex:
    """Return the index of the middle block of a device kernel's grid as (x, y, z)."""
    x, y, z = lowered_kernel.launch.grid
    return x // 2, y // 2, z // 2


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """Some requests of one access; arrays have the shape (requests, threads per warp)."""

    site: AccessSite
    addresses: NDArray[np.int64]  # in bytes
    active: NDArray[np.bool_]  # whether the thread takes part
    num_repeats: int = 1  # executions of each request
    source_addresses: NDArray[np.int64] | None = None  # of a copy to shared memory; -1 where it stores zeros


def visit_requests(
    kernel: Kernel,
    lowered_kernel: LoweredKernel,
    spaces: Sequence[MemorySpace],
    visit: Callable[[RequestBatch], None],
    block: BlockIndex | None = None,
) -> None:
    """Call a function with all requests of a block to some memory spaces.

    The default is the middle block of the grid, because blocks at its border do less. Shared accesses have the same
    requests in all blocks; they are those of the first block if they are evaluated, or if they alone are wanted.
    """
    middle_block = select_middle_block(lowered_kernel)
    default_blocks: dict[MemorySpace, BlockIndex] = {"shared": (0, 0, 0), "global": middle_block}
    if needs_execution(lowered_kernel.function):
        observer = RequestObserver(count_lanes(lowered_kernel), spaces, visit)
        executed_block = block or (middle_block if "global" in spaces else default_blocks["shared"])
        run_with_observer(lowered_kernel, kernel.memory_scopes, [executed_block], observer)
        return
    is_in_space = {"shared": is_shared, "global": lambda buffer: is_global(kernel, buffer)}
    accesses = iterate_accesses(
        lowered_kernel.function, lambda buffer: any(is_in_space[space](buffer) for space in spaces)
    )
    for number, access in enumerate(accesses):
        space: MemorySpace = "shared" if is_shared(access.buffer) else "global"
        site_number = access.statement_index * SITES_PER_STATEMENT + number
        site = AccessSite(site_number, space, access.kind, str(access.buffer.name), access.nbytes)
        launch, executed_block = lowered_kernel.launch, block or default_blocks[space]
        for execution in execute_scope(access.scope, [access.index], launch, executed_block, allow_sampling=True):
            addresses = group_by_warp(execution.values[0] * access.itemsize)
            visit(RequestBatch(site, addresses, group_by_warp(execution.is_active), execution.num_repeats))


class RequestObserver(AccessObserver):
    """Observer that calls a function with the requests of the first executed block to some memory spaces."""

    def __init__(
        self, lanes_per_block: int, spaces: Sequence[MemorySpace], visit: Callable[[RequestBatch], None]
    ) -> None:
        self._lanes_per_block, self._spaces, self._visit = lanes_per_block, spaces, visit

    def on_access(self, event: MemoryAccess) -> None:
        """Arrange one access of all lanes in requests."""
        if event.space not in self._spaces or not (part := event.restrict_to_first_block(self._lanes_per_block)):
            return
        table, active = group_by_request(part.lanes, part.addresses)
        source_table = None
        if part.source_addresses is not None:
            source_table, _ = group_by_request(part.lanes, part.source_addresses)
        self._visit(RequestBatch(part.access_site, table, active, source_addresses=source_table))


def group_by_request(
    lanes: NDArray[np.intp], addresses: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return lanes' addresses and whether a thread takes part, both of shape (requests, threads per warp).

    A lane that occurs several times takes part in several requests.
    """
    if (np.diff(lanes) > 0).all():  # each lane occurs once, and the lanes are sorted
        (request_warps,) = np.bincount(lanes // WARP_SIZE).nonzero()
        num_requests, row = len(request_warps), np.searchsorted(request_warps, lanes // WARP_SIZE)
    else:
        order = np.argsort(lanes, kind="stable")
        lanes, addresses = lanes[order], addresses[order]
        run_starts = np.flatnonzero(np.diff(lanes, prepend=-1))
        repetition = np.arange(len(lanes)) - np.repeat(run_starts, np.diff(np.append(run_starts, len(lanes))))
        requests, row = np.unique(np.stack([lanes // WARP_SIZE, repetition]), axis=1, return_inverse=True)
        num_requests, row = requests.shape[1], row.reshape(-1)
    table, active = np.zeros((num_requests, WARP_SIZE), np.int64), np.zeros((num_requests, WARP_SIZE), bool)
    table[row, lanes % WARP_SIZE], active[row, lanes % WARP_SIZE] = addresses, True
    return table, active


CountFunction = Callable[..., Sequence[int]]  # from addresses, active threads and bytes per thread to counts


class CachedCount:
    """Counts of requests, computed once for requests whose addresses differ by whole lines."""

    def __init__(self, count: CountFunction) -> None:
        self._count = count
        self._cache: dict[tuple[object, ...], Sequence[int]] = {}

    def __call__(
        self, addresses: NDArray[np.int64], active: NDArray[np.bool_], nbytes: int, **options: bool
    ) -> Sequence[int]:
        """Return the counts of some requests."""
        if active.size > _MAX_CACHED_THREADS or not active.any():
            return self._count(addresses, active, nbytes, **options)
        first_address = int(addresses[active].min()) // LINE_BYTES * LINE_BYTES
        relative_addresses = np.where(active, addresses - first_address, 0)
        key = nbytes, *options.values(), relative_addresses.tobytes(), active.tobytes()
        if key not in self._cache:
            self._cache[key] = self._count(relative_addresses, active, nbytes, **options)
        return self._cache[key]


class AccessTotals:
    """Sums of the counts of each access's requests, with a function that counts requests for each memory space."""

    def __init__(self, count_by_space: Mapping[MemorySpace, Callable[[RequestBatch], Sequence[int]]]) -> None:
        self._count_by_space = count_by_space
        self._totals: dict[AccessSite, NDArray[np.int64]] = {}

    def add(self, batch: RequestBatch) -> None:
        """Add the counts of some requests."""
        counts = batch.num_repeats * np.array(self._count_by_space[batch.site.space](batch), np.int64)
        self._totals[batch.site] = counts + self._totals.get(batch.site, 0)

    def list_totals(self, space: MemorySpace) -> list[tuple[AccessSite, list[int]]]:
        """Return the accesses to a memory space with their sums, in the order of the TIR."""
        return [(site, self._totals[site].tolist()) for site in sorted(self._totals) if site.space == space]
