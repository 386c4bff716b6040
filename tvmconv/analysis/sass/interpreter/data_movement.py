"""Semantics of SASS instructions that move words and predicates: registers, the stack, constants, lanes of a warp."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np

from tvmconv.analysis.sass.interpreter.operands import (
    CONSTANT,
    FIRST_PREDICATE,
    FIRST_STACK_SLOT,
    Constants,
    is_predicate,
    make_stack_operands,
    parse_pair,
    parse_predicate,
    parse_register,
    parse_word,
)
from tvmconv.analysis.sass.interpreter.semantics import (
    Array,
    SassSemantics,
    SemanticsFactories,
    count_registers,
    parse_register_pair,
    parse_words,
    register_semantics,
    split_words,
)
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.target import WARP_SIZE

SEMANTICS_FACTORIES: SemanticsFactories = {}
SPECIAL_REGISTERS = frozenset(
    ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId", "SRZ")
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")


@register_semantics(SEMANTICS_FACTORIES, "MOV")
def _make_mov(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    if "64" in instruction.modifiers:
        return SassSemantics(parse_register_pair(operands[0]), (parse_pair(operands[1], constants),), split_words)
    return SassSemantics((parse_register(operands[0]),), parse_words(operands[1:2], constants), lambda a: [a])


@register_semantics(SEMANTICS_FACTORIES, "R2UR")
def _make_to_uniform(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics:
    """Return the value of a warp's first lane; the optional predicate, whether the lanes differ, is false."""
    if is_predicate(operands[0]):
        writes: tuple[int | None, ...] = (parse_register(operands[1]), parse_register(operands[0]))
        sources = parse_words(operands[2:3], constants)
        return SassSemantics(writes, sources, lambda a: [_broadcast_first_lane(a), np.zeros(1, bool)])
    sources = parse_words(operands[1:2], constants)
    return SassSemantics((parse_register(operands[0]),), sources, lambda a: [_broadcast_first_lane(a)])


def _broadcast_first_lane(value: Array) -> Array:
    return value if len(value) == 1 else np.repeat(value[::WARP_SIZE], WARP_SIZE)


@register_semantics(SEMANTICS_FACTORIES, "HFMA2")
def _make_half_constant(
    instruction: SassInstruction, operands: list[str], constants: Constants
) -> SassSemantics | None:
    """Return a float16 pair as a constant, which the compiler writes as a product with zero plus the pair."""
    if operands[1:3] != ["-RZ", "RZ"] or len(operands) != 5:
        return None
    try:
        high_bits, low_bits = (int(np.float16(text).view(np.uint16)) for text in operands[3:])
    except ValueError:
        return None
    constant = np.array([high_bits << 16 | low_bits], np.uint32)
    return SassSemantics((parse_register(operands[0]),), (), lambda: [constant])


@register_semantics(SEMANTICS_FACTORIES, "STL")
def _make_spill(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    slot, first_register = _find_stack_slot(operands[0]), parse_register(operands[1])
    if slot is None or {"U8", "S8", "U16", "S16"} & set(instruction.modifiers):
        return None
    count = count_registers(instruction)
    names = [f"R{first_register + index}" if first_register is not None else operands[1] for index in range(count)]
    sources = parse_words(names, constants)
    return SassSemantics(tuple(range(slot, slot + count)), sources, lambda *values: values)


@register_semantics(SEMANTICS_FACTORIES, "LDL")
def _make_fill(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    slot, first_register = _find_stack_slot(operands[1]), parse_register(operands[0])
    if slot is None or first_register is None or {"U8", "S8", "U16", "S16"} & set(instruction.modifiers):
        return None
    count = count_registers(instruction)
    return SassSemantics(
        tuple(range(first_register, first_register + count)), make_stack_operands(slot, count), lambda *values: values
    )


def _find_stack_slot(address: str) -> int | None:
    """Return the number that stands for a word of the stack, to which registers are spilled."""
    match = _STACK.fullmatch(address)
    return FIRST_STACK_SLOT + int(match[1] or "0", 16) // 4 if match else None


def _find_byte_bit(modifiers: Iterable[str]) -> int:
    """Return the first bit of the byte that a modifier such as B1 names."""
    return next((8 * int(modifier[1]) for modifier in modifiers if modifier in ("B1", "B2", "B3")), 0)


@register_semantics(SEMANTICS_FACTORIES, "P2R", "UP2UR")
def _make_pack(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    """Pack predicates into the bits of a byte; a mask selects them, and another word provides the other bits."""
    if parse_register(operands[0]) is None:
        return None
    prefix = "UP" if operands[1] == "UPR" else "P"
    mask, first_bit = int(operands[3], 16), _find_byte_bit(instruction.modifiers)
    names = (f"{prefix}{index}" if mask >> index & 1 else "!PT" for index in range(7))
    sources = tuple(map(parse_predicate, names))

    def pack(previous: Array, *bits: Array) -> Sequence[Array]:
        shifted_bits = (bit.astype(np.uint32) << np.uint32(index) for index, bit in enumerate(bits))
        packed_bits = reduce(operator.or_, shifted_bits)
        return [previous & np.uint32(~(mask << first_bit) & 0xFFFFFFFF) | packed_bits << np.uint32(first_bit)]

    return SassSemantics((parse_register(operands[0]),), (parse_word(operands[2], constants), *sources), pack)


@register_semantics(SEMANTICS_FACTORIES, "R2P")
def _make_unpack(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    """Unpack predicates from the bits of a byte; a mask selects them, and the other predicates stay."""
    match operands:
        case ["PR", source, bits]:
            mask, (source, *modifiers) = int(bits, 16), source.split(".")
        case _:
            return None
    if set(modifiers) - {"reuse", "B0", "B1", "B2", "B3"}:
        return None
    first_bit = _find_byte_bit(modifiers)
    predicate_indices = [index for index in range(7) if mask >> index & 1]

    def unpack(value: Array) -> Sequence[Array]:
        return [value >> np.uint32(first_bit + index) & np.uint32(1) != 0 for index in predicate_indices]

    written = tuple(FIRST_PREDICATE + index for index in predicate_indices)
    return SassSemantics(written, parse_words([source], constants), unpack)


@register_semantics(SEMANTICS_FACTORIES, "LDC", "LDCU")
def _make_constant_load(
    instruction: SassInstruction, operands: list[str], constants: Constants
) -> SassSemantics | None:
    first_register, match = parse_register(operands[0]), CONSTANT.fullmatch(operands[1])
    if first_register is None or match is None:
        return None
    offsets = (int(match[2], 16) + 4 * index for index in range(count_registers(instruction)))
    constant_texts = [f"c[{match[1]}][{offset:#x}]" for offset in offsets]
    return SassSemantics(
        tuple(range(first_register, first_register + len(constant_texts))),
        parse_words(constant_texts, constants),
        lambda *values: values,
    )


@register_semantics(SEMANTICS_FACTORIES, "VOTE", "VOTEU")
def _make_vote(instruction: SassInstruction, operands: list[str], constants: Constants) -> SassSemantics | None:
    vote_mode = next((modifier for modifier in instruction.modifiers if modifier in ("ALL", "ANY")), None)
    if vote_mode is None or len(operands) != 2:
        return None

    def vote(value: Array) -> Sequence[Array]:
        if len(value) == 1:
            return [value]
        votes_by_warp = value.reshape(-1, WARP_SIZE)
        return [np.repeat(votes_by_warp.all(axis=1) if vote_mode == "ALL" else votes_by_warp.any(axis=1), WARP_SIZE)]

    return SassSemantics((parse_register(operands[0]),), (parse_predicate(operands[1]),), vote)


@register_semantics(SEMANTICS_FACTORIES, "SYNCS")
def _make_mbarrier_check(
    instruction: SassInstruction, operands: list[str], constants: Constants
) -> SassSemantics | None:
    """Treat every phase of an mbarrier as completed."""
    if "PHASECHK" not in instruction.modifiers:
        return None
    return SassSemantics((parse_register(operands[0]),), (), lambda: [np.ones(1, bool)])


def make_special_read(operands: list[str], special_registers: Mapping[str, Array], *, is_wide: bool) -> SassSemantics:
    """Return the semantics that read a special register."""
    writes = parse_register_pair(operands[0]) if is_wide else (parse_register(operands[0]),)
    name = operands[1]
    is_known = name in SPECIAL_REGISTERS
    return SassSemantics(writes, (), (lambda: [special_registers[name]] * len(writes)) if is_known else None)
