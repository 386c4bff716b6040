"""Locations of a lowered function's buffers: in arrays, in registers, or in shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.emulator.addresses import SHARED_BASE_ADDRESS
from tvmconv.emulator.memory.arrays import Argument, GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.state import EmulatorState, Mask
from tvmconv.emulator.translation.layout import SharedMemoryLayout
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype


@dataclass(frozen=True)
class BufferLocation:
    """Location of a buffer.

    Attributes:
        memory: Array, register buffer, or shared memory.
        dtype: Type of an element of the buffer.
        byte_offset: Offset of the first element in bytes.
        num_elements: Number of elements.
        name: Name of the buffer.
    """

    memory: GlobalArray | RegisterBuffer | SharedMemory
    dtype: np.dtype[Any]
    byte_offset: int
    num_elements: int
    name: str


def reads_memory(node: Any, locations: Mapping[Any, BufferLocation]) -> bool:
    """Return whether an expression loads from memory other than registers."""
    import tvm_ffi
    from tvm.ir import TensorLoad

    loads: list[Any] = []
    tvm_ffi.structural_walk(node, (TensorLoad, loads.append), order="post")
    registers = {buffer for buffer, location in locations.items() if isinstance(location.memory, RegisterBuffer)}
    return any(load.source not in registers for load in loads)


class BufferLocations:
    """Buffers of a function that have been allocated or declared.

    Args:
        state: State with the memory of the buffers.
        layout: Layout of shared memory.
        arrays: Argument of each of the function's parameters.
    """

    def __init__(self, state: EmulatorState, layout: SharedMemoryLayout, arrays: Mapping[Any, Argument]) -> None:
        self.state = state
        self._layout = layout
        self._arrays = arrays
        self._locations: dict[Any, BufferLocation] = {}

    def _find_location(self, data: Any) -> BufferLocation:
        """Return the location of a whole buffer from its data pointer."""
        if type(data).__name__ == "Call" and str(data.op.name) == "tirx.buffer_data":
            data = data.args[0]
        if data in self._locations:
            return self._locations[data]
        if data in self._arrays:
            array = self._arrays[data]
            if isinstance(array, TensorMapArray):
                raise AnalysisError(f"the elements of the tensor map {data} cannot be accessed")
            return BufferLocation(array, array.dtype, 0, array.size, array.name)
        raise AnalysisError(f"the data pointer {data} belongs to no known buffer")

    def _allocate_buffer(self, buffer: Any) -> Callable[[Mask], None]:
        scope, dtype = str(buffer.scope()), str(buffer.dtype)
        num_elements = math.prod(int(extent) for extent in buffer.shape)
        name = str(buffer.name)
        if scope.startswith("shared"):
            address = SHARED_BASE_ADDRESS + self._layout.offsets[buffer]
            shared, numpy_type = self.state.shared, get_numpy_dtype(dtype)
            self._locations[buffer] = BufferLocation(shared, numpy_type, address, num_elements, name)
            self.state.buffers.append((address, name))
            return lambda mask: None
        if scope != "local":
            raise AnalysisError(f"the buffer {name} is in the unsupported memory scope {scope!r}")
        registers = RegisterBuffer.allocate_unwritten(name, dtype, num_elements, self.state.threads.num_lanes)
        self._locations[buffer] = BufferLocation(registers, get_numpy_dtype(dtype), 0, num_elements, name)
        return lambda mask: registers.mark_unwritten() if mask is None else None

    def _declare_buffer(self, buffer: Any, data: Any) -> None:
        location = self._find_location(data)
        dtype = get_numpy_dtype(str(buffer.dtype))
        # The whole allocation may be accessed: TVM gives merged buffers offsets in it, and their shapes are stale.
        num_elements = location.num_elements * location.dtype.itemsize // dtype.itemsize
        byte_offset = location.byte_offset + int(buffer.elem_offset) * dtype.itemsize
        memory = location.memory
        if isinstance(memory, RegisterBuffer) and (byte_offset or memory.data.dtype.itemsize != dtype.itemsize):
            raise AnalysisError(f"the registers {buffer.name} of type {memory.data.dtype} are used as {dtype}")
        self._locations[buffer] = BufferLocation(location.memory, dtype, byte_offset, num_elements, str(buffer.name))
