"""Memory operations and arithmetic of one block, counted from the lowered TIR without running the kernel.

Every access and every operation of the text is executed with NumPy for all threads and iterations, so that what a
condition rules out is not counted. A kernel that has GPU instructions by name is executed as a whole
(`emulation.execute_blocks`), on arrays of zeros: what an mma multiplies and adds counts as it does, an m16n8k16 of a
warp as 2,048 of each, and so does wgmma; `ldmatrix` is a shared load of the rows that it reads, and wgmma one of both
of its operands; an asynchronous copy is a load, of no more than it reads, and a store. A copy of TMA is a load of what
of its box lies in the array, and a store of the whole box, in each block that it goes to. The block is the busiest of
some that are spread over the grid: as most blocks of an image have no border in them, an interior one.

Counted is what the text says. The compiler may do less of it: it merges loads of one element, keeps an accumulator
that the text has in global memory in a register, and makes one instruction of a multiplication and an addition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from tvmconv.analysis.tir.scopes import Scope, execute_scope, group_by_warp, has_instructions, iterate_statements
from tvmconv.emulator.blocks import BlockIndex, count_lanes, expand_to_clusters, sample_blocks
from tvmconv.emulator.observation import run_with_observer
from tvmconv.emulator.observers import AccessObserver, MemoryAccess
from tvmconv.emulator.threads import EmulatedThreads
from tvmconv.gpu_specs import WARP_SIZE

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.compiler.memory_scopes import MemoryScope
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class OperationCount:
    """How often one kind of operation happens in a block.

    Attributes:
        num_elements: those of all threads; a vector counts each of its lanes.
        num_requests: of warps, with at least one thread taking part; a vector counts once.
        num_bytes: of these elements.
    """

    num_elements: int = 0
    num_requests: int = 0
    num_bytes: int = 0

    def __add__(self, addend: OperationCount) -> OperationCount:
        return OperationCount(
            self.num_elements + addend.num_elements,
            self.num_requests + addend.num_requests,
            self.num_bytes + addend.num_bytes,
        )


@dataclass(frozen=True)
class BlockTraffic:
    """What one block does.

    Attributes:
        num_threads: of the block.
        num_outputs: elements of the output that it stores to, each counted once however often that is.
        counts: by operation, each of `MEMORY` and `ARITHMETIC`; registers are not memory.
    """

    num_threads: int
    num_outputs: int
    counts: Mapping[str, OperationCount]

    @property
    def flops(self) -> int:
        """Multiplications and additions of floating-point numbers.

        Not those that make a texel's coordinates, nor the clamp's minimum and maximum.
        """
        return self.counts[MULTIPLICATIONS].num_elements + self.counts[ADDITIONS].num_elements

    @property
    def flops_per_load(self) -> float:
        """Arithmetic to memory accesses: `flops` for each element read from global memory, also through a texture."""
        loads = self.counts[GLOBAL_LOADS].num_elements + self.counts[TEXTURE_FETCHES].num_elements
        return self.flops / loads if loads else math.inf

    @property
    def flops_per_byte(self) -> float:
        """`flops` for each byte read from and written to global memory, also through a texture."""
        moved_bytes = sum(self.counts[name].num_bytes for name in (GLOBAL_LOADS, GLOBAL_STORES, TEXTURE_FETCHES))
        return self.flops / moved_bytes if moved_bytes else math.inf

    def count_per_output(self, operation: str) -> float:
        """How often an operation happens, on average, for each output."""
        return self.counts[operation].num_elements / self.num_outputs


def count_traffic(kernel: Kernel, lowered_kernel: LoweredKernel | None = None) -> BlockTraffic:
    """Count what a kernel's busiest block does.

    Args:
        kernel: a built kernel, for any target.
        lowered_kernel: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: the kernel has something that cannot be executed (`tvmconv.analysis.tir.scopes.execute_scope`,
            `tvmconv.emulator.execution.execute`), or what it does depends on the data.
    """
    lowered_kernel = lowered_kernel or kernel.kernels[0]
    if has_instructions(lowered_kernel.function):
        return _count_by_execution(lowered_kernel, kernel.memory_scopes)
    ops = list(iterate_ops(lowered_kernel, kernel.memory_scopes))
    scopes = dict.fromkeys(operation.scope for operation in ops)
    executions_by_block = {
        block: {unique_scope: _count_scope_executions(unique_scope, lowered_kernel, block) for unique_scope in scopes}
        for block in sample_blocks(lowered_kernel.launch.grid)
    }
    block, execution_counts = max(
        executions_by_block.items(), key=lambda item: sum(count.num_elements for count in item[1].values())
    )
    counts = dict.fromkeys((*MEMORY, *ARITHMETIC), OperationCount())
    for name, scope, vector_lanes, itemsize in ops:
        elements = vector_lanes * execution_counts[scope].num_elements
        counts[name] += OperationCount(elements, execution_counts[scope].num_requests, elements * itemsize)
    return BlockTraffic(
        lowered_kernel.launch.threads_per_block, _count_outputs(lowered_kernel, kernel.memory_scopes, block), counts
    )


class TrafficObserver(AccessObserver):
    """Adds up what blocks do, each for itself.

    Args:
        num_blocks: how many.
        lanes_per_block: of a block.
        memory_scopes: where each argument lies.
        wants_async_proxy: whether what TMA and wgmma access counts.
    """

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
        self._num_blocks_before = self._num_blocks_seen = 0  # blocks of the pieces before this one, and with it
        self._counts = {name: np.zeros((3, num_blocks), np.int64) for name in (*MEMORY, *ARITHMETIC)}
        self._lane_cache: dict[
            bytes, tuple[NDArray[np.int64], NDArray[np.int64]]
        ] = {}  # of lanes: by block, and their warps
        self._stored_elements: dict[
            str, list[NDArray[np.int64]]
        ] = {}  # (block, element) by array, each once in a piece

    def on_blocks_start(self, threads: EmulatedThreads) -> None:
        """Go on with other blocks."""
        self._num_blocks_before, self._num_blocks_seen = (
            self._num_blocks_seen,
            self._num_blocks_seen + len(threads.block_indices),
        )

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
        """Count what TMA and wgmma access as one request of a warp each."""
        self.on_access(event)

    def on_operation(self, name: str, lanes: NDArray[np.intp], elements: int, itemsize: int) -> None:
        """Count arithmetic."""
        self._add_operation(
            _OPERATION_NAMES[name], lanes + self._num_blocks_before * self._lanes_per_block, elements, itemsize
        )

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
        """What the block does that does most."""
        block = int(np.argmax(sum(counts[0] for counts in self._counts.values())))
        outputs = sum(
            len(np.unique(np.concatenate([piece[piece[:, 0] == block, 1] for piece in stored_pieces])))
            for stored_pieces in self._stored_elements.values()
        )
        counts = {
            name: OperationCount(*(int(number) for number in totals[:, block])) for name, totals in self._counts.items()
        }
        return BlockTraffic(num_threads, outputs, counts)


_OPERATION_NAMES = {"Mul": MULTIPLICATIONS, "Add": ADDITIONS, "Min": EXTREMA, "shuffle": SHUFFLES}


def _count_by_execution(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope]) -> BlockTraffic:
    """What the busiest of some blocks does, by executing them."""
    blocks = expand_to_clusters(lowered_kernel.launch, sample_blocks(lowered_kernel.launch.grid))
    observer = TrafficObserver(len(blocks), count_lanes(lowered_kernel), memory_scopes)
    run_with_observer(lowered_kernel, memory_scopes, blocks, observer)
    return observer.select_busiest(lowered_kernel.launch.threads_per_block)


def _count_scope_executions(scope: Scope, lowered_kernel: LoweredKernel, block: BlockIndex) -> OperationCount:
    """How often a scope is executed: threads as elements, and warps as requests."""
    threads = requests = 0
    for execution in execute_scope(scope, [], lowered_kernel.launch, block, allow_sampling=True):
        threads += execution.num_repeats * int(execution.is_active.sum())
        requests += execution.num_repeats * int(group_by_warp(execution.is_active).any(axis=1).sum())
    return OperationCount(threads, requests)


def _count_outputs(lowered_kernel: LoweredKernel, memory_scopes: Mapping[str, MemoryScope], block: BlockIndex) -> int:
    """How many elements of global memory a block stores to.

    A condition on a loop that the element does not depend on is taken to hold in some iteration of that loop.
    """
    element_sets = [np.empty(0, np.int64)]
    for statement, scope in iterate_statements(lowered_kernel.function):
        if type(statement).__name__ == "BufferStore" and find_memory_scope(statement.buffer, memory_scopes) == "global":
            index = statement.indices[0]
            is_ramp = type(index).__name__ == "Ramp"
            first, stride, vector_lanes = (
                (index.base, int(index.stride), int(index.lanes)) if is_ramp else (index, 1, 1)
            )
            for execution in execute_scope(
                _drop_unrelated_conditions(scope, first), [first], lowered_kernel.launch, block
            ):
                (elements,) = execution.values
                elements = np.unique(elements[execution.is_active])
                element_sets.append(np.unique(np.add.outer(elements, stride * np.arange(vector_lanes))))
    return len(np.unique(np.concatenate(element_sets)))


def _drop_unrelated_conditions(scope: Scope, index: Any) -> Scope:
    """The scope without conditions on loops that an index does not depend on."""
    unrelated_variables = {variable for variable, _, _ in scope.loops} - scope.find_variables([index])
    conditions = tuple(
        condition for condition in scope.conditions if not unrelated_variables & scope.find_variables(condition[:1])
    )
    return replace(scope, conditions=conditions)
