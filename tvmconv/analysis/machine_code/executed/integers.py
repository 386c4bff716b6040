"""What instructions make of integers: the arithmetic that addresses and branches are computed with.

Their meaning is that of PTX's instructions that they are made of (PTX ISA, "Integer Arithmetic Instructions", "Logic
and Shift Instructions"), and of names in CUDA Binary Utilities, "Instruction Set Reference"; what is nowhere written
down was found by executing kernels and comparing what they access with what their TIR does, and with what GPUs count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from tvmconv.analysis.machine_code.executed.operands import Constants, is_predicate, pair, predicate, register, word
from tvmconv.analysis.machine_code.executed.operations import (
    Array,
    Makers,
    Operation,
    i64,
    lower,
    makes,
    pair_of,
    split,
    u64,
    upper,
    words_of,
)
from tvmconv.compiler.listing import Instruction

MAKERS: Makers = {}


def _carries(parts: list[str]) -> tuple[list[str], list[str]]:
    """The predicates behind the result, which take the carry, and the operands behind these."""
    count = next((n for n, part in enumerate(parts[1:]) if not is_predicate(part)), 0)
    return parts[1 : 1 + count], parts[1 + count :]


@makes(MAKERS, "IADD3", "VIADD", "IADD")
def _add(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    out, rest = _carries(parts)
    if "64" in i.modifiers:
        sources = tuple(pair(part, constants) for part in rest)
        return None if out else Operation(pair_of(parts[0]), sources, lambda *terms: split(reduce(operator.add, terms)))
    values = [part for part in rest if not is_predicate(part)]
    carried = [predicate(part) for part in rest if is_predicate(part)] if "X" in i.modifiers else []
    # Of a number that is subtracted, the carry is that of the addition of its complement.
    negated = np.array([part.startswith("-R") or part.startswith("-UR") for part in values])
    added = words_of([part.lstrip("-") if n else part for part, n in zip(values, negated, strict=True)], constants)
    writes = (register(parts[0]), *(register(each) for each in out))
    whole = np.uint64(1 << 32)

    def add(*given: Array) -> Sequence[Array]:
        if not out and not carried and not negated.any():
            return [reduce(operator.add, given)]
        terms = [whole - u64(v) if n else u64(v) for v, n in zip(given[: len(values)], negated, strict=True)]
        total = reduce(operator.add, [*terms, *(u64(each) for each in given[len(values) :])])
        return [lower(total), *(total >> np.uint64(32 + place) != 0 for place in range(len(out)))]

    return Operation(writes, (*added, *carried), add)


@makes(MAKERS, "IMAD")
def _multiply_add(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    wide, high = "WIDE" in i.modifiers, "HI" in i.modifiers
    if is_predicate(parts[1]):
        return None
    factors = words_of(parts[1:3], constants)
    if not wide and not high:
        carried = [predicate(part) for part in parts[4:]] if "X" in i.modifiers else []
        sources = (*factors, word(parts[3], constants), *carried)

        def low(a: Array, b: Array, c: Array, *carry: Array) -> Sequence[Array]:
            return [reduce(operator.add, (each.astype(np.uint32) for each in carry), a * b + c)]

        return Operation((register(parts[0]),), sources, low)
    widen = u64 if "U32" in i.modifiers else i64

    def whole(a: Array, b: Array, c: Array) -> Sequence[Array]:
        product = (widen(a) * widen(b)).astype(np.uint64) + c
        return split(product) if wide else [upper(product)]

    writes = pair_of(parts[0]) if wide else (register(parts[0]),)
    return Operation(writes, (*factors, pair(parts[3], constants)), whole)


@makes(MAKERS, "LEA")
def _shift_add(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    out, rest = _carries(parts)
    high, signed = "HI" in i.modifiers, "SX32" in i.modifiers
    carried = [predicate(rest.pop())] if "X" in i.modifiers else []
    shift = np.uint64(int(rest.pop(), 16))
    sources = (*words_of(rest, constants), *carried)
    count = len(rest)

    def lea(*given: Array) -> Sequence[Array]:
        a, b = given[0], given[1]
        if not high:
            shifted = u64(lower(u64(a) << shift))
        else:
            whole = i64(a).astype(np.uint64) if signed else u64(a) | u64(given[2]) << np.uint64(32)
            shifted = u64(upper(whole << shift))
        total = reduce(operator.add, (u64(each) for each in given[count:]), shifted + u64(b))
        return [lower(total), *(total >> np.uint64(32) != 0 for _ in out)]

    return Operation((register(parts[0]), *(register(each) for each in out)), sources, lea)


@makes(MAKERS, "SHF")
def _shift(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    left, high = "L" in i.modifiers, "HI" in i.modifiers
    signed = "S32" in i.modifiers or "S64" in i.modifiers

    def shift(low: Array, by: Array, above: Array) -> Sequence[Array]:
        whole, by = u64(low) | u64(above) << np.uint64(32), u64(by & np.uint32(63))
        if left:
            done = whole << by
        else:
            done = (whole.view(np.int64) >> by.view(np.int64)).view(np.uint64) if signed else whole >> by
        return [upper(done) if high else lower(done)]

    return Operation((register(parts[0]),), words_of(parts[1:4], constants), shift)


@makes(MAKERS, "LOP3")
def _logic(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    writes: tuple[int | None, ...] = (register(parts[0]),)
    if is_predicate(parts[0]):
        writes, parts = (register(parts[1]), register(parts[0])), parts[1:]
    table = int(parts[4], 16)

    def logic(a: Array, b: Array, c: Array) -> Sequence[Array]:
        found = by_table(table, a, b, c)
        return [found, found != 0][: len(writes)]

    return Operation(writes, words_of(parts[1:4], constants), logic)


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


@makes(MAKERS, "PLOP3")
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


@makes(MAKERS, "ISETP")
def _compare(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    compare = next((_COMPARISONS[m] for m in i.modifiers if m in _COMPARISONS), None)
    join = next((_JOINS[m] for m in i.modifiers if m in _JOINS), None)
    if compare is None or join is None or {"EX", "64"} & set(i.modifiers):
        return None
    widen = u64 if "U32" in i.modifiers else i64
    sources = (*words_of(parts[2:4], constants), predicate(parts[4]))

    def setp(a: Array, b: Array, other: Array) -> Sequence[Array]:
        found = compare(widen(a), widen(b))
        return [join(found, other), join(~found, other)]

    return Operation((register(parts[0]), register(parts[1])), sources, setp)


def _selected(a: Array, b: Array, which: Array) -> Sequence[Array]:
    chosen: Array = np.where(which, a, b)
    return [chosen]


@makes(MAKERS, "SEL")
def _select(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if "64" in i.modifiers:
        return None
    sources = (*words_of(parts[1:3], constants), predicate(parts[3]))
    return Operation((register(parts[0]),), sources, _selected)


@makes(MAKERS, "PRMT")
def _permute(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if i.modifiers:
        return None

    def permute(a: Array, selector: Array, c: Array) -> Sequence[Array]:
        whole = u64(a) | u64(c) << np.uint64(32)
        found = np.zeros(1, np.uint64)
        for place in range(4):
            chosen = u64(selector) >> np.uint64(4 * place)
            byte = whole >> ((chosen & np.uint64(7)) << np.uint64(3)) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            found = found | np.where(chosen & np.uint64(8), sign, byte) << np.uint64(8 * place)
        return [lower(found)]

    return Operation((register(parts[0]),), words_of(parts[1:4], constants), permute)


@makes(MAKERS, "VIMNMX", "IMNMX", "VIADDMNMX")
def _least_or_most(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    widen = u64 if "U32" in i.modifiers else i64
    values = [part for part in parts[1:-1] if not is_predicate(part)]
    sources = (*words_of(values, constants), predicate(parts[-1]))

    def bounded(*given: Array) -> Sequence[Array]:
        *terms, last, least = given
        a, b = widen(reduce(operator.add, terms)), widen(last)
        return [lower(np.where(least, np.minimum(a, b), np.maximum(a, b)))]

    return Operation((register(parts[0]),), sources, bounded)


@makes(MAKERS, "IABS")
def _absolute(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    return Operation((register(parts[0]),), words_of(parts[1:2], constants), lambda a: [lower(np.abs(i64(a)))])


@makes(MAKERS, "IDP")
def _dot(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """Two halves of a word times two bytes of another."""
    if i.modifiers != ("2A", "LO", "U16", "U8"):
        return None

    def dot(a: Array, b: Array, c: Array) -> Sequence[Array]:
        low = (a & np.uint32(0xFFFF)) * (b & np.uint32(0xFF))
        return [low + (a >> np.uint32(16)) * (b >> np.uint32(8) & np.uint32(0xFF)) + c]

    return Operation((register(parts[0]),), words_of(parts[1:4], constants), dot)
