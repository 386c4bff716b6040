"""Machine code as instructions with the registers that they write and read, and as loops.

SASS is read as nvdisasm writes it; what its names mean is in the "Instruction Set Reference" of NVIDIA's CUDA Binary
Utilities. A loop is what lies between a label and the last branch back to it. Branches forward, around what a condition
rules out, are taken to be not taken: a warp in which one thread goes on goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Register = tuple[str, int]  # its file (R, UR, P or UP) and its number

_SECTION = re.compile(r"^\.text\.(\S+):")
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"(?<![A-Z0-9_.])(UR|R|UP|P)(\d+)(\.64)?")
_BRANCHED_TO = re.compile(r"\.L_\w+")

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
class Instruction:
    """One instruction.

    Attributes:
        name: such as "FFMA".
        modifiers: such as ("E", "128").
        writes: the registers that it writes.
        reads: those that it reads.
        words: of 4 bytes that a thread moves, of an access to memory.
        target: the label that a branch goes to.
        pending: groups of asynchronous copies that may be under way after DEPBAR.
    """

    name: str
    modifiers: tuple[str, ...]
    writes: tuple[Register, ...]
    reads: tuple[Register, ...]
    words: int = 1
    target: str | None = None
    pending: int = 0


@dataclass
class Loop:
    """A loop.

    Attributes:
        body: instructions and loops in it.
        trips: how often the body runs each time.
    """

    body: list[Instruction | Loop]
    trips: float = field(default=1.0)


Code = list[Instruction | Loop]


def code(sass: str) -> dict[str, Code]:
    """The functions of a disassembly, by name."""
    lines: dict[str, list[str | Instruction]] = {}
    current: list[str | Instruction] = []
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            current = lines.setdefault(section[1], [])
        elif label := _LABEL.match(line):
            current.append(label[1])
        elif (found := _INSTRUCTION.match(line)) and found[2] != "NOP":  # which fill up the end
            current.append(_instruction(*found.groups(default="")))
    return {name: _nested(own) for name, own in lines.items()}


def instructions(
    body: Iterable[Instruction | Loop], around: tuple[Loop, ...] = ()
) -> Iterator[tuple[Instruction, tuple[Loop, ...]]]:
    """Every instruction with the loops around it, outermost first."""
    for part in body:
        if isinstance(part, Loop):
            yield from instructions(part.body, (*around, part))
        else:
            yield part, around


def _instruction(guard: str, name: str, modifiers: str, operands: str) -> Instruction:
    marks = tuple(modifiers.split(".")[1:])
    words = next((_WIDE[mark] for mark in marks if mark in _WIDE), 1)
    first, _, others = operands.partition(",")
    reads, writes = list(_registers(guard)), list[Register]()
    if name in _WRITE_NOTHING:
        reads += _registers(operands, words if name in _STORES else 1)
    else:
        writes += _registers(first, _written(name, marks, words))
        reads += _registers(others, 2 if name == "HMMA" else 1)
    target = _BRANCHED_TO.search(operands) if name == "BRA" else None
    pending = int(operands.split(",")[-1], 16) if name == "DEPBAR" else 0
    return Instruction(name, marks, tuple(writes), tuple(reads), words, target[0] if target else None, pending)


def _written(name: str, modifiers: tuple[str, ...], words: int) -> int:
    """How many registers in a row an instruction writes."""
    if name == "HMMA" or name == "LDSM":
        return 4 if "F32" in modifiers or "4" in modifiers else 2
    return 2 if "WIDE" in modifiers else words


def _registers(operands: str, row: int = 1) -> Iterator[Register]:
    for kind, number, wide in _REGISTER.findall(operands):
        for offset in range(max(row, 2 if wide else 1)):
            yield kind, int(number) + offset


def _nested(lines: list[str | Instruction]) -> Code:
    labels = {line: place for place, line in enumerate(lines) if isinstance(line, str)}
    ends: dict[int, int] = {}  # the last branch back to each label
    for place, line in enumerate(lines):
        if isinstance(line, Instruction) and line.target is not None:
            begin = labels.get(line.target, place)
            if any(isinstance(each, Instruction) for each in lines[begin + 1 : place]):  # not the trap at the end
                ends[begin] = place

    def nest(begin: int, end: int) -> Code:
        found: Code = []
        while begin < end:
            line = lines[begin]
            if isinstance(line, Instruction):
                found.append(line)
            elif ends.get(begin, end) < end:
                found.append(Loop(nest(begin + 1, ends[begin] + 1)))
                begin = ends[begin]
            begin += 1
        return found

    return nest(0, len(lines))
