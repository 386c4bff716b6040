"""Machine code as operations with the registers that they write and read, and as loops.

What its names mean is in the "Instruction Set Reference" of NVIDIA's CUDA Binary Utilities. How often a loop runs is
known where the code has been executed (`executed.asked`), and what no warp ran is left out. Other branches forward are
taken to be not taken: what some warps run counts for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tvmconv.analysis.machine_code.loops import loops
from tvmconv.analysis.machine_code.mix import pending
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
        writes: the registers that it writes.
        reads: those that it reads.
        pending: groups of asynchronous copies that may be under way after DEPBAR.
    """

    name: str
    writes: tuple[Register, ...]
    reads: tuple[Register, ...]
    pending: int = 0


@dataclass
class Loop:
    """A loop.

    Attributes:
        body: instructions and loops in it.
        trips: how often the body runs each time that a warp comes to it, on average over these times.
    """

    body: list[Operation | Loop]
    trips: float = field(default=1.0)


Code = list[Operation | Loop]


def code(listing: Listing, executed: Sequence[int], back: Sequence[int]) -> Code:
    """The instructions of a kernel that its warps run, those of loops in these.

    Args:
        listing: of the kernel.
        executed: of each instruction, how often warps run it.
        back: of each branch, how often warps take it back to an instruction before it.
    """
    found = {loop.head: loop.inside for loop in loops(listing)}

    def nest(places: Sequence[int], around: int | None = None) -> Code:
        body: Code = []
        in_loops: set[int] = set()
        for place in places:
            if place in in_loops or not executed[place]:
                continue
            if place in found and place != around:
                in_loops |= found[place]
                body.append(Loop(nest(sorted(found[place]), place), trips(place)))
            else:
                body.append(_operation(listing[place]))
        return body

    def trips(head: int) -> float:
        again = sum(back[place] for place in found[head] if listing[place].target == listing[head].address)
        return executed[head] / max(1, executed[head] - again)

    return nest(range(len(listing)))


def _operation(each: Instruction) -> Operation:
    words = next((_WIDE[mark] for mark in each.modifiers if mark in _WIDE), 1)
    _, _, behind = each.operands.partition(",")
    first, _, others = (behind if each.opcode == "SHFL" else each.operands).partition(",")  # its first is a predicate
    reads, writes = list(_registers(each.predicate)), list[Register]()
    if each.opcode in _WRITE_NOTHING:
        reads += _registers(each.operands, words if each.opcode in _STORES else 1)
    else:
        writes += _registers(first, _written(each.opcode, each.modifiers, words))
        reads += _registers(others, 2 if each.opcode == "HMMA" else 1)
    left = pending(each) if each.opcode == "DEPBAR" else 0
    return Operation(each.opcode, tuple(writes), tuple(reads), left)


def _written(name: str, modifiers: tuple[str, ...], words: int) -> int:
    """How many registers in a row an instruction writes."""
    if name == "HMMA" or name == "LDSM":
        return 4 if "F32" in modifiers or "4" in modifiers else 2
    return 2 if "WIDE" in modifiers else words


def _registers(operands: str, row: int = 1) -> Iterator[Register]:
    for kind, number, wide in _REGISTER.findall(operands):
        for offset in range(max(row, 2 if wide else 1)):
            yield kind, int(number) + offset
