"""Translation of buffers of TIR, with the layout of shared memory, and of loads and stores, to Python functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.arithmetic import round_up
from tvmconv.compiler.tir_nodes import collect_nodes, count_elements
from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions import dispatch
from tvmconv.emulator.memory.arrays import Argument, GlobalArray, TensorMapArray
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.observers import SITES_PER_STATEMENT
from tvmconv.emulator.state import EmulatorState, ExpressionCode, Mask, Pointer
from tvmconv.emulator.threads import SHARED_BASE_ADDRESS
from tvmconv.emulator.translation.arithmetic import Value, select_integer_type
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Layout of a function's shared buffers."""

    offsets: Mapping[Any, int]  # offset of each allocated buffer in bytes
    nbytes: int  # bytes of all buffers
    unit_bytes: int  # bytes of the smallest element that is accessed


def plan_shared_memory(function: PrimFunc) -> SharedMemoryLayout:
    """Place the shared buffers of a function one after the other, each aligned to 1,024 bytes."""
    from tvm import tirx
    from tvm.ir import Call

    def list_buffers(kind: type) -> list[tuple[Any, np.dtype[Any]]]:
        buffers = [node.buffer for node in collect_nodes(function.body, kind)]
        shared_buffers = [buffer for buffer in buffers if str(buffer.scope()).startswith("shared")]
        return [(buffer, get_dtype(str(buffer.dtype))) for buffer in shared_buffers]

    def get_dtype(name: str) -> np.dtype[Any]:
        try:
            return get_numpy_dtype(name)
        except TypeError as error:  # a vector
            raise AnalysisError(f"the emulator does not support shared memory of {name}") from error

    offsets: dict[Any, int] = {}
    nbytes = 0
    element_sizes = [4]
    for buffer, dtype in list_buffers(tirx.AllocBuffer):
        offsets[buffer] = round_up(nbytes, SHARED_BASE_ADDRESS)
        nbytes = offsets[buffer] + count_elements(buffer) * dtype.itemsize
        element_sizes += [dtype.itemsize] if dtype != np.uint8 else []
    element_sizes += [dtype.itemsize for _, dtype in list_buffers(tirx.DeclBuffer)]
    element_sizes += [dispatch.smallest_access_bytes(call) for call in collect_nodes(function.body, Call)]
    unit_bytes = min(element_sizes)
    if unit_bytes < 2:
        raise AnalysisError("the emulator does not support accesses of single bytes to shared memory")
    return SharedMemoryLayout(offsets, nbytes, unit_bytes)


@dataclass(frozen=True)
class BufferLocation:
    """Location of a buffer in an array, in registers or in shared memory."""

    memory: GlobalArray | RegisterBuffer | SharedMemory
    dtype: np.dtype[Any]
    byte_offset: int
    num_elements: int
    name: str


def reads_memory(node: Any, locations: Mapping[Any, BufferLocation]) -> bool:
    """Return whether an expression loads from memory other than registers."""
    from tvm.ir import TensorLoad

    registers = {buffer for buffer, location in locations.items() if isinstance(location.memory, RegisterBuffer)}
    return any(load.source not in registers for load in collect_nodes(node, TensorLoad))


class AccessTranslator(ABC):
    """Translator of buffers, and of loads and stores, whose indices and values subclasses translate.

    The functions run on `state`, and `arrays` has the argument of each of the TIR function's parameters.
    """

    def __init__(self, state: EmulatorState, layout: SharedMemoryLayout, arrays: Mapping[Any, Argument]) -> None:
        self.state, self._layout, self._arrays = state, layout, arrays
        self._locations: dict[Any, BufferLocation] = {}
        self._variables: dict[Any, ExpressionCode] = {}
        self._variable_values: list[Value] = []
        self._statement_index = -1  # index of the current statement
        self._num_sites = 0

    @abstractmethod
    def translate_expression(self, node: Any) -> ExpressionCode:
        """Return a function that evaluates an expression for the lanes of a mask."""

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
        num_elements = count_elements(buffer)
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

    def _next_site(self) -> int:
        self._num_sites += 1
        return self._statement_index * SITES_PER_STATEMENT + self._num_sites % SITES_PER_STATEMENT

    def _select_indices(self, indices: Value, active: NDArray[np.intp], vector_lanes: int) -> NDArray[np.int64]:
        """Return the indices of active lanes, of shape (active lanes, vector elements)."""
        indices = np.asarray(indices, np.int64)
        if indices.ndim == 0:
            return np.full((len(active), 1), indices)
        if indices.ndim == 1:
            return indices[active][:, None]
        return np.broadcast_to(indices, (len(active), vector_lanes)) if len(indices) == 1 else indices[active]

    @staticmethod
    def _check_index(location: BufferLocation, indices: NDArray[np.int64]) -> None:
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= location.num_elements):
            worst_index = int(indices.min()) if int(indices.min()) < 0 else int(indices.max())
            raise ExecutionError(
                f"out of bounds: element {worst_index} of {location.name}, which has {location.num_elements}"
            )

    @staticmethod
    def _merge_contiguous(indices: NDArray[np.int64], location: BufferLocation) -> tuple[NDArray[np.int64], int]:
        """Return the start of each access in bytes, and its number of contiguous elements."""
        count = indices.shape[1]
        if count > 1 and np.any(np.diff(indices, axis=1) != 1):
            return indices * location.dtype.itemsize + location.byte_offset, 1
        return indices[:, :1] * location.dtype.itemsize + location.byte_offset, count

    def _translate_load(self, node: Any) -> ExpressionCode:
        location = self._locations.get(node.source)
        if location is None:
            raise AnalysisError(f"the buffer {node.source} is neither declared nor allocated")
        index_code = self.translate_expression(node.indices[0])
        state, dtype = self.state, location.dtype
        vector_lanes = node.ty.dtype.lanes
        is_integer = dtype.kind in "iub"
        if isinstance(location.memory, RegisterBuffer):
            return self._translate_register_load(location, index_code, is_integer=is_integer)
        memory, site = location.memory, self._next_site()

        def load(mask: Mask) -> Value:
            active_lanes = state.find_lanes(mask)
            indices = state.evaluate_data_independent(index_code, mask)
            indices = self._select_indices(indices, active_lanes, vector_lanes)
            self._check_index(location, indices)
            state.site = site
            starts, count = self._merge_contiguous(indices, location)
            elements = state.load(MemoryAddress(memory, starts, location.name), count, dtype, active_lanes)
            elements = elements.astype(select_integer_type(dtype)) if is_integer else elements
            elements = elements[:, 0] if vector_lanes == 1 else elements
            if mask is None:
                return elements
            all_elements = np.zeros((state.threads.num_lanes, *elements.shape[1:]), elements.dtype)
            all_elements[active_lanes] = elements
            return all_elements

        return load

    def _select_registers(self, location: BufferLocation, indices: Value, mask: Mask) -> tuple[Any, Any]:
        """Return what selects elements of all lanes in an array of shape (elements, lanes), after a bounds check."""
        if isinstance(indices, int):
            if not 0 <= indices < location.num_elements:
                self._check_index(location, np.array(indices))
            return indices, slice(None)
        indices = np.asarray(indices)
        indices = indices[:, None] if indices.ndim == 1 else indices
        indices = np.broadcast_to(indices, (self.state.threads.num_lanes, indices.shape[-1] if indices.ndim else 1))
        active_mask = self.state.thread_mask if mask is None else mask
        self._check_index(location, indices[active_mask])
        return np.where(active_mask[:, None], indices, 0), self.state.all_lanes[:, None]

    def _translate_register_load(
        self, location: BufferLocation, index_code: ExpressionCode, *, is_integer: bool
    ) -> ExpressionCode:
        registers, state = location.memory, self.state
        assert isinstance(registers, RegisterBuffer)
        data, integer_type = registers.data.view(location.dtype), select_integer_type(location.dtype)

        def load(mask: Mask) -> Value:
            indices = index_code(mask)
            if registers.deferred_loads:
                registers.notify_read(indices, mask)
            if registers.accumulators is not None:
                registers.accumulators.check_access(indices, mask)
            selected = self._select_registers(location, indices, mask)
            state.depends_on_memory |= bool(registers.depends_on_memory[selected[0]].any())
            elements = data[selected]
            if is_integer:
                is_known, active_mask = registers.is_written[selected], state.thread_mask if mask is None else mask
                if not is_known.all() and not is_known[active_mask].all():
                    raise ExecutionError(f"{location.name} is read before it is written")
                elements = elements.astype(integer_type)
            return elements[:, 0] if elements.ndim == 2 and elements.shape[1] == 1 else elements

        return load

    def _translate_store(self, node: Any) -> Callable[[Mask], None]:
        location = self._locations[node.buffer]
        value_code, index_code = self.translate_expression(node.value), self.translate_expression(node.indices[0])
        vector_lanes = node.value.ty.dtype.lanes
        if getattr(node, "predicate", None) is not None:
            raise AnalysisError(f"the store to {node.buffer.name} has a predicate, which is not supported")
        if isinstance(location.memory, RegisterBuffer):
            return self._translate_register_store(location, value_code, index_code)
        state, dtype, memory = self.state, location.dtype, location.memory
        site = self._next_site()

        def store(mask: Mask) -> None:
            active_lanes = state.find_lanes(mask)
            value = value_code(mask)
            indices = state.evaluate_data_independent(index_code, mask)
            indices = self._select_indices(indices, active_lanes, vector_lanes)
            state.site = site
            self._check_index(location, indices)
            value = np.asarray(value)
            if value.ndim == 0:
                elements = np.full((len(active_lanes), vector_lanes), value.astype(dtype))
            else:
                value = value if value.ndim == 2 else value[:, None]
                value = value if mask is None or len(value) == 1 else value[active_lanes]
                elements = np.broadcast_to(value.astype(dtype, copy=False), (len(active_lanes), vector_lanes))
            starts, count = self._merge_contiguous(indices, location)
            target = MemoryAddress(memory, starts, location.name)
            state.store(target, count, np.ascontiguousarray(elements), active_lanes)

        return store

    def _translate_register_store(
        self, location: BufferLocation, value_code: ExpressionCode, index_code: ExpressionCode
    ) -> Callable[[Mask], None]:
        registers, state = location.memory, self.state
        assert isinstance(registers, RegisterBuffer)
        data, is_written = registers.data.view(location.dtype), registers.is_written
        depends_by_element = registers.depends_on_memory

        def store(mask: Mask) -> None:
            state.depends_on_memory = False
            value, indices = value_code(mask), index_code(mask)
            depends_on_memory = state.depends_on_memory
            if registers.accumulators is not None:
                registers.accumulators.check_access(indices, mask)
            elements, lanes = self._select_registers(location, indices, mask)
            if isinstance(indices, int):
                value = value[:, 0] if isinstance(value, np.ndarray) and value.ndim == 2 else value
                is_stored: Any = True if mask is None else mask
                np.copyto(data[elements], value, where=is_stored, casting="unsafe")
                is_written[elements] |= is_stored
                depends_by_element[elements] = depends_on_memory or (
                    mask is not None and bool(depends_by_element[elements])
                )
                return
            active_lanes = state.find_lanes(mask)
            elements, lanes = elements[active_lanes], lanes[active_lanes]
            value = np.asarray(value)
            if value.ndim:
                value = value if value.ndim == 2 else value[:, None]
                value = np.broadcast_to(value, (state.threads.num_lanes, value.shape[1]))[active_lanes]
            data[elements, lanes] = value
            is_written[elements, lanes] = True
            depends_by_element[elements] |= depends_on_memory

        return store

    def _translate_address(self, load: Any) -> ExpressionCode:
        location = self._locations.get(load.source)
        if location is None:
            raise AnalysisError(f"the buffer {load.source}, whose address is taken, is neither declared nor allocated")
        index_code, size = self.translate_expression(load.indices[0]), location.dtype.itemsize
        return lambda mask: Pointer(location.memory, location.byte_offset + index_code(mask) * size, location.name)

    def find_registers(self, node: Any) -> tuple[RegisterBuffer, ExpressionCode] | None:
        """Return the register buffer of an operand such as `acc[3]`, and the code of its index; None for others."""
        location = self._locations.get(node.source) if type(node).__name__ == "TensorLoad" else None
        if location is None or not isinstance(location.memory, RegisterBuffer):
            return None
        return location.memory, self.translate_expression(node.indices[0])
