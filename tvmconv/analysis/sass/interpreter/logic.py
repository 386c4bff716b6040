"""Semantics of SASS instructions for logic, comparison and selection, by opcode."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tvmconv.analysis.sass.interpreter.instruction import (
    Array,
    Operands,
    SassSemantics,
    SemanticsFactory,
    low_words,
    register,
    sign_extend,
    zero_extend,
)
from tvmconv.analysis.sass.interpreter.operands import is_predicate, parse_predicate

FACTORIES: dict[str, SemanticsFactory] = {}  # by opcode


@register(FACTORIES, "LOP3")
def _make_logic(op: Operands) -> SassSemantics:
    first = int(is_predicate(op.texts[0]))  # whether the first result tells if the word is not zero
    results = (op.register(1), op.register(0)) if first else (op.register(0),)
    table = int(op.texts[first + 4], 16)

    def logic(a: Array, b: Array, c: Array) -> Sequence[Array]:
        result = evaluate_lut(table, a, b, c)
        return [result, result != 0][: len(results)]

    return SassSemantics(results, op.words(first + 1, first + 4), logic)


_COMMON_LUTS: dict[int, Callable[[Array, Array, Array], Array]] = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0x30: lambda a, b, c: a & ~b,
    0xFE: lambda a, b, c: a | b | c,
    0x80: lambda a, b, c: a & b & c,
    0xF8: lambda a, b, c: a | b & c,
    0xEA: lambda a, b, c: a & b | c,
    0x78: lambda a, b, c: a ^ (b & c),
    0x6A: lambda a, b, c: (a & b) ^ c,
    0x96: lambda a, b, c: a ^ b ^ c,
}


def evaluate_lut(lut: int, a: Array, b: Array, c: Array) -> Array:
    """Evaluate the lookup table of `lop3` for each bit; the result is bit 4a + 2b + c of the table."""
    if common_lut := _COMMON_LUTS.get(lut):
        return common_lut(a, b, c)
    terms = [
        (a if bit_index & 4 else ~a) & (b if bit_index & 2 else ~b) & (c if bit_index & 1 else ~c)
        for bit_index in range(8)
        if lut >> bit_index & 1
    ]
    return reduce(operator.or_, terms, (a ^ a) & (b ^ b) & (c ^ c))


@register(FACTORIES, "PLOP3")
def _make_predicate_logic(op: Operands) -> SassSemantics:
    luts = [int(lut_text, 16) for lut_text in op.texts[5:7]]
    sources, results = tuple(map(parse_predicate, op.texts[2:5])), (op.register(0), op.register(1))
    return SassSemantics(results, sources, lambda a, b, c: [evaluate_lut(lut, a, b, c) for lut in luts])


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq},
    "NE": operator.ne,
}
_COMBINERS: dict[str, Callable[[Any, Any], Any]] = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}


@register(FACTORIES, "ISETP")
def _make_compare(op: Operands) -> SassSemantics | None:
    compare = next((_COMPARISONS[modifier] for modifier in op.modifiers if modifier in _COMPARISONS), None)
    join = next((_COMBINERS[modifier] for modifier in op.modifiers if modifier in _COMBINERS), None)
    if compare is None or join is None or {"EX", "64"} & {*op.modifiers}:
        return None
    widen = zero_extend if "U32" in op.modifiers else sign_extend

    def setp(a: Array, b: Array, accumulated: Array) -> Sequence[Array]:
        result = compare(widen(a), widen(b))
        return [join(result, accumulated), join(~result, accumulated)]

    sources = *op.words(2, 4), parse_predicate(op.texts[4])
    return SassSemantics((op.register(0), op.register(1)), sources, setp)


@register(FACTORIES, "SEL")
def _make_select(op: Operands) -> SassSemantics | None:
    if "64" in op.modifiers:
        return None
    sources = *op.words(1, 3), parse_predicate(op.texts[3])
    return SassSemantics((op.register(0),), sources, lambda a, b, condition: [np.asarray(np.where(condition, a, b))])


@register(FACTORIES, "PRMT")
def _make_permute(op: Operands) -> SassSemantics | None:
    if op.modifiers:
        return None

    def permute(a: Array, selector: Array, c: Array) -> Sequence[Array]:
        wide_value = zero_extend(a) | zero_extend(c) << np.uint64(32)
        result = np.zeros(1, np.uint64)
        for byte_index in range(4):
            selection = zero_extend(selector) >> np.uint64(4 * byte_index)
            byte = wide_value >> ((selection & np.uint64(7)) << np.uint64(3)) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            result = result | np.where(selection & np.uint64(8), sign, byte) << np.uint64(8 * byte_index)
        return [low_words(result)]

    return SassSemantics((op.register(0),), op.words(1, 4), permute)
