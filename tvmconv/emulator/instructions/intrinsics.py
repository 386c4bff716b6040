"""TVM's own intrinsics for GPU instructions, which are no `T.ptx[...]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.async_copies import start_async_copy
from tvmconv.emulator.instructions.ldmatrix import load_matrices
from tvmconv.emulator.instructions.mma import (
    MmaShape,
    decode_elements,
    find_shape,
    multiply_fragments,
    notify_arithmetic,
)
from tvmconv.emulator.instructions.operands import require_uniform, write_bits
from tvmconv.emulator.lane_code import Pointer, StatementCode, TirTranslator
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress
from tvmconv.emulator.state import Mask
from tvmconv.emulator.threads import Lanes
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype


def _translate_cp_async(node: Any, translator: TirTranslator) -> StatementCode:
    """Of (destination, offset, source, offset, bytes, whether to load and not to store zeros).

    Where it does not load, TVM's code stores zeros at once; they are taken to land with the copies.
    """
    target_node, target_offset, source, source_offset, size_node, *condition_nodes = node.args
    nbytes = int(size_node)
    codes = [
        translator.translate_expression(operand) for operand in (target_node, target_offset, source, source_offset)
    ]
    condition = translator.translate_expression(condition_nodes[0]) if condition_nodes else None
    itemsize = node.ty.dtype.itemsize
    state = translator.state

    def copy(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        target, target_index, source, source_index = (state.evaluate_data_independent(code, mask) for code in codes)
        source_bytes = np.full(len(lanes), nbytes)
        if condition is not None:
            source_bytes = np.where(
                state.select_lane_values(state.evaluate_data_independent(condition, mask), lanes), nbytes, 0
            )
        start_async_copy(
            state,
            MemoryAddress(
                target.memory,
                state.select_lane_values(target.byte_offset + target_index * itemsize, lanes),
                target.name,
            ),
            MemoryAddress(
                source.memory,
                state.select_lane_values(source.byte_offset + source_index * itemsize, lanes),
                source.name,
            ),
            nbytes,
            source_bytes,
            lanes,
        )

    return copy


def _resolve_registers(node: Any, translator: TirTranslator) -> RegisterBuffer:
    pointer = translator.translate_expression(node)(None)
    if not isinstance(pointer, Pointer) or not isinstance(pointer.memory, RegisterBuffer):
        raise AnalysisError(f"an operand that is no registers: {node}")
    return pointer.memory


def _translate_fill(node: Any, translator: TirTranslator) -> StatementCode:
    """Of (how many, registers, offset): zeros."""
    count, registers = int(node.args[0]), _resolve_registers(node.args[1], translator)
    offset, state = translator.translate_expression(node.args[2]), translator.state

    def fill(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        first = require_uniform(offset(mask), lanes)
        for i in range(count):
            zeros = np.zeros(len(lanes), f"u{registers.data.dtype.itemsize}")
            write_bits(registers, first + i, lanes, zeros, all_lanes=mask is None)

    return fill


def _translate_ldmatrix(node: Any, translator: TirTranslator) -> StatementCode:
    """Of (transposed, how many, type, registers, offset, address, offset in elements)."""
    is_transposed, num_matrices, element_type = bool(node.args[0]), int(node.args[1]), str(node.args[2].value)
    registers = _resolve_registers(node.args[3], translator)
    first, address, offset = (
        translator.translate_expression(elements_per_register) for elements_per_register in node.args[4:7]
    )
    itemsize, state = node.ty.dtype.itemsize, translator.state
    if element_type != ".b16":
        raise AnalysisError(f"ldmatrix of {element_type}")
    elements_per_register = 4 // registers.data.dtype.itemsize  # elements of a register of 32 bits

    def load(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        pointer, element_offset = (
            state.evaluate_data_independent(address, mask),
            state.evaluate_data_independent(offset, mask),
        )
        first_register = require_uniform(first(mask), lanes)
        addresses = state.select_lane_values(pointer.byte_offset + element_offset * itemsize, lanes)
        words = load_matrices(state, pointer.name, addresses, lanes, num_matrices, is_transposed=is_transposed)
        columns = words.view(f"u{registers.data.dtype.itemsize}").reshape(
            len(lanes), num_matrices * elements_per_register
        )
        for i in range(num_matrices * elements_per_register):
            write_bits(registers, first_register + i, lanes, columns[:, i], all_lanes=mask is None)

    return load


def _read_elements(
    shape: MmaShape, registers: RegisterBuffer, first: int, count: int, lanes: Lanes
) -> NDArray[np.float32]:
    """So many 32-bit registers, as they are multiplied."""
    elements_per_register = 4 // registers.data.dtype.itemsize
    if not 0 <= first <= len(registers.data) - count * elements_per_register:
        raise ExecutionError(f"out of bounds: element {first} of {registers.name}, which has {len(registers.data)}")
    data = registers.data[first : first + count * elements_per_register, lanes]
    if elements_per_register == 2:
        return data.view(get_numpy_dtype(shape.dtype)).astype(np.float32)
    return decode_elements(shape, data.view(np.uint32))


def _translate_mma(node: Any, translator: TirTranslator) -> StatementCode:
    """Of (shape, layouts, types of A, B and C, and registers and offset of A, B and C, which is D as well)."""
    size, a_layout, b_layout, *dtype_names = (str(argument.value) for argument in node.args[:6])
    names = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32"}
    description = f"mma {size} of {', '.join(dtype_names)}"
    if (a_layout, b_layout, dtype_names[2]) != ("row", "col", "fp32"):
        raise AnalysisError(f"{description}, which cannot be executed")
    shape = find_shape(size, {names.get(kind, kind) for kind in dtype_names[:2]}, description)
    a, b, c = (_resolve_registers(node.args[i], translator) for i in (6, 8, 10))
    offsets = [translator.translate_expression(node.args[i]) for i in (7, 9, 11)]
    state = translator.state

    def multiply(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        a_index, b_index, c_index = (require_uniform(code(mask), lanes) for code in offsets)
        notify_arithmetic(state, shape, lanes)
        if not state.is_checked:
            for i in range(4):
                write_bits(c, c_index + i, lanes, np.zeros(len(lanes), np.uint32), all_lanes=mask is None)
            return
        products = multiply_fragments(
            shape,
            _read_elements(shape, a, a_index, shape.num_a_registers, lanes),
            _read_elements(shape, b, b_index, shape.num_b_registers, lanes),
            c.data[c_index : c_index + 4, lanes],
        )
        for i in range(4):
            bits = np.ascontiguousarray(products[i]).view(np.uint32)
            write_bits(c, c_index + i, lanes, bits, all_lanes=mask is None)

    return multiply


INTRINSICS: dict[str, Callable[[Any, TirTranslator], StatementCode]] = {
    "tirx.s_tir.cp_async_raw": _translate_cp_async,
    "tirx.mma_fill_legacy": _translate_fill,
    "tirx.ptx_legacy.ldmatrix": _translate_ldmatrix,
    "tirx.ptx_legacy.mma": _translate_mma,
}
