"""What an instruction computes, as its registers and a function, and what many instructions need to say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.sass.interpreter.operands import Constants, OperandReader, parse_register, parse_word
from tvmconv.compiler.sass_listing import SassInstruction

Array = NDArray[Any]
SemanticsFunction = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class SassSemantics:
    """What an instruction computes.

    Attributes:
        written_registers: the numbers of registers, one a result; None for a result that nobody keeps.
        sources: what it reads.
        function: of the sources' values; its results are not known where one of these is not. None: they never are.
    """

    written_registers: tuple[int | None, ...]
    sources: tuple[OperandReader, ...]
    function: SemanticsFunction | None


SemanticsFactory = Callable[[SassInstruction, list[str], Constants], "SassSemantics | None"]
SemanticsFactories = dict[str, SemanticsFactory]  # by opcode; they give None for a form that is not understood


def register_semantics(factories: SemanticsFactories, *opcodes: str) -> Callable[[SemanticsFactory], SemanticsFactory]:
    """Enter a function that makes the operations of some opcodes, of an instruction and its operands."""

    def register_factory(factory: SemanticsFactory) -> SemanticsFactory:
        factories.update(dict.fromkeys(opcodes, factory))
        return factory

    return register_factory


def count_registers(instruction: SassInstruction) -> int:
    """How many registers an instruction writes, or reads to store."""
    if "128" in instruction.modifiers or instruction.opcode in ("LDSM", "HMMA", "TEX"):
        return 4
    is_wide = "64" in instruction.modifiers or "WIDE" in instruction.modifiers or instruction.opcode[0] == "D"
    return 2 if is_wide else 1


def parse_words(operand_texts: Sequence[str], constants: Constants) -> tuple[OperandReader, ...]:
    """Operands of 32 bits."""
    return tuple(parse_word(operand_text, constants) for operand_text in operand_texts)


def parse_register_pair(name: str) -> tuple[int | None, int | None]:
    """The two registers of a value of 64 bits."""
    first_register = parse_register(name)
    return first_register, None if first_register is None else first_register + 1


def split_words(value: Array) -> Sequence[Array]:
    """The two words of 64 bits."""
    return [low_words(value), high_words(value)]


def to_uint64(value: Array) -> Array:
    """Words as unsigned numbers of 64 bits."""
    return value.astype(np.uint64)


def to_int64(value: Array) -> Array:
    """Words as signed numbers of 64 bits."""
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def low_words(value: Array) -> Array:
    """The lower words."""
    return value.astype(np.uint32)


def high_words(value: Array) -> Array:
    """The upper words."""
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
