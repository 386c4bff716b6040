"""Machine code as operations with the registers that they write and read, and as loops.

What its names mean is in the "Instruction Set Reference" of NVIDIA's CUDA Binary Utilities. A loop is what lies between
an instruction and the last branch back to it. Branches forward, around what a condition
rules out, are taken to be not taken: a warp in which one thread goes on goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tvmconv.compiler.listing import Instruction, Listing

Register = tuple[str, int]  # its file (R, UR, P or UP) and its number

_REGISTER = re.compile(r"(?<![A-Z0-9_.])(UR|R|UP|P)(\d+)(\.64)?")

# These write no register; of stores the register that is stored is among what they read.
_STORES = ("STG", "STS", "STL", "ST", "STSM")
_WRITE_NOTHING = frozenset(
    [
        *_STORES,
        *("RED", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "MEMBAR", "CCTL"),
        *("BRA", "EXIT", "RET", "BSSY", "BSYNC", "WARPSYNC"),
    ]
)
_WIDE = {"64": 2, "128": 4}


@dataclass(frozen=True)
class Operation:
    """One instruction.

    Attributes:
        name: such as "FFMA".
        modifiers: such as ("E", "128").
        writes: the registers that it writes.
        reads: those that it reads.
        words: of 4 bytes that a thread moves, of an access to memory.
        pending: groups of asynchronous copies that may be under way after DEPBAR.
    """

    name: str
    modifiers: tuple[str, ...]
    writes: tuple[Register, ...]
    reads: tuple[Register, ...]
    words: int = 1
    pending: int = 0


@dataclass
class Loop:
    """A loop.

    Attributes:
        body: instructions and loops in it.
        trips: how often the body runs each time.
    """

    body: list[Operation | Loop]
    trips: float = field(default=1.0)


Code = list[Operation | Loop]


def code(listing: Listing) -> Code:
    """A kernel's instructions, those of loops in these."""
    kept = [each for each in listing if each.opcode != "NOP"]  # which fill up the end
    places = {each.address: place for place, each in enumerate(kept)}
    ends: dict[int, int] = {}  # the last branch back to where a loop begins
    for place, each in enumerate(kept):
        begin = places.get(each.target, place) if each.target is not None and each.opcode == "BRA" else place
        if begin < place:  # and not the trap at the end, which branches to itself
            ends[begin] = place

    def nest(begin: int, end: int, *, inside: bool = False) -> Code:
        found: Code = []
        while begin < end:
            if not inside and ends.get(begin, end) < end:
                found.append(Loop(nest(begin, ends[begin] + 1, inside=True)))
                begin = ends[begin]
            else:
                found.append(_operation(kept[begin]))
            begin, inside = begin + 1, False
        return found

    return nest(0, len(kept))


def instructions(
    body: Iterable[Operation | Loop], around: tuple[Loop, ...] = ()
) -> Iterator[tuple[Operation, tuple[Loop, ...]]]:
    """Every instruction with the loops around it, outermost first."""
    for part in body:
        if isinstance(part, Loop):
            yield from instructions(part.body, (*around, part))
        else:
            yield part, around


def _operation(each: Instruction) -> Operation:
    words = next((_WIDE[mark] for mark in each.modifiers if mark in _WIDE), 1)
    first, _, others = each.operands.partition(",")
    reads, writes = list(_registers(each.predicate)), list[Register]()
    if each.opcode in _WRITE_NOTHING:
        reads += _registers(each.operands, words if each.opcode in _STORES else 1)
    else:
        writes += _registers(first, _written(each.opcode, each.modifiers, words))
        reads += _registers(others, 2 if each.opcode == "HMMA" else 1)
    pending = int(each.operands.split(",")[-1], 16) if each.opcode == "DEPBAR" else 0
    return Operation(each.opcode, each.modifiers, tuple(writes), tuple(reads), words, pending)


def _written(name: str, modifiers: tuple[str, ...], words: int) -> int:
    """How many registers in a row an instruction writes."""
    if name == "HMMA" or name == "LDSM":
        return 4 if "F32" in modifiers or "4" in modifiers else 2
    return 2 if "WIDE" in modifiers else words


def _registers(operands: str, row: int = 1) -> Iterator[Register]:
    for kind, number, wide in _REGISTER.findall(operands):
        for offset in range(max(row, 2 if wide else 1)):
            yield kind, int(number) + offset
