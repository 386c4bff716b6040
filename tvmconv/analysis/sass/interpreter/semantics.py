"""Semantics of an instruction as its registers and a function, with helpers to define them."""

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
    """Computation of an instruction."""

    # the register of each result; None for a result that is discarded
    written_registers: tuple[int | None, ...]
    sources: tuple[OperandReader, ...]  # source operands
    # function from the sources' values to the results; None if the results are unknown. The results are also unknown if
    # a source's value is
    function: SemanticsFunction | None


SemanticsFactory = Callable[[SassInstruction, list[str], Constants], "SassSemantics | None"]
SemanticsFactories = dict[str, SemanticsFactory]  # by opcode; a factory returns None for an unsupported form


def register_semantics(factories: SemanticsFactories, *opcodes: str) -> Callable[[SemanticsFactory], SemanticsFactory]:
    """Register the decorated function as the factory of the semantics of some opcodes."""

    def register_factory(factory: SemanticsFactory) -> SemanticsFactory:
        factories.update(dict.fromkeys(opcodes, factory))
        return factory

    return register_factory


def count_registers(instruction: SassInstruction) -> int:
    """Return the number of registers that an instruction writes, or that it stores."""
    if "128" in instruction.modifiers or instruction.opcode in ("LDSM", "HMMA", "TEX"):
        return 4
    is_wide = "64" in instruction.modifiers or "WIDE" in instruction.modifiers or instruction.opcode[0] == "D"
    return 2 if is_wide else 1


def parse_words(operands: Sequence[str], constants: Constants) -> tuple[OperandReader, ...]:
    """Return the readers of 32-bit operands."""
    return tuple(parse_word(text, constants) for text in operands)


def parse_register_pair(name: str) -> tuple[int | None, int | None]:
    """Return the two registers of a 64-bit value."""
    first_register = parse_register(name)
    return first_register, None if first_register is None else first_register + 1


def split_words(value: Array) -> Sequence[Array]:
    """Return the lower and the upper words of 64-bit values."""
    return [low_words(value), high_words(value)]


def to_uint64(value: Array) -> Array:
    """Zero-extend words to 64 bits."""
    return value.astype(np.uint64)


def to_int64(value: Array) -> Array:
    """Sign-extend words to 64 bits."""
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def low_words(value: Array) -> Array:
    """Return the lower words of 64-bit values."""
    return value.astype(np.uint32)


def high_words(value: Array) -> Array:
    """Return the upper words of 64-bit values."""
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
