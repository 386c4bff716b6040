"""How words and predicates come from one place to another: registers, the stack, constants, threads of a warp."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import numpy as np

from tvmconv.analysis.machine_code.executed.operands import (
    CONSTANT,
    LOCAL,
    PREDICATES,
    Constants,
    is_predicate,
    pair,
    predicate,
    register,
    slots,
    word,
)
from tvmconv.analysis.machine_code.executed.operations import (
    Array,
    Makers,
    Operation,
    makes,
    pair_of,
    split,
    words,
    words_of,
)
from tvmconv.compiler.listing import Instruction
from tvmconv.gpu import WARP

MAKERS: Makers = {}
SPECIAL = frozenset(
    ("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_CTAID.X", "SR_CTAID.Y", "SR_CTAID.Z", "SR_LANEID", "SR_CgaCtaId", "SRZ")
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")


@makes(MAKERS, "MOV")
def _mov(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    if "64" in i.modifiers:
        return Operation(pair_of(parts[0]), (pair(parts[1], constants),), split)
    return Operation((register(parts[0]),), words_of(parts[1:2], constants), lambda a: [a])


@makes(MAKERS, "R2UR")
def _to_uniform(i: Instruction, parts: list[str], constants: Constants) -> Operation:
    """The value of a warp's first thread: all have the same; a predicate in front would tell that they do not."""
    if is_predicate(parts[0]):
        writes: tuple[int | None, ...] = (register(parts[1]), register(parts[0]))
        return Operation(writes, words_of(parts[2:3], constants), lambda a: [_of_warp(a), np.zeros(1, bool)])
    return Operation((register(parts[0]),), words_of(parts[1:2], constants), lambda a: [_of_warp(a)])


def _of_warp(value: Array) -> Array:
    return value if len(value) == 1 else np.repeat(value[::WARP], WARP)


@makes(MAKERS, "HFMA2")
def _halves(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """A constant that is written as a sum of two halves and nothing."""
    if parts[1:3] != ["-RZ", "RZ"] or len(parts) != 5:
        return None
    try:
        high, low = (int(np.float16(part).view(np.uint16)) for part in parts[3:])
    except ValueError:
        return None
    return Operation((register(parts[0]),), (), lambda: [np.array([high << 16 | low], np.uint32)])


@makes(MAKERS, "STL")
def _spill(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    slot, first = _slot(parts[0]), register(parts[1])
    if slot is None or {"U8", "S8", "U16", "S16"} & set(i.modifiers):
        return None
    count = words(i)
    names = [parts[1]] * count if first is None else [f"R{first + n}" for n in range(count)]
    sources = words_of(names, constants)
    return Operation(tuple(range(slot, slot + count)), sources, lambda *values: values)


@makes(MAKERS, "LDL")
def _fill(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    slot, first = _slot(parts[1]), register(parts[0])
    if slot is None or first is None or {"U8", "S8", "U16", "S16"} & set(i.modifiers):
        return None
    count = words(i)
    return Operation(tuple(range(first, first + count)), slots(slot, count), lambda *values: values)


def _slot(address: str) -> int | None:
    """The number that stands for a word of the stack, which registers are spilled to."""
    match = _STACK.fullmatch(address)
    return LOCAL + int(match[1] or "0", 16) // 4 if match else None


def _bit(marks: Iterable[str]) -> int:
    """The first bit of the byte that one of these names, such as B1."""
    return next((8 * int(mark[1]) for mark in marks if mark in ("B1", "B2", "B3")), 0)


@makes(MAKERS, "P2R", "UP2UR")
def _pack(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """Predicates as the bits of a byte of a word: those of a mask, the others from another word."""
    if register(parts[0]) is None:
        return None
    first = "UP" if parts[1] == "UPR" else "P"
    mask, at = int(parts[3], 16), _bit(i.modifiers)
    sources = tuple(predicate(f"{first}{n}") if mask >> n & 1 else predicate("!PT") for n in range(7))

    def pack(kept: Array, *bits: Array) -> Sequence[Array]:
        taken = reduce(operator.or_, (bit.astype(np.uint32) << np.uint32(n) for n, bit in enumerate(bits)))
        return [kept & np.uint32(~(mask << at) & 0xFFFFFFFF) | taken << np.uint32(at)]

    return Operation((register(parts[0]),), (word(parts[2], constants), *sources), pack)


@makes(MAKERS, "R2P")
def _unpack(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """Predicates from the bits of a byte of a word: those of a mask, the others as they are."""
    match parts:
        case ["PR", source, bits]:
            mask, (source, *marks) = int(bits, 16), source.split(".")
        case _:
            return None
    if set(marks) - {"reuse", "B0", "B1", "B2", "B3"}:
        return None
    at = _bit(marks)
    places = [n for n in range(7) if mask >> n & 1]

    def unpack(value: Array) -> Sequence[Array]:
        return [value >> np.uint32(at + n) & np.uint32(1) != 0 for n in places]

    return Operation(tuple(PREDICATES + n for n in places), words_of([source], constants), unpack)


@makes(MAKERS, "LDC", "LDCU")
def _constant(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    first, match = register(parts[0]), CONSTANT.fullmatch(parts[1])
    if first is None or match is None:
        return None
    places = [f"c[{match[1]}][{int(match[2], 16) + 4 * n:#x}]" for n in range(words(i))]
    return Operation(tuple(range(first, first + len(places))), words_of(places, constants), lambda *values: values)


@makes(MAKERS, "VOTE", "VOTEU")
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


@makes(MAKERS, "SYNCS")
def _synchronise(i: Instruction, parts: list[str], constants: Constants) -> Operation | None:
    """A phase of an mbarrier that is waited for is over."""
    if "PHASECHK" not in i.modifiers:
        return None
    return Operation((register(parts[0]),), (), lambda: [np.ones(1, bool)])


def from_special(parts: list[str], special: Mapping[str, Array], *, wide: bool) -> Operation:
    """What a special register has, when it is executed."""
    writes = pair_of(parts[0]) if wide else (register(parts[0]),)
    name = parts[1]
    return Operation(writes, (), (lambda: [special[name]] * len(writes)) if name in SPECIAL else None)
