"""Semantics of a SASS instruction by its opcode; unsupported instructions write unknown values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.analysis.sass.interpreter import data_movement, integers
from tvmconv.analysis.sass.interpreter.operands import FIRST_PREDICATE, Constants, is_predicate, parse_register
from tvmconv.analysis.sass.interpreter.semantics import Array, SassSemantics, count_registers
from tvmconv.compiler.sass_listing import SassInstruction

_SEMANTICS_FACTORIES = integers.SEMANTICS_FACTORIES | data_movement.SEMANTICS_FACTORIES


def make_semantics(
    instruction: SassInstruction, constants: Constants, special_registers: Mapping[str, Array]
) -> SassSemantics:
    """Return the semantics of an instruction; an unsupported instruction writes unknown values."""
    operands = instruction.operands.split(", ") if instruction.operands else []
    opcode = instruction.opcode
    if opcode[0] == "U" and opcode[1:] in _SEMANTICS_FACTORIES:
        opcode = opcode[1:]
    if opcode in ("S2R", "S2UR", "CS2R"):
        return data_movement.make_special_read(
            operands, special_registers, is_wide=opcode == "CS2R" and "32" not in instruction.modifiers
        )
    if opcode == "ELECT":  # elects one thread of each warp, here the first
        return SassSemantics((parse_register(operands[0]),), (), lambda: [special_registers["SR_LANEID"] == 0])
    if opcode in _SEMANTICS_FACTORIES:
        semantics = _SEMANTICS_FACTORIES[opcode](instruction, operands, constants)
        if semantics:
            return semantics
    return make_unknown_semantics(instruction, operands)


def make_unknown_semantics(instruction: SassInstruction, operands: Sequence[str]) -> SassSemantics:
    """Return semantics that write unknown values to the first operands and the registers after them."""
    if operands[:1] == ["PR"]:
        return SassSemantics(tuple(range(FIRST_PREDICATE, FIRST_PREDICATE + 7)), (), None)
    written_registers: list[int | None] = []
    for text in operands[:2]:
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
