"""Registers: buffers of which each thread has its own, those that wgmma writes, and those that loads go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import RaceError
from tvmconv.gpu_specs import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype


class AccumulatorRegisters:
    """How registers are used that wgmma writes.

    Args:
        name: of their buffer.
        elements: of it.
        lanes: that have them.

    Attributes:
        in_flight: whether something is being written to them, shape (elements, warps).
        has_in_flight: whether any is busy.
        needs_fence: whether they were accessed otherwise since the last wgmma.fence, by warp.
    """

    def __init__(self, name: str, elements: int, lanes: int) -> None:
        self.name = name
        self.in_flight = np.zeros((elements, lanes // WARP_SIZE), bool)
        self.has_in_flight = False
        self.needs_fence = np.ones(lanes // WARP_SIZE, bool)

    def check_access(self, element_indices: Any, lane_mask: NDArray[np.bool_] | None) -> None:
        """Elements are read or written by lanes, of a mask or all.

        Raises:
            RaceError: they are busy.
        """
        warps = (
            np.ones(len(self.needs_fence), bool) if lane_mask is None else lane_mask.reshape(-1, WARP_SIZE).any(axis=1)
        )
        if self.has_in_flight and self.in_flight[np.unique(element_indices)][:, warps].any():
            raise RaceError(f"race: {self.name} is accessed while wgmma writes it: no wgmma.wait_group covers that")
        self.needs_fence[warps] = True


class DeferredLoad:
    """A load that is told of when what it loads is read, by those lanes that read it.

    Args:
        notify: tells of it, for the lanes of a mask.
        mask: of the lanes that load.
    """

    def __init__(self, notify: Callable[[NDArray[np.bool_] | None], None], mask: NDArray[np.bool_] | None) -> None:
        self._notify, self._mask = notify, mask
        self._remaining_lanes: NDArray[np.bool_] | None = mask if mask is None else mask.copy()
        self._is_pending = True

    def has_mask(self, mask: NDArray[np.bool_] | None) -> bool:
        """Whether it is of the lanes of a mask."""
        return self._mask is mask or (self._mask is not None and mask is not None and bool((self._mask == mask).all()))

    def notify_read(self, mask: NDArray[np.bool_] | None) -> None:
        """Those of its lanes that are of a mask read it; None for all."""
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
    """A buffer of registers: each thread has its own.

    Attributes:
        name: of the buffer.
        data: its elements, shape (elements, lanes).
        is_written: whether they have been, same shape.
        depends_on_memory: whether what is in them depends on what is in memory, shape (elements,).
        accumulators: how they are used, if wgmma writes them.
        deferred_loads: by element, what is to be told of the load that it comes from, if it is ever read.
    """

    name: str
    data: NDArray[Any]
    is_written: NDArray[np.bool_]
    depends_on_memory: NDArray[np.bool_]
    accumulators: AccumulatorRegisters | None = None
    deferred_loads: dict[int, DeferredLoad] = field(default_factory=dict)

    @classmethod
    def allocate_unwritten(cls, name: str, dtype: str, num_elements: int, num_lanes: int) -> RegisterBuffer:
        """Registers that nobody has written."""
        numpy_type = get_numpy_dtype(dtype)
        data = (
            np.full(num_elements * num_lanes * numpy_type.itemsize, 0xFF, np.uint8)
            .view(numpy_type)
            .reshape(num_elements, num_lanes)
        )
        return cls(name, data, np.zeros((num_elements, num_lanes), bool), np.zeros(num_elements, bool))

    def notify_read(self, element_indices: Any, mask: NDArray[np.bool_] | None) -> None:
        """Elements are read by the lanes of a mask: tell of the loads that they come from."""
        for element in [element_indices] if isinstance(element_indices, int) else np.unique(element_indices).tolist():
            if deferred := self.deferred_loads.get(element):
                deferred.notify_read(mask)

    def mark_unwritten(self) -> None:
        """Nobody has written them."""
        self.data.view(np.uint8)[:] = 0xFF
        self.is_written[:] = False
