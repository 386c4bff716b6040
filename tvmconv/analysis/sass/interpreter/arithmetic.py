"""Semantics of SASS instructions for integer arithmetic and shifts, by opcode."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

import numpy as np

from tvmconv.analysis.sass.interpreter.instruction import (
    Array,
    Operands,
    SassSemantics,
    SemanticsFactory,
    high_words,
    low_words,
    register,
    sign_extend,
    split_words,
    zero_extend,
)
from tvmconv.analysis.sass.interpreter.operands import is_predicate, parse_pair, parse_predicate, parse_register

FACTORIES: dict[str, SemanticsFactory] = {}  # by opcode


@register(FACTORIES, "IADD3", "VIADD", "IADD")
def _make_add(op: Operands) -> SassSemantics | None:
    carry_texts, input_texts = op.split_carries()
    if "64" in op.modifiers:
        if carry_texts:
            return None
        pairs = tuple(parse_pair(text, op.constants) for text in input_texts)
        return SassSemantics(op.register_pair(0), pairs, lambda *terms: split_words(reduce(operator.add, terms)))
    value_texts = [text for text in input_texts if not is_predicate(text)]
    carries = [parse_predicate(text) for text in input_texts if is_predicate(text)] if "X" in op.modifiers else []
    # The carry of a subtraction is that of the addition of the complement.
    is_negated = np.array([text.startswith(("-R", "-UR")) for text in value_texts])
    unsigned_texts = [text.lstrip("-") if sign else text for text, sign in zip(value_texts, is_negated, strict=True)]
    word_range = np.uint64(1 << 32)

    def add(*inputs: Array) -> Sequence[Array]:
        if not carry_texts and not carries and not is_negated.any():
            return [reduce(operator.add, inputs)]
        terms = [
            word_range - zero_extend(value) if negated else zero_extend(value)
            for value, negated in zip(inputs[: len(value_texts)], is_negated, strict=True)
        ]
        total = reduce(operator.add, [*terms, *map(zero_extend, inputs[len(value_texts) :])])
        return [low_words(total), *(total >> np.uint64(32 + index) != 0 for index in range(len(carry_texts)))]

    results = op.register(0), *map(parse_register, carry_texts)
    return SassSemantics(results, (*op.parse_words(unsigned_texts), *carries), add)


@register(FACTORIES, "IMAD")
def _make_multiply_add(op: Operands) -> SassSemantics | None:
    is_wide, is_high = "WIDE" in op.modifiers, "HI" in op.modifiers
    if is_predicate(op.texts[1]):
        return None
    if not is_wide and not is_high:
        carries = map(parse_predicate, op.texts[4:] if "X" in op.modifiers else [])

        def multiply_low(a: Array, b: Array, c: Array, *carry: Array) -> Sequence[Array]:
            return [reduce(operator.add, (carry_value.astype(np.uint32) for carry_value in carry), a * b + c)]

        return SassSemantics((op.register(0),), (*op.words(1, 4), *carries), multiply_low)
    widen = zero_extend if "U32" in op.modifiers else sign_extend

    def multiply_wide(a: Array, b: Array, c: Array) -> Sequence[Array]:
        product = (widen(a) * widen(b)).astype(np.uint64) + c
        return split_words(product) if is_wide else [high_words(product)]

    results = op.register_pair(0) if is_wide else (op.register(0),)
    return SassSemantics(results, (*op.words(1, 3), parse_pair(op.texts[3], op.constants)), multiply_wide)


@register(FACTORIES, "LEA")
def _make_shift_add(op: Operands) -> SassSemantics:
    carry_texts, input_texts = op.split_carries()
    is_high, is_signed = "HI" in op.modifiers, "SX32" in op.modifiers
    carries = [parse_predicate(input_texts.pop())] if "X" in op.modifiers else []
    shift = np.uint64(int(input_texts.pop(), 16))
    count = len(input_texts)

    def shift_and_add(*inputs: Array) -> Sequence[Array]:
        a, b = inputs[0], inputs[1]
        if not is_high:
            shifted = zero_extend(low_words(zero_extend(a) << shift))
        elif is_signed:
            shifted = zero_extend(high_words(sign_extend(a).astype(np.uint64) << shift))
        else:
            shifted = zero_extend(high_words((zero_extend(a) | zero_extend(inputs[2]) << np.uint64(32)) << shift))
        total = reduce(operator.add, (zero_extend(value) for value in inputs[count:]), shifted + zero_extend(b))
        return [low_words(total), *(total >> np.uint64(32) != 0 for _ in carry_texts)]

    results = op.register(0), *map(parse_register, carry_texts)
    return SassSemantics(results, (*op.parse_words(input_texts), *carries), shift_and_add)


@register(FACTORIES, "SHF")
def _make_shift(op: Operands) -> SassSemantics:
    is_left, is_high, is_signed = "L" in op.modifiers, "HI" in op.modifiers, bool({"S32", "S64"} & {*op.modifiers})

    def shift(low_half: Array, shift_counts: Array, high_half: Array) -> Sequence[Array]:
        wide_value = zero_extend(low_half) | zero_extend(high_half) << np.uint64(32)
        counts = zero_extend(shift_counts & np.uint32(63))
        if is_left:
            shifted = wide_value << counts
        elif is_signed:
            shifted = (wide_value.view(np.int64) >> counts.view(np.int64)).view(np.uint64)
        else:
            shifted = wide_value >> counts
        return [high_words(shifted) if is_high else low_words(shifted)]

    return SassSemantics((op.register(0),), op.words(1, 4), shift)


@register(FACTORIES, "VIMNMX", "IMNMX", "VIADDMNMX")
def _make_min_or_max(op: Operands) -> SassSemantics:
    widen = zero_extend if "U32" in op.modifiers else sign_extend
    values = [text for text in op.texts[1:-1] if not is_predicate(text)]

    def clamp(*inputs: Array) -> Sequence[Array]:
        *terms, bound, takes_min = inputs
        a, b = widen(reduce(operator.add, terms)), widen(bound)
        return [low_words(np.where(takes_min, np.minimum(a, b), np.maximum(a, b)))]

    return SassSemantics((op.register(0),), (*op.parse_words(values), parse_predicate(op.texts[-1])), clamp)


@register(FACTORIES, "IABS")
def _make_absolute(op: Operands) -> SassSemantics:
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [low_words(np.abs(sign_extend(a)))])


@register(FACTORIES, "IDP")
def _make_dot(op: Operands) -> SassSemantics | None:
    """Return the dot product of a word's two halves and two bytes of another word, plus the third operand."""
    if op.modifiers != ("2A", "LO", "U16", "U8"):
        return None

    def dot(a: Array, b: Array, c: Array) -> Sequence[Array]:
        low_product = (a & np.uint32(0xFFFF)) * (b & np.uint32(0xFF))
        return [low_product + (a >> np.uint32(16)) * (b >> np.uint32(8) & np.uint32(0xFF)) + c]

    return SassSemantics((op.register(0),), op.words(1, 4), dot)
