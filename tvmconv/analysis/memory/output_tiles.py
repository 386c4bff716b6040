"""Output tile of one block: the elements of the output that its threads compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.tir.accesses import iterate_accesses, select_middle_block
from tvmconv.analysis.tir.scopes import execute_scope, needs_execution
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.emulator.execution import run_with_observer
from tvmconv.emulator.observers import AccessObserver, MemoryAccess
from tvmconv.emulator.threads import count_lanes
from tvmconv.kernel import Kernel
from tvmconv.workloads import layout

NO_THREAD = -1  # thread of an element that TMA stores for the whole block


@dataclass(frozen=True)
class OutputTileMap:
    """Elements of the output that one block stores."""

    shape: tuple[int, ...]  # shape of the output: N, C and the spatial axes, or the spatial axes alone
    threads: NDArray[np.int64]  # thread that stores each element, or `NO_THREAD`
    coordinates: NDArray[np.int64]  # coordinates of the elements, of shape (elements, axes), in the order of `shape`


def map_output_tile(kernel: Kernel) -> OutputTileMap:
    """Return the elements of the output that the middle block of a kernel's last device kernel stores."""
    lowered_kernel, w = kernel.kernels[-1], kernel.workload
    name = list(kernel.memory_scopes)[len(w.argument_names) - 1]
    if needs_execution(lowered_kernel.function):
        observer = _FirstBlockStores(name, count_lanes(lowered_kernel))
        run_with_observer(lowered_kernel, kernel.memory_scopes, [select_middle_block(lowered_kernel)], observer)
        stores = observer.stores
    else:
        stores = list(_iterate_evaluated_stores(lowered_kernel, name))
    stores = stores or [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    threads, elements = map(np.concatenate, zip(*stores, strict=True))
    stored_shape = w.argument_shapes[-1]
    elements, first_indices = np.unique(elements, return_index=True)
    coordinates = np.stack(np.unravel_index(elements, stored_shape), axis=1)
    order = _find_axis_order(w, len(stored_shape))
    return OutputTileMap(tuple(stored_shape[axis] for axis in order), threads[first_indices], coordinates[:, order])


def _find_axis_order(w: Any, num_axes: int) -> list[int]:
    """Return the position in memory of each of the axes N, C and space of an output."""
    if not hasattr(w, "layout"):
        return list(range(num_axes))
    stored_order = layout.to_storage_order(w.output_layout, range(num_axes))
    return [stored_order.index(axis) for axis in range(num_axes)]


def _iterate_evaluated_stores(lowered_kernel: LoweredKernel, name: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for access in iterate_accesses(lowered_kernel.function, lambda buffer: str(buffer.name) == name):
        if access.kind == "load":
            continue
        block = select_middle_block(lowered_kernel)
        for execution in execute_scope(access.scope, [access.index], lowered_kernel.launch, block):
            (elements,) = execution.values
            threads = np.broadcast_to(np.arange(lowered_kernel.launch.threads_per_block), elements.shape)
            active = execution.is_active
            vectors = elements[active][:, None] + np.arange(access.num_elements)
            yield np.repeat(threads[active], access.num_elements), vectors.reshape(-1)


class _FirstBlockStores(AccessObserver):
    def __init__(self, name: str, lanes_per_block: int) -> None:
        self._name, self._lanes_per_block, self.wants_async_proxy = name, lanes_per_block, True
        self.stores: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def on_access(self, event: MemoryAccess) -> None:
        """Record a store of threads."""
        if store := self._select_store(event):
            self.stores.append(store.split_into_elements())

    def on_async_proxy_access(self, event: MemoryAccess) -> None:
        """Record a store of TMA."""
        if store := self._select_store(event):
            lanes, elements = store.split_into_elements()
            self.stores.append((np.full_like(lanes, NO_THREAD), elements))

    def _select_store(self, event: MemoryAccess) -> MemoryAccess | None:
        if (event.space, event.kind, event.name) != ("global", "store", self._name):
            return None
        return event.restrict_to_first_block(self._lanes_per_block)
