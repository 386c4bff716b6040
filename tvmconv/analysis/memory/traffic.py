"""Memory operations and arithmetic of one block, counted from the lowered TIR without running the kernel.

Every access and every operation of the text is executed with NumPy for all threads and iterations, so that what a
condition rules out is not counted. A kernel that has GPU instructions by name is executed as a whole
(`emulation.execute`), on arrays of zeros: what an mma multiplies and adds counts as it does, an m16n8k16 of a warp
as 2,048 of each, and so does wgmma; `ldmatrix` is a shared load of the rows that it reads, and wgmma one of both of its
operands; an asynchronous copy is a load, of no more than it reads, and a store. A copy of TMA is a load of what of its
box lies in the array, and a store of the whole box, in each block that it goes to. The block is the busiest of some
that are spread over the grid: as most blocks of an image have no border in them, an interior one.

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

from tvmconv.analysis.emulation.blocks import Block, lanes_of, some_blocks, with_clusters
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.threads import Threads
from tvmconv.analysis.emulation.watch import Accessed, Watch
from tvmconv.analysis.lowered.operations import (
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
    operations,
    space_of,
)
from tvmconv.analysis.lowered.tir import Scope, executions, has_instructions, statements, warps
from tvmconv.gpu import WARP

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.compiler.spaces import Space
    from tvmconv.kernel import Kernel


@dataclass(frozen=True)
class Count:
    """How often one kind of operation happens in a block.

    Attributes:
        elements: those of all threads; a vector counts each of its lanes.
        requests: of warps, with at least one thread taking part; a vector counts once.
        bytes: of these elements.
    """

    elements: int = 0
    requests: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.elements + other.elements, self.requests + other.requests, self.bytes + other.bytes)


@dataclass(frozen=True)
class Traffic:
    """What one block does.

    Attributes:
        threads: of the block.
        outputs: elements of the output that it stores to, each counted once however often that is.
        counts: by operation, each of `MEMORY` and `ARITHMETIC`; registers are not memory.
    """

    threads: int
    outputs: int
    counts: Mapping[str, Count]

    @property
    def flops(self) -> int:
        """Multiplications and additions of floating-point numbers.

        Not those that make a texel's coordinates, nor the clamp's minimum and maximum.
        """
        return self.counts[MULTIPLICATIONS].elements + self.counts[ADDITIONS].elements

    @property
    def ratio(self) -> float:
        """Arithmetic to memory accesses: `flops` for each element read from global memory, also through a texture."""
        loads = self.counts[GLOBAL_LOADS].elements + self.counts[TEXTURE_FETCHES].elements
        return self.flops / loads if loads else math.inf

    @property
    def bytes_ratio(self) -> float:
        """`flops` for each byte read from and written to global memory, also through a texture."""
        moved = sum(self.counts[name].bytes for name in (GLOBAL_LOADS, GLOBAL_STORES, TEXTURE_FETCHES))
        return self.flops / moved if moved else math.inf

    def an_output(self, operation: str) -> float:
        """How often an operation happens, on average, for each output."""
        return self.counts[operation].elements / self.outputs


def traffic(kernel: Kernel, step: LoweredStep | None = None) -> Traffic:
    """Count what a kernel's busiest block does.

    Args:
        kernel: a built kernel, for any target.
        step: one of `kernel.steps`; the first by default.

    Raises:
        AnalysisError: the kernel has something that cannot be executed (`tvmconv.analysis.lowered.tir.executions`,
            `tvmconv.analysis.emulation.execute.execute`), or what it does depends on the data.
    """
    step = step or kernel.steps[0]
    if has_instructions(step.function):
        return _executed(step, kernel.spaces)
    found = list(operations(step, kernel.spaces))
    scopes = dict.fromkeys(operation.scope for operation in found)
    executed = {block: {s: _times(s, step, block) for s in scopes} for block in some_blocks(step.launch.grid)}
    block, times = max(executed.items(), key=lambda each: sum(count.elements for count in each[1].values()))
    counts = dict.fromkeys((*MEMORY, *ARITHMETIC), Count())
    for name, scope, lanes, itemsize in found:
        elements = lanes * times[scope].elements
        counts[name] += Count(elements, times[scope].requests, elements * itemsize)
    return Traffic(step.launch.threads, _outputs(step, kernel.spaces, block), counts)


class TrafficWatch(Watch):
    """Adds up what blocks do, each for itself.

    Args:
        blocks: how many.
        lanes: of a block.
        spaces: where each argument lies.
        wants_bulk: whether what TMA and wgmma access counts.
    """

    def __init__(self, blocks: int, lanes: int, spaces: Mapping[str, Space], *, wants_bulk: bool = True) -> None:
        self.wants_bulk = wants_bulk
        self._blocks, self._lanes, self._spaces = blocks, lanes, spaces
        self._before = self._now = 0  # blocks of the pieces before this one, and with it
        self._counts = {name: np.zeros((3, blocks), np.int64) for name in (*MEMORY, *ARITHMETIC)}
        self._known: dict[
            bytes, tuple[NDArray[np.int64], NDArray[np.int64]]
        ] = {}  # of lanes: by block, and their warps
        self._stored: dict[str, list[NDArray[np.int64]]] = {}  # (block, element) by array, each once in a piece

    def begin(self, threads: Threads) -> None:
        """Go on with other blocks."""
        self._before, self._now = self._now, self._now + len(threads.blocks)

    def access(self, found: Accessed) -> None:
        """Count an access to memory."""
        lanes = found.lanes + self._before * self._lanes
        space = self._spaces.get(found.name, found.space) if found.space == "global" else found.space
        counted = (LOADS if found.kind == "load" else STORES)[space]
        self._add(counted, lanes, found.nbytes // found.itemsize, found.itemsize)
        if (space, found.kind) == ("global", "store"):
            by, elements = replace(found, lanes=lanes).elements()
            stored = np.unique(np.stack([by // self._lanes, elements], axis=1), axis=0)
            self._stored.setdefault(found.name, []).append(stored)

    def bulk(self, found: Accessed) -> None:
        """Count what TMA and wgmma access as one request of a warp each."""
        self.access(found)

    def operation(self, name: str, lanes: NDArray[np.intp], elements: int, itemsize: int) -> None:
        """Count arithmetic."""
        self._add(_OPERATIONS[name], lanes + self._before * self._lanes, elements, itemsize)

    def _add(self, name: str, lanes: NDArray[np.intp], elements: int, itemsize: int) -> None:
        key = lanes.tobytes()
        if key not in self._known:
            taking = np.zeros((self._blocks, self._lanes // WARP), bool)
            taking.reshape(-1)[lanes // WARP] = True
            self._known[key] = np.bincount(lanes // self._lanes, minlength=self._blocks), taking.sum(axis=1)
        times, requests = self._known[key]
        of_name = self._counts[name]
        of_name[0] += elements * times
        of_name[1] += requests
        of_name[2] += elements * itemsize * times

    def busiest(self, threads: int) -> Traffic:
        """What the block does that does most."""
        block = int(np.argmax(sum(counts[0] for counts in self._counts.values())))
        outputs = sum(
            len(np.unique(np.concatenate([each[each[:, 0] == block, 1] for each in pieces])))
            for pieces in self._stored.values()
        )
        counts = {name: Count(*(int(number) for number in found[:, block])) for name, found in self._counts.items()}
        return Traffic(threads, outputs, counts)


_OPERATIONS = {"Mul": MULTIPLICATIONS, "Add": ADDITIONS, "Min": EXTREMA, "shuffle": SHUFFLES}


def _executed(step: LoweredStep, spaces: Mapping[str, Space]) -> Traffic:
    """What the busiest of some blocks does, by executing them."""
    blocks = with_clusters(step.launch, some_blocks(step.launch.grid))
    watch = TrafficWatch(len(blocks), lanes_of(step), spaces)
    observe(step, spaces, blocks, watch)
    return watch.busiest(step.launch.threads)


def _times(scope: Scope, step: LoweredStep, block: Block) -> Count:
    """How often a scope is executed: threads as elements, and warps as requests."""
    threads = requests = 0
    for executed in executions(scope, [], step.launch, block, sampled=True):
        threads += executed.repeats * int(executed.active.sum())
        requests += executed.repeats * int(warps(executed.active).any(axis=1).sum())
    return Count(threads, requests)


def _outputs(step: LoweredStep, spaces: Mapping[str, Space], block: Block) -> int:
    """How many elements of global memory a block stores to.

    A condition on a loop that the element does not depend on is taken to hold in some iteration of that loop.
    """
    found = [np.empty(0, np.int64)]
    for statement, scope in statements(step.function):
        if type(statement).__name__ == "BufferStore" and space_of(statement.buffer, spaces) == "global":
            index = statement.indices[0]
            ramp = type(index).__name__ == "Ramp"
            first, stride, lanes = (index.base, int(index.stride), int(index.lanes)) if ramp else (index, 1, 1)
            for executed in executions(_without_other_loops(scope, first), [first], step.launch, block):
                (elements,) = executed.values
                elements = np.unique(elements[executed.active])
                found.append(np.unique(np.add.outer(elements, stride * np.arange(lanes))))
    return len(np.unique(np.concatenate(found)))


def _without_other_loops(scope: Scope, index: Any) -> Scope:
    """The scope without conditions on loops that an index does not depend on."""
    others = {variable for variable, _, _ in scope.loops} - scope.variables([index])
    kept = tuple(each for each in scope.conditions if not others & scope.variables(each[:1]))
    return replace(scope, conditions=kept)
