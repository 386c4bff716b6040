"""Translation of calls of GPU instructions: PTX as `T.ptx[...]` writes it, and TVM's own intrinsics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions import (  # noqa: F401  they register their instructions
    barriers,
    data_movement,
    intrinsics,
    matrices,
    tma,
    wgmma,
)
from tvmconv.emulator.instructions.operands import PTX_PREFIX, TRANSLATORS, Instruction, PtxCall
from tvmconv.emulator.memory.shared_memory import SharedMemory
from tvmconv.emulator.state import (
    CompiledStatement,
    ExpressionCode,
    Mask,
    Pointer,
    TirTranslator,
    compose_statement,
    run_statement,
)
from tvmconv.errors import AnalysisError

if TYPE_CHECKING:
    from tvmconv.emulator.synchronization.fibers import Fork, WaitCondition


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
    if name in intrinsics.INTRINSICS:
        return intrinsics.INTRINSICS[name](node, translator)
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
