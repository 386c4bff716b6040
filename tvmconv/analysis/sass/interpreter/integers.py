"""Semantics of SASS integer instructions, with which kernels compute addresses and branch conditions.

The semantics are those of the corresponding PTX instructions (PTX ISA, "Integer Arithmetic Instructions", "Logic and
Shift Instructions"). CUDA Binary Utilities, "Instruction Set Reference", explains the opcodes. Undocumented behavior
was found by executing kernels and comparing their accesses with those of the TIR, and with the counters of GPUs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tvmconv.analysis.sass.interpreter.operands import (
    Constants,
    is_predicate,
    parse_pair,
    parse_predicate,
    parse_register,
    parse_word,
)
from tvmconv.analysis.sass.interpreter.semantics import (
    Array,
    SassSemantics,
    SemanticsFactories,
    high_words,
    low_words,
    parse_register_pair,
    parse_words,
    register_semantics,
    split_words,
    to_int64,
    to_uint64,
)
from tvmconv.compiler.sass_listing import SassInstruction

SEMANTICS_FACTORIES: SemanticsFactories = {}


def _split_carries(operands: list[str]) -> tuple[list[str], list[str]]:
    """Return the predicates after the result, which receive the carries, and the operands after them."""
    num_carries = next((index for index, text in enumerate(operands[1:]) if not is_predicate(text)), 0)
    return operands[1 : 1 + num_carries], operands[1 + num_carries :]


@register_semantics(SEMANTICS_FACTORIES, "IADD3", "VIADD", "IADD")
def _make_add(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    carry_texts, input_texts = _split_carries(operands)
    writes: tuple[int | None, ...]
    if "64" in instruction.modifiers:
        if carry_texts:
            return None
        pairs = tuple(parse_pair(text, constants) for text in input_texts)
        writes = parse_register_pair(operands[0])
        return SassSemantics(writes, pairs, lambda *terms: split_words(reduce(operator.add, terms)))
    value_texts = [text for text in input_texts if not is_predicate(text)]
    carry_operands = [parse_predicate(text) for text in input_texts if is_predicate(text)]
    if "X" not in instruction.modifiers:
        carry_operands = []
    # The carry of a subtraction is that of the addition of the complement.
    is_negated = np.array([text.startswith(("-R", "-UR")) for text in value_texts])
    unsigned_texts = [text.lstrip("-") if sign else text for text, sign in zip(value_texts, is_negated, strict=True)]
    input_words = parse_words(unsigned_texts, constants)
    writes = (parse_register(operands[0]), *map(parse_register, carry_texts))
    word_range = np.uint64(1 << 32)

    def add(*inputs: Array) -> Sequence[Array]:
        if not carry_texts and not carry_operands and not is_negated.any():
            return [reduce(operator.add, inputs)]
        terms = [
            word_range - to_uint64(value) if negated else to_uint64(value)
            for value, negated in zip(inputs[: len(value_texts)], is_negated, strict=True)
        ]
        total = reduce(operator.add, [*terms, *map(to_uint64, inputs[len(value_texts) :])])
        return [low_words(total), *(total >> np.uint64(32 + index) != 0 for index in range(len(carry_texts)))]

    return SassSemantics(writes, (*input_words, *carry_operands), add)


@register_semantics(SEMANTICS_FACTORIES, "IMAD")
def _make_multiply_add(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    is_wide, is_high = "WIDE" in instruction.modifiers, "HI" in instruction.modifiers
    if is_predicate(operands[1]):
        return None
    factors = parse_words(operands[1:3], constants)
    if not is_wide and not is_high:
        carry_texts = operands[4:] if "X" in instruction.modifiers else []
        carry_operands = map(parse_predicate, carry_texts)
        sources = (*factors, parse_word(operands[3], constants), *carry_operands)

        def multiply_low(a: Array, b: Array, c: Array, *carry: Array) -> Sequence[Array]:
            return [reduce(operator.add, (carry_value.astype(np.uint32) for carry_value in carry), a * b + c)]

        return SassSemantics((parse_register(operands[0]),), sources, multiply_low)
    widen = to_uint64 if "U32" in instruction.modifiers else to_int64

    def multiply_wide(a: Array, b: Array, c: Array) -> Sequence[Array]:
        product = (widen(a) * widen(b)).astype(np.uint64) + c
        return split_words(product) if is_wide else [high_words(product)]

    writes = parse_register_pair(operands[0]) if is_wide else (parse_register(operands[0]),)
    return SassSemantics(writes, (*factors, parse_pair(operands[3], constants)), multiply_wide)


@register_semantics(SEMANTICS_FACTORIES, "LEA")
def _make_shift_add(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    carry_texts, input_texts = _split_carries(operands)
    is_high, is_signed = "HI" in instruction.modifiers, "SX32" in instruction.modifiers
    carry_operands = [parse_predicate(input_texts.pop())] if "X" in instruction.modifiers else []
    shift = np.uint64(int(input_texts.pop(), 16))
    sources = (*parse_words(input_texts, constants), *carry_operands)
    count = len(input_texts)

    def shift_and_add(*inputs: Array) -> Sequence[Array]:
        a, b = inputs[0], inputs[1]
        if not is_high:
            shifted = to_uint64(low_words(to_uint64(a) << shift))
        elif is_signed:
            shifted = to_uint64(high_words(to_int64(a).astype(np.uint64) << shift))
        else:
            shifted = to_uint64(high_words((to_uint64(a) | to_uint64(inputs[2]) << np.uint64(32)) << shift))
        total = reduce(operator.add, (to_uint64(value) for value in inputs[count:]), shifted + to_uint64(b))
        return [low_words(total), *(total >> np.uint64(32) != 0 for _ in carry_texts)]

    writes = (parse_register(operands[0]), *map(parse_register, carry_texts))
    return SassSemantics(writes, sources, shift_and_add)


@register_semantics(SEMANTICS_FACTORIES, "SHF")
def _make_shift(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    is_left, is_high = "L" in instruction.modifiers, "HI" in instruction.modifiers
    is_signed = "S32" in instruction.modifiers or "S64" in instruction.modifiers

    def shift(low_half: Array, shift_counts: Array, high_half: Array) -> Sequence[Array]:
        wide_value = to_uint64(low_half) | to_uint64(high_half) << np.uint64(32)
        counts = to_uint64(shift_counts & np.uint32(63))
        if is_left:
            shifted = wide_value << counts
        elif is_signed:
            shifted = (wide_value.view(np.int64) >> counts.view(np.int64)).view(np.uint64)
        else:
            shifted = wide_value >> counts
        return [high_words(shifted) if is_high else low_words(shifted)]

    return SassSemantics((parse_register(operands[0]),), parse_words(operands[1:4], constants), shift)


@register_semantics(SEMANTICS_FACTORIES, "LOP3")
def _make_logic(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    writes: tuple[int | None, ...] = (parse_register(operands[0]),)
    if is_predicate(operands[0]):
        writes, operands = (parse_register(operands[1]), parse_register(operands[0])), operands[1:]
    table = int(operands[4], 16)

    def logic(a: Array, b: Array, c: Array) -> Sequence[Array]:
        result = evaluate_lut(table, a, b, c)
        return [result, result != 0][: len(writes)]

    return SassSemantics(writes, parse_words(operands[1:4], constants), logic)


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


@register_semantics(SEMANTICS_FACTORIES, "PLOP3")
def _make_predicate_logic(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    luts = [int(lut_text, 16) for lut_text in operands[5:7]]
    sources = tuple(parse_predicate(text) for text in operands[2:5])
    writes = (parse_register(operands[0]), parse_register(operands[1]))
    return SassSemantics(writes, sources, lambda a, b, c: [evaluate_lut(lut, a, b, c) for lut in luts])


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_COMBINERS: dict[str, Callable[[Any, Any], Any]] = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}


@register_semantics(SEMANTICS_FACTORIES, "ISETP")
def _make_compare(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    compare = next((_COMPARISONS[modifier] for modifier in instruction.modifiers if modifier in _COMPARISONS), None)
    join = next((_COMBINERS[modifier] for modifier in instruction.modifiers if modifier in _COMBINERS), None)
    if compare is None or join is None or {"EX", "64"} & set(instruction.modifiers):
        return None
    widen = to_uint64 if "U32" in instruction.modifiers else to_int64
    sources = (*parse_words(operands[2:4], constants), parse_predicate(operands[4]))

    def setp(a: Array, b: Array, accumulated: Array) -> Sequence[Array]:
        result = compare(widen(a), widen(b))
        return [join(result, accumulated), join(~result, accumulated)]

    return SassSemantics((parse_register(operands[0]), parse_register(operands[1])), sources, setp)


def _select_values(a: Array, b: Array, condition: Array) -> Sequence[Array]:
    return [np.asarray(np.where(condition, a, b))]


@register_semantics(SEMANTICS_FACTORIES, "SEL")
def _make_select(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    if "64" in instruction.modifiers:
        return None
    sources = (*parse_words(operands[1:3], constants), parse_predicate(operands[3]))
    return SassSemantics((parse_register(operands[0]),), sources, _select_values)


@register_semantics(SEMANTICS_FACTORIES, "PRMT")
def _make_permute(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    if instruction.modifiers:
        return None

    def permute(a: Array, selector: Array, c: Array) -> Sequence[Array]:
        wide_value = to_uint64(a) | to_uint64(c) << np.uint64(32)
        result = np.zeros(1, np.uint64)
        for byte_index in range(4):
            selection = to_uint64(selector) >> np.uint64(4 * byte_index)
            byte = wide_value >> ((selection & np.uint64(7)) << np.uint64(3)) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            result = result | np.where(selection & np.uint64(8), sign, byte) << np.uint64(8 * byte_index)
        return [low_words(result)]

    return SassSemantics((parse_register(operands[0]),), parse_words(operands[1:4], constants), permute)


@register_semantics(SEMANTICS_FACTORIES, "VIMNMX", "IMNMX", "VIADDMNMX")
def _min_or_max(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    widen = to_uint64 if "U32" in instruction.modifiers else to_int64
    values = [text for text in operands[1:-1] if not is_predicate(text)]
    sources = (*parse_words(values, constants), parse_predicate(operands[-1]))

    def clamp(*inputs: Array) -> Sequence[Array]:
        *terms, bound, takes_min = inputs
        a, b = widen(reduce(operator.add, terms)), widen(bound)
        return [low_words(np.where(takes_min, np.minimum(a, b), np.maximum(a, b)))]

    return SassSemantics((parse_register(operands[0]),), sources, clamp)


@register_semantics(SEMANTICS_FACTORIES, "IABS")
def _make_absolute(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    sources = parse_words(operands[1:2], constants)
    return SassSemantics((parse_register(operands[0]),), sources, lambda a: [low_words(np.abs(to_int64(a)))])


@register_semantics(SEMANTICS_FACTORIES, "IDP")
def _make_dot(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    """Return the dot product of a word's two halves and two bytes of another word, plus the third operand."""
    if instruction.modifiers != ("2A", "LO", "U16", "U8"):
        return None

    def dot(a: Array, b: Array, c: Array) -> Sequence[Array]:
        low_product = (a & np.uint32(0xFFFF)) * (b & np.uint32(0xFF))
        return [low_product + (a >> np.uint32(16)) * (b >> np.uint32(8) & np.uint32(0xFF)) + c]

    return SassSemantics((parse_register(operands[0]),), parse_words(operands[1:4], constants), dot)
