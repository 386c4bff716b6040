"""Memory operations and arithmetic of one block, counted from the lowered TIR without running the kernel.

NumPy evaluates every access and operation of the TIR for all threads and iterations, so operations that a condition
excludes are not counted. A kernel that uses GPU instructions by name is emulated on arrays of zeros, with these counts:

* An mma or wgmma counts its multiplications and additions: 2,048 of each for an m16n8k16 of a warp. A wgmma is also a
  shared load of its operands, and `ldmatrix` is a shared load of its rows.
* An asynchronous copy is a load of the bytes that it reads and a store. A TMA copy is a load of the part of its box
  that lies in the array, and a store of the whole box in each destination block.

The block is the busiest of a sample that is spread over the grid. This is an interior block because most blocks of an
image do not touch its border. The compiler may execute less than the TIR: it merges loads of one element, keeps in a
register an accumulator that the TIR has in global memory, and fuses a multiplication and an addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.operations import (
    ADDITIONS,
    ARITHMETIC,
    EXTREMA,
    GLOBAL_LOADS,
    GLOBAL_STORES,
    LOADS,
    MEMORY,
    MULTIPLICATIONS,
    SHUFFLES,
    STORES,
    TEXTURE_FETCHES,
    find_memory_scope,
    iterate_ops,
)
from tvmconv.analysis.tir.scopes import Scope, execute_scope, group_by_warp, iterate_statements, needs_execution
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.memory_scopes import MemoryScope
from tvmconv.emulator.execution import run_with_observer
from tvmconv.emulator.observers import AccessObserver, MemoryAccess
from tvmconv.emulator.threads import BlockIndex, EmulatedThreads, count_lanes, expand_to_clusters, sample_blocks
from tvmconv.kernel import Kernel
from tvmconv.target import WARP_SIZE


@dataclass(frozen=True)
class OperationCount:
    """Number of executions of one kind of operation in a block."""

    num_elements: int = 0  # elements, over all threads and the lanes of vectors
    num_requests: int = 0  # warp requests with at least one active thread; a vector counts once
    num_bytes: int = 0  # bytes of the elements

    def __add__(self, addend: OperationCount) -> OperationCount:
        requests = self.num_requests + addend.num_requests
        return OperationCount(self.num_elements + addend.num_elements, requests, self.num_bytes + addend.num_bytes)


@dataclass(frozen=True)
class BlockTraffic:
    """Memory operations and arithmetic of one block."""

    num_threads: int  # threads per block
    num_outputs: int  # different elements of the output that the block stores
    # count of each operation in `MEMORY` and `ARITHMETIC`; registers do not count as memory
    counts: Mapping[str, OperationCount]

    @property
    def flops(self) -> int:
        """Number of floating-point multiplications and additions.

        The computation of texel coordinates and the minimum and maximum of a clamp are not included.
        """
        return self.counts[MULTIPLICATIONS].num_elements + self.counts[ADDITIONS].num_elements

    @property
    def flops_per_load(self) -> float:
        """Number of `flops` per element that is read from global memory or through a texture."""
        loads = self.counts[GLOBAL_LOADS].num_elements + self.counts[TEXTURE_FETCHES].num_elements
        return self.flops / loads if loads else math.inf

    @property
    def flops_per_byte(self) -> float:
        """Number of `flops` per byte that moves from or to global memory, textures included."""
        moved_bytes = sum(self.counts[name].num_bytes for name in (GLOBAL_LOADS, GLOBAL_STORES, TEXTURE_FETCHES))
        return self.flops / moved_bytes if moved_bytes else math.inf

    def count_per_output(self, operation: str) -> float:
        """Return the average number of executions of an operation per output."""
        return self.counts[operation].num_elements / self.num_outputs


def count_traffic(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> BlockTraffic:
    """Count the memory operations and arithmetic of a device kernel's busiest block."""
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    if needs_execution(lowered_kernel.function):
        return _count_by_execution(lowered_kernel, kernel.memory_scopes)
    ops = list(iterate_ops(lowered_kernel, kernel.memory_scopes))
    scopes = dict.fromkeys(operation.scope for operation in ops)
    executions_by_block = {
        block: {scope: _count_scope_executions(scope, lowered_kernel, block) for scope in scopes}
        for block in sample_blocks(lowered_kernel.launch.grid)
    }
    block, execution_counts = max(
        executions_by_block.items(), key=lambda item: sum(count.num_elements for count in item[1].values())
    )
    counts = dict.fromkeys((*MEMORY, *ARITHMETIC), OperationCount())
    for name, scope, vector_lanes, itemsize in ops:
        elements = vector_lanes * execution_counts[scope].num_elements
        counts[name] += OperationCount(elements, execution_counts[scope].num_requests, elements * itemsize)
    outputs = _count_outputs(lowered_kernel, kernel.memory_scopes, block)
    return BlockTraffic(lowered_kernel.launch.threads_per_block, outputs, counts)


class TrafficObserver(AccessObserver):
    """Observer that counts the operations of each executed block."""

    def __init__(
        self,
        num_blocks: int,
        lanes_per_block: int,
        memory_scopes: Mapping[str, MemoryScope],
        *,
        wants_async_proxy: bool = True,
    ) -> None:
        self.wants_async_proxy = wants_async_proxy
        self._num_blocks, self._lanes_per_block, self._memory_scopes = num_blocks, lanes_per_block, memory_scopes
        self._num_blocks_before = self._num_blocks_seen = 0  # blocks before and including the current batch
        self._counts = {name: np.zeros((3, num_blocks), np.int64) for name in (*MEMORY, *ARITHMETIC)}
        self._lane_cache: dict[bytes, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}  # threads and warps per block
        self._stored_elements: dict[str, list[NDArray[np.int64]]] = {}  # unique (block, element) pairs by array

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Continue with the next batch of blocks."""
        self._num_blocks_before = self._num_blocks_seen
        self._num_blocks_seen += len(threads.block_indices)

    def on_access(self, event: MemoryAccess) -> None:
        """Count an access to memory."""
        lanes = event.lanes + self._num_blocks_before * self._lanes_per_block
        memory_scope = self._memory_scopes.get(event.name, event.space) if event.space == "global" else event.space
        operation_name = (LOADS if event.kind == "load" else STORES)[memory_scope]
        self._add_operation(operation_name, lanes, event.nbytes // event.itemsize, event.itemsize)
        if (memory_scope, event.kind) == ("global", "store"):
            element_lanes, elements = replace(event, lanes=lanes).split_into_elements()
            block_elements = np.unique(np.stack([element_lanes // self._lanes_per_block, elements], axis=1), axis=0)
            self._stored_elements.setdefault(event.name, []).append(block_elements)

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Count an access of TMA or wgmma as one warp request."""
        self.on_access(event)

    def on_operation(self, name: str, lanes: NDArray[np.intp], elements: int, itemsize: int) -> None:
        """Count an arithmetic operation."""
        all_lanes = lanes + self._num_blocks_before * self._lanes_per_block
        self._add_operation(_OPERATION_NAMES[name], all_lanes, elements, itemsize)

    def _add_operation(self, name: str, lanes: NDArray[np.intp], elements: int, itemsize: int) -> None:
        key = lanes.tobytes()
        if key not in self._lane_cache:
            is_active_warp = np.zeros((self._num_blocks, self._lanes_per_block // WARP_SIZE), bool)
            is_active_warp.reshape(-1)[lanes // WARP_SIZE] = True
            self._lane_cache[key] = (
                np.bincount(lanes // self._lanes_per_block, minlength=self._num_blocks),
                is_active_warp.sum(axis=1),
            )
        threads_per_block, warps_per_block = self._lane_cache[key]
        totals = self._counts[name]
        totals[0] += elements * threads_per_block
        totals[1] += warps_per_block
        totals[2] += elements * itemsize * threads_per_block

    def select_busiest(self, num_threads: int) -> BlockTraffic:
        """Return the counts of the block with the most operations."""
        block = int(np.argmax(sum(counts[0] for counts in self._counts.values())))
        outputs = sum(
            len(np.unique(np.concatenate([piece[piece[:, 0] == block, 1] for piece in stored_pieces])))
            for stored_pieces in self._stored_elements.values()
        )
        counts = {name: OperationCount(*map(int, totals[:, block])) for name, totals in self._counts.items()}
        return BlockTraffic(num_threads, outputs, counts)


_OPERATION_NAMES = {"Mul": MULTIPLICATIONS, "Add": ADDITIONS, "Min": EXTREMA, "shuffle": SHUFFLES}


def _count_by_execution(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope]) -> BlockTraffic:
    """Return the counts of the busiest of some blocks, which the emulator executes."""
    blocks = expand_to_clusters(lowered_kernel.launch, sample_blocks(lowered_kernel.launch.grid))
    observer = TrafficObserver(len(blocks), count_lanes(lowered_kernel), memory_scopes)
    run_with_observer(lowered_kernel, memory_scopes, blocks, observer)
    return observer.select_busiest(lowered_kernel.launch.threads_per_block)


def _count_scope_executions(scope: Scope, lowered_kernel: LoweredKernel, block: BlockIndex) -> OperationCount:
    """Return how often a scope is executed, with threads as elements and warps as requests."""
    threads = requests = 0
    for execution in execute_scope(scope, [], lowered_kernel.launch, block, allow_sampling=True):
        threads += execution.num_repeats * int(execution.is_active.sum())
        requests += execution.num_repeats * int(group_by_warp(execution.is_active).any(axis=1).sum())
    return OperationCount(threads, requests)


def _count_outputs(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope], block: BlockIndex) -> int:
    """Return the number of elements of global memory that a block stores.

    A condition on a loop that the element does not depend on is assumed to hold in some iteration of that loop.
    """
    element_sets = [np.empty(0, np.int64)]
    for statement, scope in iterate_statements(lowered_kernel.function):
        if type(statement).__name__ == "BufferStore" and find_memory_scope(statement.buffer, memory_scopes) == "global":
            index = statement.indices[0]
            is_ramp = type(index).__name__ == "Ramp"
            first, stride, width = (index.base, int(index.stride), int(index.lanes)) if is_ramp else (index, 1, 1)
            store_scope = _drop_unrelated_conditions(scope, first)
            for execution in execute_scope(store_scope, [first], lowered_kernel.launch, block):
                (elements,) = execution.values
                elements = np.unique(elements[execution.is_active])
                element_sets.append(np.unique(np.add.outer(elements, stride * np.arange(width))))
    return len(np.unique(np.concatenate(element_sets)))


def _drop_unrelated_conditions(scope: Scope, index: Any) -> Scope:
    """Return the scope without the conditions on loops that an index does not depend on."""
    unrelated_variables = {variable for variable, _, _ in scope.loops} - scope.find_variables([index])
    conditions = tuple(item for item in scope.conditions if not unrelated_variables & scope.find_variables(item[:1]))
    return replace(scope, conditions=conditions)
