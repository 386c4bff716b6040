"""What each instruction computes, whichever it is; of those that are not understood, what they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvmconv.analysis.machine_code.executed import integers, moves
from tvmconv.analysis.machine_code.executed.operands import PREDICATES, Constants, is_predicate, register
from tvmconv.analysis.machine_code.executed.operations import Array, Operation, words
from tvmconv.compiler.listing import Instruction

_MAKERS = integers.MAKERS | moves.MAKERS


def operation(instruction: Instruction, constants: Constants, special: Mapping[str, Array]) -> Operation:
    """What an instruction computes; something that is not known, where it is none of those that are understood.

    Args:
        instruction: not one that branches.
        constants: the words of the constant banks.
        special: values of the registers that `moves.SPECIAL` names, when it is executed.
    """
    parts = instruction.operands.split(", ") if instruction.operands else []
    opcode = instruction.opcode
    if opcode[0] == "U" and opcode[1:] in _MAKERS:
        opcode = opcode[1:]
    if opcode in ("S2R", "S2UR", "CS2R"):
        return moves.from_special(parts, special, wide=opcode == "CS2R" and "32" not in instruction.modifiers)
    if opcode == "ELECT":  # one thread of each warp: the first, say
        return Operation((register(parts[0]),), (), lambda: [special["SR_LANEID"] == 0])
    if opcode in _MAKERS:
        made = _MAKERS[opcode](instruction, parts, constants)
        if made:
            return made
    return unknown(instruction, parts)


def unknown(instruction: Instruction, parts: Sequence[str]) -> Operation:
    """What an instruction writes, of which nothing is known: its first operands, and the registers behind them."""
    if parts[:1] == ["PR"]:
        return Operation(tuple(range(PREDICATES, PREDICATES + 7)), (), None)
    found: list[int | None] = []
    for part in parts[:2]:
        number = register(part)
        if part.startswith(("!", "-", "~", "[")) or (number is None and part not in ("PT", "UPT", "RZ", "URZ")):
            break
        if number is not None:
            found += range(number, number + (1 if number >= PREDICATES else words(instruction)))
        if not is_predicate(part):
            break
    return Operation(tuple(found), (), None)
