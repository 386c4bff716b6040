"""Semantics of SASS instructions that compute addresses and branch conditions, by opcode.

The semantics of integer instructions are those of the corresponding PTX instructions (PTX ISA, "Integer Arithmetic
Instructions", "Logic and Shift Instructions"). CUDA Binary Utilities, "Instruction Set Reference", explains the
opcodes. Undocumented behavior was found by executing kernels and comparing their accesses with those of the TIR, and
with the counters of GPUs. An unsupported instruction writes unknown values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.sass.interpreter.operands import (
    CONSTANT,
    FIRST_PREDICATE,
    FIRST_STACK_SLOT,
    Constants,
    OperandReader,
    is_predicate,
    make_register_reader,
    parse_pair,
    parse_predicate,
    parse_register,
    parse_word,
)
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.target import WARP_SIZE

Array = NDArray[Any]
SPECIAL_REGISTERS = frozenset(
    ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId", "SRZ")
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_SUBWORDS = frozenset({"U8", "S8", "U16", "S16"})


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
_FACTORIES: dict[str, SemanticsFactory] = {}  # by opcode


def make_semantics(
    instruction: SassInstruction, constants: Constants, special_registers: Mapping[str, Array]
) -> SassSemantics:
    """Return the semantics of an instruction that does not branch.

    The values of the special registers are filled in before the execution.
    """
    texts = instruction.operands.split(", ") if instruction.operands else []
    opcode = instruction.opcode
    factory = _FACTORIES.get(opcode) or _FACTORIES.get(opcode[1:] if opcode[0] == "U" else opcode)
    semantics = factory(Operands(instruction, texts, constants, special_registers)) if factory else None
    return semantics or _make_unknown(instruction, texts)


def _make_unknown(instruction: SassInstruction, texts: Sequence[str]) -> SassSemantics:
    """Return semantics that write unknown values to the first operands and the registers after them."""
    if texts[:1] == ["PR"]:
        return SassSemantics(tuple(range(FIRST_PREDICATE, FIRST_PREDICATE + 7)), (), None)
    written_registers: list[int | None] = []
    for text in texts[:2]:
        register_number = parse_register(text)
        is_constant = register_number is None and text not in ("PT", "UPT", "RZ", "URZ")
        if text.startswith(("!", "-", "~", "[")) or is_constant:
            break
        if register_number is not None:
            count = 1 if register_number >= FIRST_PREDICATE else count_registers(instruction)
            written_registers += range(register_number, register_number + count)
        if not is_predicate(text):
            break
    return SassSemantics(tuple(written_registers), (), None)


def count_registers(instruction: SassInstruction) -> int:
    """Return the number of registers that an instruction writes, or that it stores."""
    if "128" in instruction.modifiers or instruction.opcode in ("LDSM", "HMMA", "TEX"):
        return 4
    is_wide = "64" in instruction.modifiers or "WIDE" in instruction.modifiers or instruction.opcode[0] == "D"
    return 2 if is_wide else 1


def _register(*opcodes: str) -> Callable[[SemanticsFactory], SemanticsFactory]:
    """Register the decorated function for some opcodes, and for their uniform variants with the prefix U."""

    def register_factory(factory: SemanticsFactory) -> SemanticsFactory:
        _FACTORIES.update(dict.fromkeys(opcodes, factory))
        return factory

    return register_factory


def _zero_extend(value: Array) -> Array:
    return value.astype(np.uint64)


def _sign_extend(value: Array) -> Array:
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def _low_words(value: Array) -> Array:
    return value.astype(np.uint32)


def _high_words(value: Array) -> Array:
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def _split_words(value: Array) -> Sequence[Array]:
    return [_low_words(value), _high_words(value)]


# Integer arithmetic.


@_register("IADD3", "VIADD", "IADD")
def _make_add(op: Operands) -> SassSemantics | None:
    carry_texts, input_texts = op.split_carries()
    if "64" in op.modifiers:
        if carry_texts:
            return None
        pairs = tuple(parse_pair(text, op.constants) for text in input_texts)
        return SassSemantics(op.register_pair(0), pairs, lambda *terms: _split_words(reduce(operator.add, terms)))
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
            word_range - _zero_extend(value) if negated else _zero_extend(value)
            for value, negated in zip(inputs[: len(value_texts)], is_negated, strict=True)
        ]
        total = reduce(operator.add, [*terms, *map(_zero_extend, inputs[len(value_texts) :])])
        return [_low_words(total), *(total >> np.uint64(32 + index) != 0 for index in range(len(carry_texts)))]

    results = op.register(0), *map(parse_register, carry_texts)
    return SassSemantics(results, (*op.parse_words(unsigned_texts), *carries), add)


@_register("IMAD")
def _make_multiply_add(op: Operands) -> SassSemantics | None:
    is_wide, is_high = "WIDE" in op.modifiers, "HI" in op.modifiers
    if is_predicate(op.texts[1]):
        return None
    if not is_wide and not is_high:
        carries = map(parse_predicate, op.texts[4:] if "X" in op.modifiers else [])

        def multiply_low(a: Array, b: Array, c: Array, *carry: Array) -> Sequence[Array]:
            return [reduce(operator.add, (carry_value.astype(np.uint32) for carry_value in carry), a * b + c)]

        return SassSemantics((op.register(0),), (*op.words(1, 4), *carries), multiply_low)
    widen = _zero_extend if "U32" in op.modifiers else _sign_extend

    def multiply_wide(a: Array, b: Array, c: Array) -> Sequence[Array]:
        product = (widen(a) * widen(b)).astype(np.uint64) + c
        return _split_words(product) if is_wide else [_high_words(product)]

    results = op.register_pair(0) if is_wide else (op.register(0),)
    return SassSemantics(results, (*op.words(1, 3), parse_pair(op.texts[3], op.constants)), multiply_wide)


@_register("LEA")
def _make_shift_add(op: Operands) -> SassSemantics:
    carry_texts, input_texts = op.split_carries()
    is_high, is_signed = "HI" in op.modifiers, "SX32" in op.modifiers
    carries = [parse_predicate(input_texts.pop())] if "X" in op.modifiers else []
    shift = np.uint64(int(input_texts.pop(), 16))
    count = len(input_texts)

    def shift_and_add(*inputs: Array) -> Sequence[Array]:
        a, b = inputs[0], inputs[1]
        if not is_high:
            shifted = _zero_extend(_low_words(_zero_extend(a) << shift))
        elif is_signed:
            shifted = _zero_extend(_high_words(_sign_extend(a).astype(np.uint64) << shift))
        else:
            shifted = _zero_extend(_high_words((_zero_extend(a) | _zero_extend(inputs[2]) << np.uint64(32)) << shift))
        total = reduce(operator.add, (_zero_extend(value) for value in inputs[count:]), shifted + _zero_extend(b))
        return [_low_words(total), *(total >> np.uint64(32) != 0 for _ in carry_texts)]

    results = op.register(0), *map(parse_register, carry_texts)
    return SassSemantics(results, (*op.parse_words(input_texts), *carries), shift_and_add)


@_register("SHF")
def _make_shift(op: Operands) -> SassSemantics:
    is_left, is_high, is_signed = "L" in op.modifiers, "HI" in op.modifiers, bool({"S32", "S64"} & {*op.modifiers})

    def shift(low_half: Array, shift_counts: Array, high_half: Array) -> Sequence[Array]:
        wide_value = _zero_extend(low_half) | _zero_extend(high_half) << np.uint64(32)
        counts = _zero_extend(shift_counts & np.uint32(63))
        if is_left:
            shifted = wide_value << counts
        elif is_signed:
            shifted = (wide_value.view(np.int64) >> counts.view(np.int64)).view(np.uint64)
        else:
            shifted = wide_value >> counts
        return [_high_words(shifted) if is_high else _low_words(shifted)]

    return SassSemantics((op.register(0),), op.words(1, 4), shift)


@_register("VIMNMX", "IMNMX", "VIADDMNMX")
def _make_min_or_max(op: Operands) -> SassSemantics:
    widen = _zero_extend if "U32" in op.modifiers else _sign_extend
    values = [text for text in op.texts[1:-1] if not is_predicate(text)]

    def clamp(*inputs: Array) -> Sequence[Array]:
        *terms, bound, takes_min = inputs
        a, b = widen(reduce(operator.add, terms)), widen(bound)
        return [_low_words(np.where(takes_min, np.minimum(a, b), np.maximum(a, b)))]

    return SassSemantics((op.register(0),), (*op.parse_words(values), parse_predicate(op.texts[-1])), clamp)


@_register("IABS")
def _make_absolute(op: Operands) -> SassSemantics:
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [_low_words(np.abs(_sign_extend(a)))])


@_register("IDP")
def _make_dot(op: Operands) -> SassSemantics | None:
    """Return the dot product of a word's two halves and two bytes of another word, plus the third operand."""
    if op.modifiers != ("2A", "LO", "U16", "U8"):
        return None

    def dot(a: Array, b: Array, c: Array) -> Sequence[Array]:
        low_product = (a & np.uint32(0xFFFF)) * (b & np.uint32(0xFF))
        return [low_product + (a >> np.uint32(16)) * (b >> np.uint32(8) & np.uint32(0xFF)) + c]

    return SassSemantics((op.register(0),), op.words(1, 4), dot)


# Logic, comparison and selection.


@_register("LOP3")
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


@_register("PLOP3")
def _make_predicate_logic(op: Operands) -> SassSemantics:
    luts = [int(lut_text, 16) for lut_text in op.texts[5:7]]
    sources, results = tuple(map(parse_predicate, op.texts[2:5])), (op.register(0), op.register(1))
    return SassSemantics(results, sources, lambda a, b, c: [evaluate_lut(lut, a, b, c) for lut in luts])


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq},
    "NE": operator.ne,
}
_COMBINERS: dict[str, Callable[[Any, Any], Any]] = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}


@_register("ISETP")
def _make_compare(op: Operands) -> SassSemantics | None:
    compare = next((_COMPARISONS[modifier] for modifier in op.modifiers if modifier in _COMPARISONS), None)
    join = next((_COMBINERS[modifier] for modifier in op.modifiers if modifier in _COMBINERS), None)
    if compare is None or join is None or {"EX", "64"} & {*op.modifiers}:
        return None
    widen = _zero_extend if "U32" in op.modifiers else _sign_extend

    def setp(a: Array, b: Array, accumulated: Array) -> Sequence[Array]:
        result = compare(widen(a), widen(b))
        return [join(result, accumulated), join(~result, accumulated)]

    sources = *op.words(2, 4), parse_predicate(op.texts[4])
    return SassSemantics((op.register(0), op.register(1)), sources, setp)


@_register("SEL")
def _make_select(op: Operands) -> SassSemantics | None:
    if "64" in op.modifiers:
        return None
    sources = *op.words(1, 3), parse_predicate(op.texts[3])
    return SassSemantics((op.register(0),), sources, lambda a, b, condition: [np.asarray(np.where(condition, a, b))])


@_register("PRMT")
def _make_permute(op: Operands) -> SassSemantics | None:
    if op.modifiers:
        return None

    def permute(a: Array, selector: Array, c: Array) -> Sequence[Array]:
        wide_value = _zero_extend(a) | _zero_extend(c) << np.uint64(32)
        result = np.zeros(1, np.uint64)
        for byte_index in range(4):
            selection = _zero_extend(selector) >> np.uint64(4 * byte_index)
            byte = wide_value >> ((selection & np.uint64(7)) << np.uint64(3)) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            result = result | np.where(selection & np.uint64(8), sign, byte) << np.uint64(8 * byte_index)
        return [_low_words(result)]

    return SassSemantics((op.register(0),), op.words(1, 4), permute)


# Moves between registers, the stack, constants, and the lanes of a warp.


@_register("MOV")
def _make_mov(op: Operands) -> SassSemantics:
    if "64" in op.modifiers:
        return SassSemantics(op.register_pair(0), (parse_pair(op.texts[1], op.constants),), _split_words)
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [a])


@_register("R2UR")
def _make_to_uniform(op: Operands) -> SassSemantics:
    """Return the value of a warp's first lane; the optional predicate, whether the lanes differ, is false."""
    if is_predicate(op.texts[0]):
        results = op.register(1), op.register(0)
        return SassSemantics(results, op.words(2, 3), lambda a: [_broadcast_first_lane(a), np.zeros(1, bool)])
    return SassSemantics((op.register(0),), op.words(1, 2), lambda a: [_broadcast_first_lane(a)])


def _broadcast_first_lane(value: Array) -> Array:
    return value if len(value) == 1 else np.repeat(value[::WARP_SIZE], WARP_SIZE)


@_register("HFMA2")
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


@_register("STL")
def _make_spill(op: Operands) -> SassSemantics | None:
    slot, first_register = _find_stack_slot(op.texts[0]), op.register(1)
    if slot is None or _SUBWORDS & {*op.modifiers}:
        return None
    count = count_registers(op.instruction)
    names = [f"R{first_register + index}" if first_register is not None else op.texts[1] for index in range(count)]
    return SassSemantics(tuple(range(slot, slot + count)), op.parse_words(names), lambda *values: values)


@_register("LDL")
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


@_register("P2R", "UP2UR")
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


@_register("R2P")
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


@_register("LDC", "LDCU")
def _make_constant_load(op: Operands) -> SassSemantics | None:
    first_register, match = op.register(0), CONSTANT.fullmatch(op.texts[1])
    if first_register is None or match is None:
        return None
    count = count_registers(op.instruction)
    words = op.parse_words(f"c[{match[1]}][{int(match[2], 16) + 4 * index:#x}]" for index in range(count))
    return SassSemantics(tuple(range(first_register, first_register + count)), words, lambda *values: values)


@_register("VOTE", "VOTEU")
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


@_register("SYNCS")
def _make_mbarrier_check(op: Operands) -> SassSemantics | None:
    """Treat every phase of an mbarrier as completed."""
    if "PHASECHK" not in op.modifiers:
        return None
    return SassSemantics((op.register(0),), (), lambda: [np.ones(1, bool)])


@_register("ELECT")
def _make_elect(op: Operands) -> SassSemantics:
    """Elect one thread of each warp, here the first."""
    return SassSemantics((op.register(0),), (), lambda: [op.special_registers["SR_LANEID"] == 0])


@_register("S2R", "S2UR", "CS2R")
def _make_special_read(op: Operands) -> SassSemantics:
    is_wide = op.instruction.opcode == "CS2R" and "32" not in op.modifiers
    results = op.register_pair(0) if is_wide else (op.register(0),)
    name = op.texts[1]
    if name not in SPECIAL_REGISTERS:
        return SassSemantics(results, (), None)
    return SassSemantics(results, (), lambda: [op.special_registers[name]] * len(results))
