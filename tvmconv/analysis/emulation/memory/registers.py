"""Registers: buffers of which each thread has its own, those that wgmma writes, and those that loads go to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.errors import RaceError
from tvmconv.gpu import WARP
from tvmconv.workloads.dtypes import numpy_dtype


class Accumulators:
    """How registers are used that wgmma writes.

    Args:
        name: of their buffer.
        elements: of it.
        lanes: that have them.

    Attributes:
        busy: whether something is being written to them, shape (elements, warps).
        used: whether any is busy.
        dirty: whether they were accessed otherwise since the last wgmma.fence, by warp.
    """

    def __init__(self, name: str, elements: int, lanes: int) -> None:
        self.name = name
        self.busy = np.zeros((elements, lanes // WARP), bool)
        self.used = False
        self.dirty = np.ones(lanes // WARP, bool)

    def touch(self, at: Any, lanes: NDArray[np.bool_] | None) -> None:
        """Elements are read or written by lanes, of a mask or all.

        Raises:
            RaceError: they are busy.
        """
        warps = np.ones(len(self.dirty), bool) if lanes is None else lanes.reshape(-1, WARP).any(axis=1)
        if self.used and self.busy[np.unique(at)][:, warps].any():
            raise RaceError(f"race: {self.name} is accessed while wgmma writes it: no wgmma.wait_group covers that")
        self.dirty[warps] = True


class Later:
    """A load that is told of when what it loads is read, by those lanes that read it.

    Args:
        told: tells of it, for the lanes of a mask.
        mask: of the lanes that load.
    """

    def __init__(self, told: Callable[[NDArray[np.bool_] | None], None], mask: NDArray[np.bool_] | None) -> None:
        self._told, self._mask = told, mask
        self._left: NDArray[np.bool_] | None = mask if mask is None else mask.copy()
        self._open = True

    def is_of(self, mask: NDArray[np.bool_] | None) -> bool:
        """Whether it is of the lanes of a mask."""
        return self._mask is mask or (self._mask is not None and mask is not None and bool((self._mask == mask).all()))

    def tell(self, mask: NDArray[np.bool_] | None) -> None:
        """Those of its lanes that are of a mask read it; None for all."""
        if not self._open:
            return
        if mask is None or (self._left is not None and not (self._left & ~mask).any()):
            self._open = False
            self._told(self._left)
            return
        reading = mask if self._left is None else mask & self._left
        if reading.any():
            self._told(reading)
        self._left = ~mask if self._left is None else self._left & ~mask


@dataclass
class Registers:
    """A buffer of registers: each thread has its own.

    Attributes:
        name: of the buffer.
        data: its elements, shape (elements, lanes).
        written: whether they have been, same shape.
        loaded: whether what is in them depends on what is in memory, shape (elements,).
        accumulators: how they are used, if wgmma writes them.
        waiting: by element, what is to be told of the load that it comes from, if it is ever read.
    """

    name: str
    data: NDArray[Any]
    written: NDArray[np.bool_]
    loaded: NDArray[np.bool_]
    accumulators: Accumulators | None = None
    waiting: dict[int, Later] = field(default_factory=dict)

    @classmethod
    def unwritten(cls, name: str, dtype: str, size: int, lanes: int) -> Registers:
        """Registers that nobody has written."""
        kind = numpy_dtype(dtype)
        data = np.full(size * lanes * kind.itemsize, 0xFF, np.uint8).view(kind).reshape(size, lanes)
        return cls(name, data, np.zeros((size, lanes), bool), np.zeros(size, bool))

    def read(self, at: Any, mask: NDArray[np.bool_] | None) -> None:
        """Elements are read by the lanes of a mask: tell of the loads that they come from."""
        for each in [at] if isinstance(at, int) else np.unique(at).tolist():
            if later := self.waiting.get(each):
                later.tell(mask)

    def forget(self) -> None:
        """Nobody has written them."""
        self.data.view(np.uint8)[:] = 0xFF
        self.written[:] = False
