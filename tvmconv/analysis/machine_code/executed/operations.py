"""What an instruction computes, as its registers and a function, and what many instructions need to say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.machine_code.executed.operands import Constants, Source, register, word
from tvmconv.compiler.listing import Instruction

Array = NDArray[Any]
Function = Callable[..., Sequence[Array]]


@dataclass(frozen=True)
class Operation:
    """What an instruction computes.

    Attributes:
        writes: the numbers of registers, one a result; None for a result that nobody keeps.
        sources: what it reads.
        function: of the sources' values; its results are not known where one of these is not. None: they never are.
    """

    writes: tuple[int | None, ...]
    sources: tuple[Source, ...]
    function: Function | None


Maker = Callable[[Instruction, list[str], Constants], "Operation | None"]
Makers = dict[str, Maker]  # by opcode; they give None for a form that is not understood


def makes(makers: Makers, *opcodes: str) -> Callable[[Maker], Maker]:
    """Enter a function that makes the operations of some opcodes, of an instruction and its operands."""

    def known(maker: Maker) -> Maker:
        makers.update(dict.fromkeys(opcodes, maker))
        return maker

    return known


def words(instruction: Instruction) -> int:
    """How many registers an instruction writes, or reads to store."""
    if "128" in instruction.modifiers or instruction.opcode in ("LDSM", "HMMA", "TEX"):
        return 4
    wide = "64" in instruction.modifiers or "WIDE" in instruction.modifiers or instruction.opcode[0] == "D"
    return 2 if wide else 1


def words_of(parts: Sequence[str], constants: Constants) -> tuple[Source, ...]:
    """Operands of 32 bits."""
    return tuple(word(part, constants) for part in parts)


def pair_of(name: str) -> tuple[int | None, int | None]:
    """The two registers of a value of 64 bits."""
    first = register(name)
    return first, None if first is None else first + 1


def split(value: Array) -> Sequence[Array]:
    """The two words of 64 bits."""
    return [lower(value), upper(value)]


def u64(value: Array) -> Array:
    """Words as unsigned numbers of 64 bits."""
    return value.astype(np.uint64)


def i64(value: Array) -> Array:
    """Words as signed numbers of 64 bits."""
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def lower(value: Array) -> Array:
    """The lower words."""
    return value.astype(np.uint32)


def upper(value: Array) -> Array:
    """The upper words."""
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)
