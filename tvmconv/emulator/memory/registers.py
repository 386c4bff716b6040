"""Registers of the threads, with the state of wgmma accumulators and of deferred loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import RaceError
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype


class AccumulatorRegisters:
    """Usage of the registers of a buffer that wgmma writes."""

    def __init__(self, name: str, elements: int, lanes: int) -> None:
        self.name = name
        self.in_flight = np.zeros((elements, lanes // WARP_SIZE), bool)  # whether a pending wgmma writes the registers
        self.has_in_flight = False  # whether any of them is being written
        self.needs_fence = np.ones(lanes // WARP_SIZE, bool)  # whether a warp accessed them since its last wgmma.fence

    def check_access(self, element_indices: Any, lane_mask: NDArray[np.bool_] | None) -> None:
        """Note that lanes of a mask, or all, read or write elements."""
        warps = slice(None) if lane_mask is None else lane_mask.reshape(-1, WARP_SIZE).any(axis=1)
        if self.has_in_flight and self.in_flight[np.unique(element_indices)][:, warps].any():
            raise RaceError(f"race: {self.name} is accessed while wgmma writes it, without a wgmma.wait_group between")
        self.needs_fence[warps] = True


class DeferredLoad:
    """Load of the lanes of a mask of which `notify` notifies only when they read its registers."""

    def __init__(self, notify: Callable[[NDArray[np.bool_] | None], None], mask: NDArray[np.bool_] | None) -> None:
        self._notify, self._mask = notify, mask
        self._remaining_lanes: NDArray[np.bool_] | None = mask if mask is None else mask.copy()
        self._is_pending = True

    def has_mask(self, mask: NDArray[np.bool_] | None) -> bool:
        """Return whether the load is by the lanes of a mask."""
        return self._mask is mask or (self._mask is not None and mask is not None and bool((self._mask == mask).all()))

    def notify_read(self, mask: NDArray[np.bool_] | None) -> None:
        """Notify of the load for its lanes in the mask, or all its lanes for None, unless that has been done."""
        if not self._is_pending:
            return
        if mask is None or (self._remaining_lanes is not None and not (self._remaining_lanes & ~mask).any()):
            self._is_pending = False
            self._notify(self._remaining_lanes)
            return
        reading_lanes = mask if self._remaining_lanes is None else mask & self._remaining_lanes
        if reading_lanes.any():
            self._notify(reading_lanes)
        self._remaining_lanes = ~mask if self._remaining_lanes is None else self._remaining_lanes & ~mask


@dataclass
class RegisterBuffer:
    """Buffer of registers; each thread has its own."""

    name: str  # name of the buffer
    data: NDArray[Any]  # elements, of shape (elements, lanes)
    is_written: NDArray[np.bool_]  # whether each element has been written, of the same shape
    depends_on_memory: NDArray[np.bool_]  # whether each element depends on memory contents, of shape (elements,)
    # usage as accumulators of wgmma; None if wgmma does not write them
    accumulators: AccumulatorRegisters | None = None
    # load of each element whose notification is deferred
    deferred_loads: dict[int, DeferredLoad] = field(default_factory=dict)

    @classmethod
    def allocate_unwritten(cls, name: str, dtype: str, num_elements: int, num_lanes: int) -> RegisterBuffer:
        """Return unwritten registers, which are NaN."""
        numpy_type = get_numpy_dtype(dtype)
        raw_bytes = np.full(num_elements * num_lanes * numpy_type.itemsize, 0xFF, np.uint8)
        data = raw_bytes.view(numpy_type).reshape(num_elements, num_lanes)
        return cls(name, data, np.zeros((num_elements, num_lanes), bool), np.zeros(num_elements, bool))

    def notify_read(self, element_indices: Any, mask: NDArray[np.bool_] | None) -> None:
        """Notify of the deferred loads that elements come from, which the lanes of a mask read."""
        for element in [element_indices] if isinstance(element_indices, int) else np.unique(element_indices).tolist():
            if deferred := self.deferred_loads.get(element):
                deferred.notify_read(mask)

    def mark_unwritten(self) -> None:
        """Mark all elements as unwritten."""
        self.data.view(np.uint8)[:] = 0xFF
        self.is_written[:] = False
