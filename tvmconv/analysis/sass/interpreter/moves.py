"""Semantics of SASS instructions that move values between registers, the stack, constants and lanes, by opcode."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from tvmconv.analysis.sass.interpreter.instruction import (
    Array,
    Operands,
    SassSemantics,
    SemanticsFactory,
    count_registers,
    register,
    split_words,
)
from tvmconv.analysis.sass.interpreter.operands import (
    CONSTANT,
    FIRST_PREDICATE,
    FIRST_STACK_SLOT,
    is_predicate,
    make_register_reader,
    parse_pair,
    parse_predicate,
)
from tvmconv.target import WARP_SIZE

SPECIAL_REGISTERS = frozenset(
    ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId", "SRZ")
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_SUBWORDS = frozenset({"U8", "S8", "U16", "S16"})

FACTORIES: dict[str, SemanticsFactory] = {}  # by opcode


@register(FACTORIES, "MOV")
def _make_mov(op: Operands) -> SassSemantics:
    if "64" in op.modifiers:
        return SassSemantics(op.register_pair(0), (parse_pair(op.texts[1], op.constants),), split_words)
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [a])


@register(FACTORIES, "R2UR")
def _make_to_uniform(op: Operands) -> SassSemantics:
    """Return the value of a warp's first lane; the optional predicate, whether the lanes differ, is false."""
    if is_predicate(op.texts[0]):
        results = op.register(1), op.register(0)
        return SassSemantics(results, op.words(2, 3), lambda a: [_broadcast_first_lane(a), np.zeros(1, bool)])
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [_broadcast_first_lane(a)])


def _broadcast_first_lane(value: Array) -> Array:
    return value if len(value) == 1 else np.repeat(value[::WARP_SIZE], WARP_SIZE)


@register(FACTORIES, "HFMA2")
def _make_half_constant(op: Operands) -> SassSemantics | None:
    """Return a float16 pair as a constant, which the compiler writes as a product with zero plus the pair."""
    if op.texts[1:3] != ["-RZ", "RZ"] or len(op.texts) != 5:
        return None
    try:
        high_bits, low_bits = (int(np.float16(text).view(np.uint16)) for text in op.texts[3:])
    except ValueError:
        return None
    constant = np.array([high_bits << 16 | low_bits], np.uint32)
    return SassSemantics((op.register(0),), (), lambda: [constant])


@register(FACTORIES, "STL")
def _make_spill(op: Operands) -> SassSemantics | None:
    slot, first_register = _find_stack_slot(op.texts[0]), op.register(1)
    if slot is None or _SUBWORDS & {*op.modifiers}:
        return None
    count = count_registers(op.instruction)
    names = [f"R{first_register + index}" if first_register is not None else op.texts[1] for index in range(count)]
    return SassSemantics(tuple(range(slot, slot + count)), op.parse_words(names), lambda *values: values)


@register(FACTORIES, "LDL")
def _make_fill(op: Operands) -> SassSemantics | None:
    slot, first_register = _find_stack_slot(op.texts[1]), op.register(0)
    if slot is None or first_register is None or _SUBWORDS & {*op.modifiers}:
        return None
    count = count_registers(op.instruction)
    results = tuple(range(first_register, first_register + count))
    return SassSemantics(results, tuple(map(make_register_reader, range(slot, slot + count))), lambda *values: values)


def _find_stack_slot(address: str) -> int | None:
    """Return the number that stands for a word of the stack, to which registers are spilled."""
    match = _STACK.fullmatch(address)
    return FIRST_STACK_SLOT + int(match[1] or "0", 16) // 4 if match else None


def _find_byte_bit(modifiers: Iterable[str]) -> int:
    return next((8 * int(modifier[1]) for modifier in modifiers if modifier in ("B1", "B2", "B3")), 0)


@register(FACTORIES, "P2R", "UP2UR")
def _make_pack(op: Operands) -> SassSemantics | None:
    """Pack predicates into the bits of a byte; a mask selects them, and another word provides the other bits."""
    if op.register(0) is None:
        return None
    prefix = "UP" if op.texts[1] == "UPR" else "P"
    mask, first_bit = int(op.texts[3], 16), _find_byte_bit(op.modifiers)
    predicates = (parse_predicate(f"{prefix}{index}" if mask >> index & 1 else "!PT") for index in range(7))

    def pack(previous: Array, *bits: Array) -> Sequence[Array]:
        packed_bits = reduce(operator.or_, (bit.astype(np.uint32) << np.uint32(n) for n, bit in enumerate(bits)))
        return [previous & np.uint32(~(mask << first_bit) & 0xFFFFFFFF) | packed_bits << np.uint32(first_bit)]

    return SassSemantics((op.register(0),), (*op.words(2, 3), *predicates), pack)


@register(FACTORIES, "R2P")
def _make_unpack(op: Operands) -> SassSemantics | None:
    """Unpack predicates from the bits of a byte; a mask selects them, and the other predicates stay."""
    if len(op.texts) != 3 or op.texts[0] != "PR":
        return None
    source, *modifiers = op.texts[1].split(".")
    if {*modifiers} - {"reuse", "B0", "B1", "B2", "B3"}:
        return None
    mask, first_bit = int(op.texts[2], 16), _find_byte_bit(modifiers)
    predicate_indices = [index for index in range(7) if mask >> index & 1]

    def unpack(value: Array) -> Sequence[Array]:
        return [value >> np.uint32(first_bit + index) & np.uint32(1) != 0 for index in predicate_indices]

    results = tuple(FIRST_PREDICATE + index for index in predicate_indices)
    return SassSemantics(results, op.parse_words([source]), unpack)


@register(FACTORIES, "LDC", "LDCU")
def _make_constant_load(op: Operands) -> SassSemantics | None:
    first_register, match = op.register(0), CONSTANT.fullmatch(op.texts[1])
    if first_register is None or match is None:
        return None
    count = count_registers(op.instruction)
    words = op.parse_words(f"c[{match[1]}][{int(match[2], 16) + 4 * index:#x}]" for index in range(count))
    return SassSemantics(tuple(range(first_register, first_register + count)), words, lambda *values: values)


@register(FACTORIES, "VOTE", "VOTEU")
def _make_vote(op: Operands) -> SassSemantics | None:
    vote_mode = next((modifier for modifier in op.modifiers if modifier in ("ALL", "ANY")), None)
    if vote_mode is None or len(op.texts) != 2:
        return None

    def vote(value: Array) -> Sequence[Array]:
        if len(value) == 1:
            return [value]
        votes_by_warp = value.reshape(-1, WARP_SIZE)
        return [np.repeat(votes_by_warp.all(axis=1) if vote_mode == "ALL" else votes_by_warp.any(axis=1), WARP_SIZE)]

    return SassSemantics((op.register(0),), (parse_predicate(op.texts[1]),), vote)


@register(FACTORIES, "SYNCS")
def _make_mbarrier_check(op: Operands) -> SassSemantics | None:
    """Treat every phase of an mbarrier as completed."""
    if "PHASECHK" not in op.modifiers:
        return None
    return SassSemantics((op.register(0),), (), lambda: [np.ones(1, bool)])


@register(FACTORIES, "ELECT")
def _make_elect(op: Operands) -> SassSemantics:
    """Elect one thread of each warp, here the first."""
    return SassSemantics((op.register(0),), (), lambda: [op.special_registers["SR_LANEID"] == 0])


@register(FACTORIES, "S2R", "S2UR", "CS2R")
def _make_special_read(op: Operands) -> SassSemantics:
    is_wide = op.instruction.opcode == "CS2R" and "32" not in op.modifiers
    results = op.register_pair(0) if is_wide else (op.register(0),)
    name = op.texts[1]
    if name not in SPECIAL_REGISTERS:
        return SassSemantics(results, (), None)
    return SassSemantics(results, (), lambda: [op.special_registers[name]] * len(results))
