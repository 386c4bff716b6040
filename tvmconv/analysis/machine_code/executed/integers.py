"""What instructions make of integers: the operations that addresses and branches are computed with.

Their meaning is that of PTX's instructions that they are made of (PTX ISA, "Integer Arithmetic Instructions", "Logic
and Shift Instructions"), and of names in CUDA Binary Utilities, "Instruction Set Reference"; what is nowhere written
down was found by executing kernels and comparing what they access with what their TIR does, and with what GPUs count.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.machine_code.executed.operands import (
    CONSTANT,
    LOCAL,
    PREDICATES,
    Constants,
    Source,
    is_predicate,
    pair,
    predicate,
    register,
    slots,
    word,
)
from tvmconv.compiler.listing import Instruction
from tvmconv.gpu import WARP

SPECIAL = frozenset(
    ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId", "SRZ")
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
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


def operation(instruction: Instruction, constants: Constants, special: Mapping[str, Array]) -> Operation:
    """What an instruction computes; something that is not known, where it is none of those that are understood.

    Args:
        instruction: not one that branches.
        constants: the words of the constant banks.
        special: values of the registers that `SPECIAL` names, when it is executed.
    """
    parts = instruction.operands.split(", ") if instruction.operands else []
    opcode = instruction.opcode
    if opcode[0] == "U" and opcode[1:] in _MAKERS:
        opcode = opcode[1:]
    if opcode in ("S2R", "S2UR", "CS2R"):
        return _special(parts, special, wide=opcode == "CS2R" and "32" not in instruction.modifiers)
    if opcode == "ELECT":  # one thread of each warp: the first, say
        return Operation((register(parts[0]),), (), lambda: [special["SR_LANEID"] == 0])
    if opcode in _MAKERS:
        made = _MAKERS[opcode](instruction, parts, constants)
        if made:
            return made
    return unknown(instruction, parts)


def unknown(instruction: Instruction, parts: Sequence[str]) -> Operation:
    """What an instruction writes, of which nothing is known: its first operands, and the registers behind them."""
    found: list[int | None] = []
    for part in parts[:2]:
        number = register(part)
        if part.startswith(("!", "-", "~", "[")) or (number is None and part not in ("PT", "UPT", "RZ", "URZ")):
            break
        if number is not None:
            found += range(number, number + (1 if number >= PREDICATES else _words(instruction)))
        if not is_predicate(part):
            break
    return Operation(tuple(found), (), None)


def _words(instruction: Instruction) -> int:
    if "128" in instruction.modifiers or instruction.opcode in ("LDSM", "HMMA", "TEX"):
        return 4
    wide = "64" in instruction.modifiers or "WIDE" in instruction.modifiers or instruction.opcode[0] == "D"
    return 2 if wide else 1


Maker = Callable[[Instruction, list[str], Constants], "Operation | None"]
_MAKERS: dict[str, Maker] = {}


def _makes(*opcodes: str) -> Callable[[Maker], Maker]:
    def known(maker: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(opcodes, maker))
        return maker

    return known


def _u64(value: Array) -> Array:
    return value.astype(np.uint64)


def _i64(value: Array) -> Array:
    return value.astype(np.uint32).view(np.int32).astype(np.int64)


def _low(value: Array) -> Array:
    return value.astype(np.uint32)


def _high(value: Array) -> Array:
    return (value.astype(np.uint64) >> np.uint64(32)).astype(np.uint32)


def _words_of(parts: Sequence[str], constants: Constants) -> tuple[Source, ...]:
    return tuple(word(part, constants) for part in parts)


def _carries(parts: list[str]) -> tuple[list[str], list[str]]:
    """The predicates behind the result, which take the carry, and the operands behind these."""
    count = next((n for n, part in enumerate(parts[1:]) if not is_predicate(part)), 0)
    return parts[1 : 1 + count], parts[1 + count :]


@_makes("MOV")
def _mov(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if "64" in i.modifiers:
        return Operation(_pair_of(parts[0]), (pair(parts[1], constants),), _split)
    return Operation((register(parts[0]),), _words_of(parts[1:2], constants), lambda a: [a])


def _pair_of(name: str) -> tuple[int | None, int | None]:
    """The two registers of a value of 64 bits."""
    first = register(name)
    return first, None if first is None else first + 1


def _split(value: Array) -> Sequence[Array]:
    return [_low(value), _high(value)]


@_makes("R2UR")
def _to_uniform(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    """The value of a warp's first thread: all have the same; a predicate in front would tell that they do not."""
    if is_predicate(parts[0]):
        writes: tuple[int | None, ...] = (register(parts[1]), register(parts[0]))
        return Operation(writes, _words_of(parts[2:3], constants), lambda a: [_of_warp(a), np.zeros(1, bool)])
    return Operation((register(parts[0]),), _words_of(parts[1:2], constants), lambda a: [_of_warp(a)])


def _of_warp(value: Array) -> Array:
    return value if len(value) == 1 else np.repeat(value[::WARP], WARP)


@_makes("IADD3", "VIADD", "IADD")
def _add(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    out, rest = _carries(parts)
    if "64" in i.modifiers:
        sources = tuple(pair(part, constants) for part in rest)
        return (
            None if out else Operation(_pair_of(parts[0]), sources, lambda *terms: _split(reduce(operator.add, terms)))
        )
    values = [part for part in rest if not is_predicate(part)]
    carried = [predicate(part) for part in rest if is_predicate(part)] if "X" in i.modifiers else []
    # Of a number that is subtracted, the carry is that of the addition of its complement.
    negated = np.array([part.startswith("-R") or part.startswith("-UR") for part in values])
    added = _words_of([part.lstrip("-") if n else part for part, n in zip(values, negated, strict=True)], constants)
    writes = (register(parts[0]), *(register(each) for each in out))
    whole = np.uint64(1 << 32)

    def add(*given: Array) -> Sequence[Array]:
        if not out and not carried and not negated.any():
            return [reduce(operator.add, given)]
        terms = [whole - _u64(v) if n else _u64(v) for v, n in zip(given[: len(values)], negated, strict=True)]
        total = reduce(operator.add, [*terms, *(_u64(each) for each in given[len(values) :])])
        return [_low(total), *(total >> np.uint64(32 + place) != 0 for place in range(len(out)))]

    return Operation(writes, (*added, *carried), add)


@_makes("IMAD")
def _multiply_add(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    wide, high = "WIDE" in i.modifiers, "HI" in i.modifiers
    if is_predicate(parts[1]):
        return None
    factors = _words_of(parts[1:3], constants)
    if not wide and not high:
        carried = [predicate(part) for part in parts[4:]] if "X" in i.modifiers else []
        sources = (*factors, word(parts[3], constants), *carried)

        def low(a: Array, b: Array, c: Array, *carry: Array) -> Sequence[Array]:
            return [reduce(operator.add, (each.astype(np.uint32) for each in carry), a * b + c)]

        return Operation((register(parts[0]),), sources, low)
    widen = _u64 if "U32" in i.modifiers else _i64

    def whole(a: Array, b: Array, c: Array) -> Sequence[Array]:
        product = (widen(a) * widen(b)).astype(np.uint64) + c
        return _split(product) if wide else [_high(product)]

    writes = _pair_of(parts[0]) if wide else (register(parts[0]),)
    return Operation(writes, (*factors, pair(parts[3], constants)), whole)


@_makes("LEA")
def _shift_add(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    out, rest = _carries(parts)
    high, signed = "HI" in i.modifiers, "SX32" in i.modifiers
    carried = [predicate(rest.pop())] if "X" in i.modifiers else []
    shift = np.uint64(int(rest.pop(), 16))
    sources = (*_words_of(rest, constants), *carried)
    count = len(rest)

    def lea(*given: Array) -> Sequence[Array]:
        a, b = given[0], given[1]
        if not high:
            shifted = _u64(_low(_u64(a) << shift))
        else:
            whole = _i64(a).astype(np.uint64) if signed else _u64(a) | _u64(given[2]) << np.uint64(32)
            shifted = _u64(_high(whole << shift))
        total = reduce(operator.add, (_u64(each) for each in given[count:]), shifted + _u64(b))
        return [_low(total), *(total >> np.uint64(32) != 0 for _ in out)]

    return Operation((register(parts[0]), *(register(each) for each in out)), sources, lea)


@_makes("SHF")
def _shift(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    left, high = "L" in i.modifiers, "HI" in i.modifiers
    signed = "S32" in i.modifiers or "S64" in i.modifiers

    def shift(low: Array, by: Array, above: Array) -> Sequence[Array]:
        whole, by = _u64(low) | _u64(above) << np.uint64(32), _u64(by & np.uint32(63))
        if left:
            done = whole << by
        else:
            done = (whole.view(np.int64) >> by.view(np.int64)).view(np.uint64) if signed else whole >> by
        return [_high(done) if high else _low(done)]

    return Operation((register(parts[0]),), _words_of(parts[1:4], constants), shift)


@_makes("LOP3")
def _logic(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    writes: tuple[int | None, ...] = (register(parts[0]),)
    if is_predicate(parts[0]):
        writes, parts = (register(parts[1]), register(parts[0])), parts[1:]
    table = int(parts[4], 16)

    def logic(a: Array, b: Array, c: Array) -> Sequence[Array]:
        found = by_table(table, a, b, c)
        return [found, found != 0][: len(writes)]

    return Operation(writes, _words_of(parts[1:4], constants), logic)


_SIMPLE: dict[int, Callable[[Array, Array, Array], Array]] = {
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


def by_table(table: int, a: Array, b: Array, c: Array) -> Array:
    """What a table of three bits' function, as `lop3` takes it, gives for each bit: bit 4a + 2b + c of the table."""
    if simple := _SIMPLE.get(table):
        return simple(a, b, c)
    terms = [
        (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
        for place in range(8)
        if table >> place & 1
    ]
    return reduce(operator.or_, terms, (a ^ a) & (b ^ b) & (c ^ c))


@_makes("PLOP3")
def _predicate_logic(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    tables = [int(each, 16) for each in parts[5:7]]
    sources = tuple(predicate(part) for part in parts[2:5])
    writes = (register(parts[0]), register(parts[1]))
    return Operation(writes, sources, lambda a, b, c: [by_table(table, a, b, c) for table in tables])


_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_JOINS: dict[str, Callable[[Any, Any], Any]] = {"AND": operator.and_, "OR": operator.or_, "XOR": operator.xor}


@_makes("ISETP")
def _compare(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    compare = next((_COMPARISONS[m] for m in i.modifiers if m in _COMPARISONS), None)
    join = next((_JOINS[m] for m in i.modifiers if m in _JOINS), None)
    if compare is None or join is None or {"EX", "64"} & set(i.modifiers):
        return None
    widen = _u64 if "U32" in i.modifiers else _i64
    sources = (*_words_of(parts[2:4], constants), predicate(parts[4]))

    def setp(a: Array, b: Array, other: Array) -> Sequence[Array]:
        found = compare(widen(a), widen(b))
        return [join(found, other), join(~found, other)]

    return Operation((register(parts[0]), register(parts[1])), sources, setp)


def _selected(a: Array, b: Array, which: Array) -> Sequence[Array]:
    chosen: Array = np.where(which, a, b)
    return [chosen]


@_makes("SEL")
def _select(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if "64" in i.modifiers:
        return None
    sources = (*_words_of(parts[1:3], constants), predicate(parts[3]))
    return Operation((register(parts[0]),), sources, _selected)


@_makes("PRMT")
def _permute(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if i.modifiers:
        return None

    def permute(a: Array, selector: Array, c: Array) -> Sequence[Array]:
        whole = _u64(a) | _u64(c) << np.uint64(32)
        found = np.zeros(1, np.uint64)
        for place in range(4):
            chosen = _u64(selector) >> np.uint64(4 * place)
            byte = whole >> ((chosen & np.uint64(7)) << np.uint64(3)) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            found = found | np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * place)
        return [_low(found)]

    return Operation((register(parts[0]),), _words_of(parts[1:4], constants), permute)


@_makes("VIMNMX", "IMNMX", "VIADDMNMX")
def _least_or_most(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    widen = _u64 if "U32" in i.modifiers else _i64
    values = [part for part in parts[1:-1] if not is_predicate(part)]
    sources = (*_words_of(values, constants), predicate(parts[-1]))

    def bounded(*given: Array) -> Sequence[Array]:
        *terms, last, least = given
        a, b = widen(reduce(operator.add, terms)), widen(last)
        return [_low(np.where(least, np.minimum(a, b), np.maximum(a, b)))]

    return Operation((register(parts[0]),), sources, bounded)


@_makes("IABS")
def _absolute(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    return Operation((register(parts[0]),), _words_of(parts[1:2], constants), lambda a: [_low(np.abs(_i64(a)))])


@_makes("IDP")
def _dot(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """Two halves of a word times two bytes of another."""
    if i.modifiers != ("2A", "LO", "U16", "U8"):
        return None

    def dot(a: Array, b: Array, c: Array) -> Sequence[Array]:
        low = (a & np.uint32(0xFFFF)) * (b & np.uint32(0xFF))
        return [low + (a >> np.uint32(16)) * (b >> np.uint32(8) & np.uint32(0xFF)) + c]

    return Operation((register(parts[0]),), _words_of(parts[1:4], constants), dot)


@_makes("HFMA2")
def _halves(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """A constant that is written as a sum of two halves and nothing."""
    if parts[1:3] != ["-RZ", "RZ"] or len(parts) != 5:
        return None
    try:
        high, low = (int(np.float16(part).view(np.uint16)) for part in parts[3:])
    except ValueError:
        return None
    return Operation((register(parts[0]),), (), lambda: [np.array([high << 16 | low], np.uint32)])


@_makes("STL")
def _spill(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    slot, first = _slot(parts[0]), register(parts[1])
    if slot is None or {"U8", "S8", "U16", "S16"} & set(i.modifiers):
        return None
    count = _words(i)
    names = [parts[1]] * count if first is None else [f"R{first + n}" for n in range(count)]
    sources = _words_of(names, constants)
    return Operation(tuple(range(slot, slot + count)), sources, lambda *values: values)


@_makes("LDL")
def _fill(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    slot, first = _slot(parts[1]), register(parts[0])
    if slot is None or first is None or {"U8", "S8", "U16", "S16"} & set(i.modifiers):
        return None
    count = _words(i)
    return Operation(tuple(range(first, first + count)), slots(slot, count), lambda *values: values)


def _slot(address: str) -> int | None:
    """The number that stands for a word of the stack, which registers are spilled to."""
    match = _STACK.fullmatch(address)
    return LOCAL + int(match[1] or "0", 16) // 4 if match else None


@_makes("P2R", "UP2UR")
def _pack(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """Predicates as the bits of a word: those of a mask, the others from another word."""
    if register(parts[0]) is None or "." in parts[0]:
        return None
    first = "UP" if parts[1] == "UPR" else "P"
    mask = int(parts[3], 16)
    sources = tuple(predicate(f"{first}{n}") if mask >> n & 1 else predicate("!PT") for n in range(7))

    def pack(kept: Array, *bits: Array) -> Sequence[Array]:
        taken = reduce(operator.or_, (bit.astype(np.uint32) << np.uint32(n) for n, bit in enumerate(bits)))
        return [kept & np.uint32(~mask & 0xFFFFFFFF) | taken]

    return Operation((register(parts[0]),), (word(parts[2], constants), *sources), pack)


@_makes("R2P")
def _unpack(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    match parts:
        case ["PR", source, bits] if "." not in source:
            mask = int(bits, 16)
        case _:
            return None
    places = [n for n in range(7) if mask >> n & 1]

    def unpack(value: Array) -> Sequence[Array]:
        return [value >> np.uint32(n) & np.uint32(1) != 0 for n in places]

    return Operation(tuple(PREDICATES + n for n in places), _words_of([source], constants), unpack)


@_makes("LDC", "LDCU")
def _constant(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    first, match = register(parts[0]), CONSTANT.fullmatch(parts[1])
    if first is None or match is None:
        return None
    places = [f"c[{match[1]}][{int(match[2], 16) + 4 * n:#x}]" for n in range(_words(i))]
    return Operation(tuple(range(first, first + len(places))), _words_of(places, constants), lambda *values: values)


@_makes("VOTE", "VOTEU")
def _vote(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    how = next((m for m in i.modifiers if m in ("ALL", "ANY")), None)
    if how is None or len(parts) != 2:
        return None

    def vote(value: Array) -> Sequence[Array]:
        if len(value) == 1:
            return [value]
        of_warps = value.reshape(-1, WARP)
        return [np.repeat(of_warps.all(axis=1) if how == "ALL" else of_warps.any(axis=1), WARP)]

    return Operation((register(parts[0]),), (predicate(parts[1]),), vote)


@_makes("SYNCS")
def _synchronise(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """A phase of an mbarrier that is waited for is over."""
    if "PHASECHK" not in i.modifiers:
        return None
    return Operation((register(parts[0]),), (), lambda: [np.ones(1, bool)])


def _special(parts: list[str], special: Mapping[str, Array], *, wide: bool) -> Operation:
    writes = _pair_of(parts[0]) if wide else (register(parts[0]),)
    name = parts[1]
    return Operation(writes, (), (lambda: [special[name]] * len(writes)) if name in SPECIAL else None)
