"""Semantics of SASS instructions that compute addresses and branch conditions, by opcode.

The semantics of integer instructions are those of the corresponding PTX instructions (PTX ISA, "Integer Arithmetic
Instructions", "Logic and Shift Instructions"). CUDA Binary Utilities, "Instruction Set Reference", explains the
opcodes. Undocumented behavior was found by executing kernels and comparing their accesses with those of the TIR, and
with the counters of GPUs. An unsupported instruction writes unknown values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.analysis.sass.interpreter import arithmetic, logic, moves
from tvmconv.analysis.sass.interpreter.instruction import (
    Array,
    Operands,
    SassSemantics,
    SemanticsFactory,
    count_registers,
)
from tvmconv.analysis.sass.interpreter.operands import FIRST_PREDICATE, Constants, is_predicate, parse_register
from tvmconv.compiler.sass_listing import SassInstruction

_FACTORIES: dict[str, SemanticsFactory] = {**arithmetic.FACTORIES, **logic.FACTORIES, **moves.FACTORIES}  # by opcode


def make_semantics(
    instruction: SassInstruction, constants: Constants, special_registers: Mapping[str, Array]
) -> SassSemantics:
    """Return the semantics of an instruction that does not branch.

    The values of the special registers are filled in before the execution.
    """
    texts = instruction.operands.split(", ") if instruction.operands else []
    opcode = instruction.opcode
    factory = _FACTORIES.get(opcode) or _FACTORIES.get(opcode[1:] if opcode[0] == "U" else opcode)
    semantics = factory(Operands(instruction, texts, constants, special_registers)) if factory else None
    return semantics or _make_unknown(instruction, texts)


def _make_unknown(instruction: SassInstruction, texts: Sequence[str]) -> SassSemantics:
    """Return semantics that write unknown values to the first operands and the registers after them."""
    if texts[:1] == ["PR"]:
        return SassSemantics(tuple(range(FIRST_PREDICATE, FIRST_PREDICATE + 7)), (), None)
    written_registers: list[int | None] = []
    for text in texts[:2]:
        register_number = parse_register(text)
        is_constant = register_number is None and text not in ("PT", "UPT", "RZ", "URZ")
        if text.startswith(("!", "-", "~", "[")) or is_constant:
            break
        if register_number is not None:
            count = 1 if register_number >= FIRST_PREDICATE else count_registers(instruction)
            written_registers += range(register_number, register_number + count)
        if not is_predicate(text):
            break
    return SassSemantics(tuple(written_registers), (), None)
