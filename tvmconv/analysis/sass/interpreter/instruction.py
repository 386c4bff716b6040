"""The semantics of a SASS instruction, the operands that they are made from, and what its factories share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.sass.interpreter.operands import (
    Constants,
    OperandReader,
    is_predicate,
    parse_register,
    parse_word,
)
from tvmconv.compiler.sass_listing import SassInstruction

Array = NDArray[Any]


@dataclass(frozen=True)
class SassSemantics:
    """Computation of an instruction."""

    written_registers: tuple[int | None, ...]  # of each result; None for a result that is discarded
    sources: tuple[OperandReader, ...]
    # From the sources' values to the results; None if the results are unknown, as they are if a source's value is.
    function: Callable[..., Sequence[Array]] | None


@dataclass(frozen=True)
class Operands:
    """Operands of one instruction as text, with methods that parse them by their position."""

    instruction: SassInstruction
    texts: list[str]
    constants: Constants
    special_registers: Mapping[str, Array]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Modifiers of the instruction, such as ("WIDE", "U32")."""
        return self.instruction.modifiers

    def register(self, index: int) -> int | None:
        """Return the number of a register."""
        return parse_register(self.texts[index])

    def register_pair(self, index: int) -> tuple[int | None, int | None]:
        """Return the two registers of a 64-bit value."""
        first_register = self.register(index)
        return first_register, None if first_register is None else first_register + 1

    def words(self, first: int, stop: int) -> tuple[OperandReader, ...]:
        """Return the readers of 32-bit operands."""
        return self.parse_words(self.texts[first:stop])

    def parse_words(self, texts: Iterable[str]) -> tuple[OperandReader, ...]:
        """Return the readers of 32-bit values with these texts."""
        return tuple(parse_word(text, self.constants) for text in texts)

    def split_carries(self) -> tuple[list[str], list[str]]:
        """Return the predicates after the result, which receive the carries, and the operands after them."""
        num_carries = next((index for index, text in enumerate(self.texts[1:]) if not is_predicate(text)), 0)
        return self.texts[1 : 1 + num_carries], self.texts[1 + num_carries :]


SemanticsFactory = Callable[[Operands], SassSemantics | None]  # returns None for an unsupported form


def register(factories: dict[str, SemanticsFactory], *opcodes: str) -> Callable[[SemanticsFactory], SemanticsFactory]:
    """Add the decorated function to `factories` for some opcodes, and for their uniform variants with the prefix U."""

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


def zero_extend(value: Array) -> Array:
    """Return words as unsigned 64-bit integers."""
    return value.astype(np.uint64)


def sign_extend(value: Array) -> Array:
    """Return words as signed 64-bit integers."""
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def low_words(value: Array) -> Array:
    """Return the low words of 64-bit integers."""
    return value.astype(np.uint32)


def high_words(value: Array) -> Array:
    """Return the high words of 64-bit integers."""
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def split_words(value: Array) -> Sequence[Array]:
    """Return the low and the high words of 64-bit integers."""
    return [low_words(value), high_words(value)]
