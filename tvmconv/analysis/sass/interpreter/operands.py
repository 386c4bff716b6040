"""Operands of SASS instructions: registers, predicates, constants and addresses.

Each register has a number. R0 to R254 have their own. UR0 and up start at `FIRST_UNIFORM`, P0 to P6 and then UP0 to UP6
at `FIRST_PREDICATE`, and words of the stack at `FIRST_STACK_SLOT`. The constants RZ, URZ, PT and UPT have no number.
Values are arrays of 32-bit unsigned integers, and predicates are arrays of booleans. An array has one element if all
threads have the same value, else one per thread. None stands for an unknown value, such as one from memory or from
floating-point arithmetic.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_UNIFORM, FIRST_PREDICATE, FIRST_STACK_SLOT = 256, 512, 528
WORD_BITS = 32
_WORD_MASK, _WORD_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(WORD_BITS)
Value = NDArray[Any] | None
Values = list[Value]
Constants = Callable[[int, int], int | None]  # returns the word of (bank, offset), or None if it is unknown

_REGISTER = re.compile(r"(U?)R(Z|\d+)((?:\.\w+)*)")
_PREDICATE = re.compile(r"(!?)(U?)P(T|\d)")
CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\[(0x[0-9a-f]+)\]")
_NUMBER = re.compile(r"-?0x[0-9a-f]+")
_ADDRESS = re.compile(r"(?:desc\[U?R\w+\])?\[([^\]]*)\]")
_SCALES = {"X4": 4, "X8": 8, "X16": 16}


@dataclass(frozen=True)
class OperandReader:
    """Source operand of an instruction: a value of 32 or 64 bits, or a predicate."""

    register_bits: int  # numbers of the operand's registers as a set of bits
    read: Callable[[Values], Value]  # function that returns its value; None if the value is unknown


def combine_operands(function: Callable[..., NDArray[Any]], *operands: OperandReader) -> OperandReader:
    """Return the reader of a function of operands, whose value is unknown if that of an operand is."""
    readers = [operand.read for operand in operands]

    def read(values: Values) -> Value:
        operand_values = []
        for read_operand in readers:
            value = read_operand(values)
            if value is None:
                return None
            operand_values.append(value)
        return function(*operand_values)

    return OperandReader(reduce(operator.or_, (operand.register_bits for operand in operands), 0), read)


def make_register_reader(register_number: int) -> OperandReader:
    """Return the reader of a register, a predicate or a word of the stack by its number."""
    return OperandReader(1 << register_number, operator.itemgetter(register_number))


def parse_register(text: str) -> int | None:
    """Return the number of a register such as `UR4`; None for RZ, PT and operands that are not registers."""
    if match := _REGISTER.fullmatch(text.lstrip("-~|!").rstrip("|")):
        return None if match[2] == "Z" else int(match[2]) + (FIRST_UNIFORM if match[1] else 0)
    if match := _PREDICATE.fullmatch(text):
        return None if match[3] == "T" else FIRST_PREDICATE + int(match[3]) + (8 if match[2] else 0)
    return None


def is_predicate(text: str) -> bool:
    """Return whether an operand is a predicate."""
    return _PREDICATE.fullmatch(text) is not None


def parse_predicate(text: str) -> OperandReader:
    """Return the reader of a predicate such as `!P0`; other operands read as unknown."""
    match = _PREDICATE.fullmatch(text.lstrip("@"))
    if not match:
        return _UNKNOWN
    is_negated, register_number = bool(match[1]), parse_register(match[0].lstrip("!"))
    if register_number is None:
        return _make_constant(not is_negated, bool)
    reader = make_register_reader(register_number)
    return combine_operands(np.invert, reader) if is_negated else reader


def parse_word(text: str, constants: Constants) -> OperandReader:
    """Return the reader of a 32-bit operand such as `-R4.reuse`, `0x10` or `c[0x0][0x28]`."""
    sign, unsigned_text = text[: len(text) - len(text.lstrip("-~"))], text.lstrip("-~")
    if _NUMBER.fullmatch(text):
        return _make_constant(int(text, 16))
    if match := CONSTANT.fullmatch(unsigned_text):
        constant = constants(int(match[1], 16), int(match[2], 16))
        return _UNKNOWN if constant is None else _apply_sign(_make_constant(constant), sign)
    match = _REGISTER.fullmatch(unsigned_text)
    if not match or set(match[3].split(".")) - {"", "reuse", "64", "U32"}:
        return _UNKNOWN
    register_number = parse_register(match[1] + "R" + match[2])
    if register_number is None:
        return _apply_sign(_make_constant(0), sign)
    return _apply_sign(make_register_reader(register_number), sign)


def parse_pair(text: str, constants: Constants) -> OperandReader:
    """Return the reader of a 64-bit operand, which is a pair of registers or of constant words."""
    if match := CONSTANT.fullmatch(text):
        low_word, high_word = (constants(int(match[1], 16), int(match[2], 16) + offset) for offset in (0, 4))
        if low_word is None or high_word is None:
            return _UNKNOWN
        return _join_words(_make_constant(low_word), _make_constant(high_word))
    if _NUMBER.fullmatch(text):
        number = int(text, 16)
        return _join_words(_make_constant(number), _make_constant(number >> WORD_BITS))
    match = _REGISTER.fullmatch(text)
    if not match:
        return _UNKNOWN
    if match[2] == "Z":
        return _join_words(_make_constant(0), _make_constant(0))
    return _join_words(*(parse_word(f"{match[1]}R{int(match[2]) + offset}", constants) for offset in (0, 1)))


def parse_address(text: str, constants: Constants, *, is_wide: bool = False) -> OperandReader:
    """Return the reader of a byte address such as `desc[UR4][R2.64+-0x10]` or `[R5.X4+UR4+0x100]`.

    The values are 64-bit unsigned integers. The address has 64 bits if one of its terms has.
    """
    match = _ADDRESS.fullmatch(text)
    if not match:
        return _UNKNOWN
    terms = re.findall(r"[^+]+", match[1])
    registers = [index for index, term in enumerate(terms) if _REGISTER.fullmatch(term)]
    if is_wide and len(registers) in (1, 2) and not any(term.endswith(".64") for term in terms):
        terms[registers[-1]] += ".64"
    is_wide = any(term.endswith(".64") for term in terms)
    term_readers = [_parse_address_term(term, constants) for term in terms]
    if is_wide:
        return combine_operands(lambda *terms: reduce(operator.add, terms), *term_readers)
    return combine_operands(lambda *terms: reduce(operator.add, terms) & _WORD_MASK, *term_readers)


def _parse_address_term(text: str, constants: Constants) -> OperandReader:
    if _NUMBER.fullmatch(text):
        return _make_constant(int(text, 16), np.uint64)
    if text.endswith(".64"):
        return parse_pair(text.removesuffix(".64"), constants)
    register_text, _, scale = text.partition(".X")
    register_reader, multiplier = parse_word(register_text, constants), np.uint64(_SCALES.get("X" + scale, 1))
    return combine_operands(lambda value: value.astype(np.uint64) * multiplier, register_reader)


def _make_constant(number: int, dtype: type[Any] = np.uint32) -> OperandReader:
    value = np.array([number & 0xFFFFFFFF_FFFFFFFF], np.uint64).astype(dtype)
    return OperandReader(0, lambda values: value)


def _apply_sign(operand: OperandReader, sign: str) -> OperandReader:
    return combine_operands(np.negative if sign == "-" else np.invert, operand) if sign else operand


def _join_words(low_word: OperandReader, high_word: OperandReader) -> OperandReader:
    return combine_operands(
        lambda low, high: low.astype(np.uint64) | high.astype(np.uint64) << _WORD_SHIFT, low_word, high_word
    )


_UNKNOWN = OperandReader(0, lambda values: None)
