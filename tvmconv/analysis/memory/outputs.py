"""Which elements of the output the threads of one block compute: the tiles of a schedule, as they come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import lanes_of
from tvmconv.analysis.emulation.observe import observe
from tvmconv.analysis.emulation.watch import Accessed, Watch
from tvmconv.analysis.lowered.accesses import accesses
from tvmconv.analysis.lowered.tir import executions, has_instructions
from tvmconv.analysis.memory.coalescing import middle_block
from tvmconv.workloads import layout

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep
    from tvmconv.kernel import Kernel

NOBODY = -1  # the thread of what TMA stores: all of the block's have a part in it


@dataclass(frozen=True)
class Outputs:
    """What one block stores to the output.

    Attributes:
        shape: of the output: N, C and space, or space alone.
        threads: by which each element is stored, or `NOBODY`.
        places: of the elements, of shape (elements, axes), in the order of `shape`.
    """

    shape: tuple[int, ...]
    threads: NDArray[np.int64]
    places: NDArray[np.int64]


def outputs(kernel: Kernel) -> Outputs:
    """The output's elements of the middle block of a kernel's last step.

    Args:
        kernel: a built kernel, for any target.

    Raises:
        AnalysisError: the stores cannot be executed.
    """
    step, w = kernel.steps[-1], kernel.workload
    name = list(kernel.spaces)[len(w.argument_names) - 1]
    found = list(_executed(kernel, step, name) if has_instructions(step.function) else _evaluated(step, name))
    threads, elements = (np.concatenate([each[part] for each in found] or [np.zeros(0, np.int64)]) for part in (0, 1))
    stored = w.argument_shapes[-1]
    elements, first = np.unique(elements, return_index=True)
    places = np.stack(np.unravel_index(elements, stored), axis=1)
    order = _order(w, len(stored))
    return Outputs(tuple(stored[axis] for axis in order), threads[first], places[:, order])


def _order(w: Any, axes: int) -> list[int]:
    """Where N, C and space are among the axes of an output in memory."""
    if not hasattr(w, "layout"):
        return list(range(axes))
    stored = layout.stored(w.layout, range(axes))
    return [stored.index(axis) for axis in range(axes)]


def _evaluated(step: LoweredStep, name: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for access in accesses(step.function, lambda buffer: str(buffer.name) == name):
        if access.kind == "load":
            continue
        for executed in executions(access.scope, [access.index], step.launch, middle_block(step)):
            (elements,) = executed.values
            threads = np.broadcast_to(np.arange(step.launch.threads), elements.shape)[executed.active]
            yield _vectors(threads, elements[executed.active], access.elements)


def _executed(kernel: Kernel, step: LoweredStep, name: str) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    watch = _Watch(name, lanes_of(step))
    observe(step, kernel.spaces, [middle_block(step)], watch)
    return watch.found


def _vectors(threads: NDArray[Any], first: NDArray[Any], elements: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Threads and elements of stores of so many neighbours each."""
    return np.repeat(threads, elements), (first[:, None] + np.arange(elements)).reshape(-1)


class _Watch(Watch):
    """Keeps what the first of the blocks that are executed stores to an array.

    Args:
        name: the array's.
        lanes: of a block.
    """

    def __init__(self, name: str, lanes: int) -> None:
        self._name, self._lanes, self.wants_bulk = name, lanes, True
        self.found: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def access(self, found: Accessed) -> None:
        """Keep a store of threads."""
        if own := self._stored(found):
            self.found.append(own.elements())

    def bulk(self, found: Accessed) -> None:
        """Keep a store of TMA."""
        if own := self._stored(found):
            lanes, elements = own.elements()
            self.found.append((np.full_like(lanes, NOBODY), elements))

    def _stored(self, found: Accessed) -> Accessed | None:
        if (found.space, found.kind, found.name) != ("global", "store", self._name):
            return None
        return found.of_first(self._lanes)
