"""Translation of calls of GPU instructions: PTX as `T.ptx[...]` writes it, and TVM's own intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions import (  # noqa: F401  they register their instructions
    barriers,
    bulk,
    data_movement,
    matrices,
    tma,
    wgmma,
)
from tvmconv.emulator.instructions.data_movement import start_async_copy
from tvmconv.emulator.instructions.matrices import (
    decode_elements,
    find_shape,
    load_matrices,
    multiply_fragments,
    notify_arithmetic,
)
from tvmconv.emulator.instructions.operands import PTX_PREFIX, TRANSLATORS, Instruction, PtxCall, bind, write_bits
from tvmconv.emulator.memory.registers import RegisterBuffer
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.state import (
    CompiledStatement,
    ExpressionCode,
    Mask,
    Pointer,
    StatementCode,
    TirTranslator,
    compose_statement,
    run_statement,
)
from tvmconv.emulator.synchronization.fibers import Fork, WaitCondition
from tvmconv.errors import AnalysisError
from tvmconv.workloads.dtypes import get_numpy_dtype


def _make_instruction(node: Any, translator: TirTranslator, first: int = 0) -> Instruction:
    """Return the instruction of a call, with its operands from `first` on."""
    return Instruction(PtxCall(str(node.op.name).removeprefix("tirx."), tuple(node.args[first:])), translator)


def _resolve_registers(op: Instruction, index: int) -> RegisterBuffer:
    registers = op.pointer(index).memory
    if not isinstance(registers, RegisterBuffer):
        raise AnalysisError(f"the operand {op.call.operands[index]} is not a register buffer")
    return registers


def _translate_cp_async(node: Any, translator: TirTranslator) -> StatementCode:
    """Translate cp.async of (destination, offset, source, offset, bytes, condition to load instead of zeros).

    TVM's code stores zeros at once if the condition is false; the emulator completes them with the copies.
    """
    op, itemsize = _make_instruction(node, translator), node.ty.dtype.itemsize
    state, nbytes = op.state, op.constant(4)

    def locate(pointer_index: int, mask: Mask) -> MemoryAddress:
        pointer, offset = op.value(pointer_index, mask), op.value(pointer_index + 1, mask)
        byte_offsets = state.select_lane_values(pointer.byte_offset + offset * itemsize, state.find_lanes(mask))
        return MemoryAddress(pointer.memory, byte_offsets, pointer.name)

    def copy(mask: Mask) -> None:
        lanes = state.find_lanes(mask)
        source_bytes = np.full(len(lanes), nbytes)
        if op.num_operands > 5:
            source_bytes = np.where(op.values(5, mask), nbytes, 0)
        start_async_copy(state, locate(0, mask), locate(2, mask), nbytes, source_bytes, lanes)

    return copy


def _translate_fill(node: Any, translator: TirTranslator) -> StatementCode:
    """Translate a fill with zeros of (number of elements, registers, offset)."""
    op = _make_instruction(node, translator)
    registers = _resolve_registers(op, 1)

    def fill(mask: Mask) -> None:
        lanes = op.state.find_lanes(mask)
        first, zeros = op.uniform_value(2, mask), np.zeros(len(lanes), f"u{registers.data.dtype.itemsize}")
        for i in range(op.constant(0)):
            write_bits(registers, first + i, lanes, zeros, all_lanes=mask is None)

    return fill


def _translate_ldmatrix(node: Any, translator: TirTranslator) -> StatementCode:
    """Translate ldmatrix of (transposed, matrices, type, registers, offset, address, offset in elements)."""
    is_transposed, num_matrices, element_type = bool(node.args[0]), int(node.args[1]), str(node.args[2].value)
    if element_type != ".b16":
        raise AnalysisError(f"ldmatrix of type {element_type} is not supported by the emulator, only .b16")
    op, itemsize = _make_instruction(node, translator, first=3), node.ty.dtype.itemsize
    registers, state = _resolve_registers(op, 0), op.state
    num_elements = num_matrices * 4 // registers.data.dtype.itemsize  # a register has 32 bits

    def load(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        pointer, offset, first_register = op.value(2, mask), op.value(3, mask), op.uniform_value(1, mask)
        addresses = state.select_lane_values(pointer.byte_offset + offset * itemsize, lanes)
        words = load_matrices(state, pointer.name, addresses, lanes, num_matrices, is_transposed)
        columns = words.view(f"u{registers.data.dtype.itemsize}").reshape(len(lanes), num_elements)
        for i in range(num_elements):
            write_bits(registers, first_register + i, lanes, columns[:, i], all_lanes=mask is None)

    return load


def _translate_mma(node: Any, translator: TirTranslator) -> StatementCode:
    """Translate mma of (shape, layouts, types of A, B and C, and registers and offset of A, B and C, which is D)."""
    size, a_layout, b_layout, *dtype_names = (str(argument.value) for argument in node.args[:6])
    names = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32"}
    description = f"mma {size} of {', '.join(dtype_names)}"
    if (a_layout, b_layout, dtype_names[2]) != ("row", "col", "fp32"):
        raise AnalysisError(f"{description} is not supported by the emulator")
    shape = find_shape(size, [names.get(kind, kind) for kind in dtype_names[:2]], description)
    op = Instruction(PtxCall("mma", tuple(node.args[6:12])), translator)
    a, b, c = (_resolve_registers(op, index) for index in (0, 2, 4))
    state = op.state

    def read_elements(registers: RegisterBuffer, first: int, count: int, lanes: Any, operand: int) -> Any:
        num_elements = count * 4 // registers.data.dtype.itemsize
        if not 0 <= first <= len(registers.data) - num_elements:
            raise ExecutionError(f"out of bounds: element {first} of {registers.name}, which has {len(registers.data)}")
        data = registers.data[first : first + num_elements, lanes]
        if num_elements > count:
            return data.view(get_numpy_dtype(shape.dtypes[operand])).astype(np.float32)
        return decode_elements(shape, data.view(np.uint32), operand)

    def multiply(mask: Mask) -> None:
        lanes = state.require_whole_warps(mask)
        a_first, b_first, c_first = (op.uniform_value(index, mask) for index in (1, 3, 5))
        notify_arithmetic(state, shape, lanes)
        rows = np.zeros((4, len(lanes)), np.uint32)
        if state.is_checked:
            a_elements = read_elements(a, a_first, shape.num_a_registers, lanes, 0)
            b_elements = read_elements(b, b_first, shape.num_b_registers, lanes, 1)
            rows = multiply_fragments(shape, a_elements, b_elements, c.data[c_first : c_first + 4, lanes])
        for i, bits in enumerate(rows):
            write_bits(c, c_first + i, lanes, bits, all_lanes=mask is None)

    return multiply


def _translate_storage_sync(node: Any, translator: TirTranslator) -> CompiledStatement:
    """Translate TVM's barrier of a memory scope: of the warp, or of the block."""
    op = Instruction(PtxCall("tvm_storage_sync", ()), translator)
    return bind(barriers.sync_warp if str(node.args[0].value) == "warp" else barriers.sync_block, op)


def _translate_barrier(execute: Callable[..., Any], node: Any, translator: TirTranslator) -> CompiledStatement:
    return bind(execute, _make_instruction(node, translator))


INTRINSICS: dict[str, Callable[[Any, TirTranslator], CompiledStatement]] = {
    "tirx.s_tir.cp_async_raw": _translate_cp_async,
    "tirx.mma_fill_legacy": _translate_fill,
    "tirx.ptx_legacy.ldmatrix": _translate_ldmatrix,
    "tirx.ptx_legacy.mma": _translate_mma,
    "tirx.tvm_storage_sync": _translate_storage_sync,
    "tirx.cuda.mbarrier_wait": partial(_translate_barrier, barriers.wait),
    "tirx.cuda.mbarrier_wait_acquire_cluster": partial(_translate_barrier, barriers.wait),
    "tirx.cuda.cta_sync": partial(_translate_barrier, barriers.sync_block),
    "tirx.cuda.warp_sync": partial(_translate_barrier, barriers.sync_warp),
    "tirx.cuda.cluster_sync": partial(_translate_barrier, barriers.sync_cluster),
    "tirx.cuda.warpgroup_sync": partial(_translate_barrier, barriers.sync_warpgroup),
}


def smallest_access_bytes(node: Any) -> int:
    """Return the bytes of the smallest shared-memory element that a call accesses; 4 if it accesses none."""
    call = PtxCall.from_node(node)
    if call is None:
        return 2 if str(node.op.name) == "tirx.ptx_legacy.ldmatrix" and int(node.args[0]) else 4
    if call.name in ("st", "st_vec", "ld", "ld_vec") and call.state_space.startswith("shared"):
        return min(4, call.vector_width[1])
    return 2 if call.name in ("ldmatrix", "stmatrix") and "trans" in call.modifiers else 4


def translate_statement(node: Any, translator: TirTranslator) -> CompiledStatement | None:
    """Return the code of a call that is a statement, or None for a call that is not a GPU instruction."""
    name = str(node.op.name)
    if name in INTRINSICS:
        return INTRINSICS[name](node, translator)
    call = PtxCall.from_node(node)
    if call is None:
        return None
    if call.name not in TRANSLATORS:
        raise AnalysisError(f"{call} is not supported by the emulator")
    translated = TRANSLATORS[call.name](Instruction(call, translator))
    if call.predicate is None:
        return translated
    predicate, state = translator.translate_expression(call.predicate), translator.state

    def run_predicated(mask: Mask) -> Iterator[WaitCondition | Fork]:
        is_true = np.asarray(state.evaluate_data_independent(predicate, mask)) != 0
        active = is_true & (state.thread_mask if mask is None else mask)
        if active.any():
            yield from run_statement(translated, active)

    return compose_statement(run_predicated, [translated])


def translate_expression(node: Any, translator: TirTranslator) -> ExpressionCode | None:
    """Return the code of a call that has a value, or None for a call that is not a GPU instruction."""
    name = str(node.op.name)
    if name == "tirx.cuda.cvta_generic_to_shared":
        pointer = translator.translate_expression(node.args[0])

        def address(mask: Mask) -> Any:
            value = pointer(mask)
            if not isinstance(value, Pointer) or not isinstance(value.memory, SharedMemory):
                raise ExecutionError("the argument of cvta_generic_to_shared must point to shared memory")
            return value.byte_offset

        return address
    if name == f"{PTX_PREFIX}addr":
        base, offset = translator.translate_expression(node.args[0]), translator.translate_expression(node.args[1])

        def add_offset(mask: Mask) -> Any:
            base_value, offset_value = base(mask), offset(mask)
            if isinstance(base_value, Pointer):
                return Pointer(base_value.memory, base_value.byte_offset + offset_value, base_value.name)
            return base_value + offset_value

        return add_offset
    if name == "tirx.cuda.elect_sync":
        return lambda mask: data_movement.elect_lanes(translator.state, mask)
    if name.startswith("tirx.cuda.__shfl"):
        return data_movement.translate_shuffle(node, translator)
    return None
