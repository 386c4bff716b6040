"""The operands of machine code: registers, predicates, constants and addresses.

Registers are told by numbers: R0 to R254 by their own, UR0 and on from `UNIFORM` on, P0 to P6 from `PREDICATES` on and
UP0 to UP6 behind these; from `LOCAL` on, words of the stack. What is always zero or always true has no number. Values
are arrays of unsigned integers of 32 bits, of one element where all threads have the same, else of one a thread;
predicates are arrays of booleans. None stands for what is not known: what comes from memory, and floating point.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNIFORM, PREDICATES, LOCAL = 256, 512, 528
WORD = 32
Value = NDArray[Any] | None
Values = list[Value]
Constants = Callable[[int, int], int | None]  # the word at an offset of a bank, if it is known

_REGISTER = re.compile(r"(U?)R(Z|\d+)((?:\.\w+)*)")
_PREDICATE = re.compile(r"(!?)(U?)P(T|\d)")
CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_ADDRESS = re.compile(r"(?:desc\[U?R\w+\])?\[([^\]]*)\]")
_SCALES = {"X4": 4, "X8": 8, "X16": 16}


@dataclass(frozen=True)
class Source:
    """What an instruction reads: a value of 32 or 64 bits, or a predicate.

    Attributes:
        reads: the numbers of the registers, as a set of bits.
        get: its value; None if it is not known.
    """

    reads: int
    get: Callable[[Values], Value]


def register(text: str) -> int | None:
    """The number of a register, such as that of `UR4`; None for what always is zero or true, and for what is none."""
    if match := _REGISTER.fullmatch(text.lstrip("-~|!").rstrip("|")):
        return None if match[2] == "Z" else int(match[2]) + (UNIFORM if match[1] else 0)
    if match := _PREDICATE.fullmatch(text):
        return None if match[3] == "T" else PREDICATES + int(match[3]) + (8 if match[2] else 0)
    return None


def is_predicate(text: str) -> bool:
    """Whether an operand is a predicate."""
    return _PREDICATE.fullmatch(text) is not None


def predicate(text: str) -> Source:
    """A predicate, such as `!P0`; what is none is not known."""
    match = _PREDICATE.fullmatch(text.lstrip("@"))
    if not match:
        return _UNKNOWN
    negated, number = bool(match[1]), register(match[0].lstrip("!"))
    if number is None:
        always = np.array([not negated])
        return Source(0, lambda values: always)

    def get(values: Values) -> Value:
        value = values[number]
        return value if value is None or not negated else ~value

    return Source(1 << number, get)


def word(text: str, constants: Constants) -> Source:
    """An operand of 32 bits, such as `-R4.reuse`, `0x10` or `c[0x0][0x28]`."""
    sign, plain = text[: len(text) - len(text.lstrip("-~"))], text.lstrip("-~")
    if _NUMBER.fullmatch(text):
        return _always(int(text, 16))
    if match := CONSTANT.fullmatch(plain):
        found = constants(int(match[1], 16), int(match[2], 16))
        return _UNKNOWN if found is None else _signed(_always(found), sign)
    match = _REGISTER.fullmatch(plain)
    if not match or set(match[3].split(".")) - {"", "reuse", "64", "U32"}:
        return _UNKNOWN
    number = register(match[1] + "R" + match[2])
    return _signed(_always(0) if number is None else Source(1 << number, lambda values: values[number]), sign)


def pair(text: str, constants: Constants) -> Source:
    """An operand of 64 bits, which lies in two registers, or words of the constants."""
    if match := CONSTANT.fullmatch(text):
        low, high = (constants(int(match[1], 16), int(match[2], 16) + more) for more in (0, 4))
        return _UNKNOWN if low is None or high is None else _wide(_always(low), _always(high))
    if _NUMBER.fullmatch(text):
        number = int(text, 16)
        return _wide(_always(number), _always(number >> WORD))
    match = _REGISTER.fullmatch(text)
    if not match:
        return _UNKNOWN
    if match[2] == "Z":
        return _wide(_always(0), _always(0))
    return _wide(*(word(f"{match[1]}R{int(match[2]) + more}", constants) for more in (0, 1)))


def address(text: str, constants: Constants, *, wide: bool = False) -> Source:
    """An address in bytes, such as `desc[UR4][R2.64+-0x10]` or `[R5.X4+UR4+0x100]`: of 64 bits where a part is.

    Args:
        text: the operand.
        constants: the words of the constant banks.
        wide: a register without a mark stands for two (before compute capability 8.0): the only one, or the uniform one
            beside another that is marked `.U32`.
    """
    match = _ADDRESS.fullmatch(text)
    if not match:
        return _UNKNOWN
    terms = re.findall(r"[^+]+", match[1])
    registers = [n for n, term in enumerate(terms) if _REGISTER.fullmatch(term)]
    if wide and len(registers) in (1, 2) and not any(term.endswith(".64") for term in terms):
        terms[registers[-1]] += ".64"
    wide = any(term.endswith(".64") for term in terms)
    parts = [_term(term, constants) for term in terms]

    def get(values: Values) -> Value:
        total: Value = np.zeros(1, np.uint64)
        for part in parts:
            value = part.get(values)
            if value is None or total is None:
                return None
            total = total + value
        return total if wide else total & np.uint64(0xFFFFFFFF)

    return Source(_union(parts), get)


def slots(first: int, count: int) -> tuple[Source, ...]:
    """Some words of the stack, by their numbers."""
    return tuple(Source(1 << number, operator.itemgetter(number)) for number in range(first, first + count))


def _term(text: str, constants: Constants) -> Source:
    if _NUMBER.fullmatch(text):
        whole = np.array([int(text, 16)], np.int64).astype(np.uint64)
        return Source(0, lambda values: whole)
    if text.endswith(".64"):
        return pair(text.removesuffix(".64"), constants)
    plain, _, scale = text.partition(".X")
    inner, times = word(plain, constants), np.uint64(_SCALES.get("X" + scale, 1))

    def get(values: Values) -> Value:
        value = inner.get(values)
        return None if value is None else value.astype(np.uint64) * times

    return Source(inner.reads, get)


def _union(sources: Sequence[Source]) -> int:
    found = 0
    for each in sources:
        found |= each.reads
    return found


def _always(number: int) -> Source:
    value = np.array([number & 0xFFFFFFFF], np.uint32)
    return Source(0, lambda values: value)


def _signed(inner: Source, sign: str) -> Source:
    if not sign:
        return inner
    flip = np.negative if sign == "-" else np.invert

    def get(values: Values) -> Value:
        value = inner.get(values)
        return None if value is None else flip(value)

    return Source(inner.reads, get)


def _wide(low: Source, high: Source) -> Source:
    def get(values: Values) -> Value:
        below, above = low.get(values), high.get(values)
        if below is None or above is None:
            return None
        return below.astype(np.uint64) | above.astype(np.uint64) << np.uint64(WORD)

    return Source(low.reads | high.reads, get)


_UNKNOWN = Source(0, lambda values: None)
