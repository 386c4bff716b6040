"""Where the buffers of a lowered function lie: in arrays, in registers, or in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.analysis.emulation.addresses import SHARED_BASE
from tvmconv.analysis.emulation.machine import Machine, Mask
from tvmconv.analysis.emulation.memory.arrays import Argument, Array, Mapped
from tvmconv.analysis.emulation.memory.registers import Registers
from tvmconv.analysis.emulation.memory.shared import Shared
from tvmconv.analysis.emulation.translation.layout import Layout
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import numpy_dtype


@dataclass(frozen=True)
class Place:
    """Where a buffer lies.

    Attributes:
        memory: an array, registers, or the shared memory.
        dtype: of an element, as the buffer has it.
        offset: of its first element, in bytes.
        size: elements.
        name: of the buffer.
    """

    memory: Array | Registers | Shared
    dtype: np.dtype[Any]
    offset: int
    size: int
    name: str


def reads_memory(node: Any, places: Mapping[Any, Place]) -> bool:
    """Whether an expression loads from other than registers."""
    import tvm_ffi
    from tvm.ir import TensorLoad

    found: list[Any] = []
    tvm_ffi.structural_walk(node, (TensorLoad, found.append), order="post")
    return any(each.source not in places or not isinstance(places[each.source].memory, Registers) for each in found)


class Places:
    """The buffers of a function, as they are allocated and declared.

    Args:
        machine: whose memory it is.
        layout: of shared memory.
        arrays: what the function's parameters are given.
    """

    def __init__(self, machine: Machine, layout: Layout, arrays: Mapping[Any, Argument]) -> None:
        self.machine = machine
        self._layout = layout
        self._arrays = arrays
        self._places: dict[Any, Place] = {}

    def _memory(self, data: Any) -> Place:
        """Where a pointer to a buffer as a whole points to."""
        if type(data).__name__ == "Call" and str(data.op.name) == "tirx.buffer_data":
            data = data.args[0]
        if data in self._places:
            return self._places[data]
        if data in self._arrays:
            array = self._arrays[data]
            if isinstance(array, Mapped):
                raise AnalysisError(f"the elements of a tensor map: {data}")
            return Place(array, array.dtype, 0, array.size, array.name)
        raise AnalysisError(f"memory of which it is not known what it is: {data}")

    def _allocate(self, buffer: Any) -> Callable[[Mask], None]:
        scope, dtype = str(buffer.scope()), str(buffer.dtype)
        size = math.prod(int(extent) for extent in buffer.shape)
        name = str(buffer.name)
        if scope.startswith("shared"):
            self._places[buffer] = Place(
                self.machine.shared, numpy_dtype(dtype), SHARED_BASE + self._layout.offsets[buffer], size, name
            )
            self.machine.buffers.append((SHARED_BASE + self._layout.offsets[buffer], name))
            return lambda mask: None
        if scope != "local":
            raise AnalysisError(f"a buffer in {scope} memory: {name}")
        registers = Registers.unwritten(name, dtype, size, self.machine.threads.lanes)
        self._places[buffer] = Place(registers, numpy_dtype(dtype), 0, size, name)
        return lambda mask: registers.forget() if mask is None else None

    def _declare(self, buffer: Any, data: Any) -> None:
        memory = self._memory(data)
        dtype = numpy_dtype(str(buffer.dtype))
        # What it may touch is what it lies in: where TVM has merged buffers, indices begin there, and shapes are stale.
        size = memory.size * memory.dtype.itemsize // dtype.itemsize
        offset = memory.offset + int(buffer.elem_offset) * dtype.itemsize
        if isinstance(memory.memory, Registers) and (offset or memory.memory.data.dtype.itemsize != dtype.itemsize):
            raise AnalysisError(f"registers of {memory.memory.data.dtype} that are used as {dtype}: {buffer.name}")
        self._places[buffer] = Place(memory.memory, dtype, offset, size, str(buffer.name))
