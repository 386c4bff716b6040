"""What a kernel's machine code is made of: instructions by class, its innermost loop, the widths of its accesses.

A warp scheduler issues one instruction a clock, whatever it does: what is no arithmetic of the sum takes slots that
arithmetic could have had (CUDA C++ Programming Guide, "Hardware Multithreading"). Each instruction counts once, however
often a loop runs it. Opcodes: CUDA Binary Utilities, "Instruction Set Reference".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from tvmconv.analysis.machine_code.loops import Loop, loops
from tvmconv.compiler.listing import Instruction, Listing

ARITHMETIC, TENSOR, INTEGER, MOVES = "multiply-add and floating point", "tensor cores", "integer and address", "moves"
GLOBAL, SHARED, LOCAL, CONSTANT = "global memory", "shared memory", "local memory", "constants"
BARRIERS, CONTROL, LANES, TEXTURE, OTHER = "barriers and waits", "control", "between lanes", "textures", "other"

_CLASSES = {
    ARITHMETIC: r"[FHD](ADD|MUL|FMA|SET|SETP|SEL|MNMX\d?|CHK|SWZADD)2?|MUFU|F2FP?|F2F|F2I|I2FP?|I2F|FRND",
    TENSOR: r"[A-Z]*MMA",
    GLOBAL: r"LDG|STG|LDGSTS|LD|ST|RED|REDG|ATOM|ATOMG|UTMALDG|UTMASTG|UTMAREDG|UTMAPF|UBLKCP|CCTL",
    SHARED: r"LDS|STS|LDSM|STSM|ATOMS",
    LOCAL: r"LDL|STL",
    CONSTANT: r"U?LDCU?|ULDC",
    TEXTURE: r"TEX|TLD|TLD4|TXD|TXQ",
    LANES: r"SHFL|VOTEU?|MATCH|U?REDUX|ELECT",
    BARRIERS: r"BAR|SYNCS|LDGDEPBAR|DEPBAR|MEMBAR|ERRBAR|FENCE|WARPSYNC|WARPGROUP|WARPGROUPSET|UCGABAR_ARV|UCGABAR_WAIT"
    r"|UTMACMDFLUSH|UTMACCTL|ARRIVES|ACQBULK|PREEXIT|NANOSLEEP|YIELD|CGAERRBAR|ENDCOLLECTIVE",
    CONTROL: r"BRA|BRX|BRXU|EXIT|BSSY|BSYNC|BREAK|CALL|RET|JMP|JMX|KILL|RPCMOV|BPT|BMOV|NOP",
    MOVES: r"U?MOV|CS2R|S2R|S2UR|R2UR|UR2UR|MOV32I|R2P|P2R|UP2UR|R2UP|UR2UP|USETMAXREG|UCS2R",
    INTEGER: r"U?(IMAD|IADD3?|VIADD|VIADDMNMX|VIMNMX3?|IMNMX|IABS|ISETP|ICMP|LEA|LOP3|PLOP3|SHF|SHL|SHR|SEL|PRMT|FLO"
    r"|POPC|BMSK|BREV|SGXT|ISCADD|IDP|IDP4A|LEPC|MEPC)",
}
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _CLASSES.items()]
_MULTIPLY_ADD = frozenset({"FFMA", "FFMA2", "HFMA2", "DFMA"})


def class_of(instruction: Instruction) -> str:
    """The class of an instruction: one of the names above."""
    if instruction.opcode == "IMAD" and "MOV" in instruction.modifiers:
        return MOVES
    if instruction.opcode == "HFMA2" and instruction.operands.split(", ")[1:3] == ["-RZ", "RZ"]:  # a constant
        return MOVES
    return next((name for name, pattern in _PATTERNS if pattern.fullmatch(instruction.opcode)), OTHER)


def does_work(instruction: Instruction) -> bool:
    """Whether it multiplies and adds, in lanes or in tensor cores."""
    found = class_of(instruction)
    return found == TENSOR or (found == ARITHMETIC and instruction.opcode in _MULTIPLY_ADD)


@dataclass(frozen=True)
class InnerLoop:
    """The loop in which most of the arithmetic is.

    Attributes:
        slots: instructions of an iteration, those of loops inside it left out: issue slots of a warp.
        working: of these, the multiply-adds and the instructions of tensor cores.
        classes: its instructions by class, the most frequent first.
        first: the address that it begins at, in bytes.
        last: the address of its last instruction.
        has_loops: whether there are loops inside it.
    """

    slots: int
    working: int
    classes: dict[str, int]
    first: int
    last: int
    has_loops: bool

    @property
    def share(self) -> float:
        """The share of the slots that does the work, 0 to 1."""
        return self.working / self.slots


@dataclass(frozen=True)
class Mix:
    """What a kernel's machine code is made of.

    Attributes:
        instructions: how many.
        classes: by class, the most frequent first.
        inner: the loop with most of the arithmetic; None where no loop has any, as all is unrolled.
        barriers: `BAR` instructions, at which a block's threads wait for each other.
        copy_groups: groups of asynchronous copies (cp.async) that a wait leaves under way at most; None without any.
        mbarriers: initialised, at which copies by TMA are waited for.
    """

    instructions: int
    classes: dict[str, int]
    inner: InnerLoop | None
    barriers: int
    copy_groups: int | None
    mbarriers: int


def mix(listing: Listing) -> Mix:
    """What a kernel's instructions are; what pads its end is left out."""
    real = reachable(listing)
    waits = [each for each in real if each.opcode == "DEPBAR" and "LE" in each.modifiers]
    copies = any(each.opcode == "LDGDEPBAR" for each in real)
    return Mix(
        instructions=len(real),
        classes=classes(real),
        inner=_inner(listing),
        barriers=sum(each.opcode == "BAR" and "ARV" not in each.modifiers for each in real),
        copy_groups=max((pending(each) for each in waits), default=0) if copies else None,
        mbarriers=sum(each.opcode == "SYNCS" and "EXCH" in each.modifiers for each in real),
    )


def reachable(listing: Listing) -> list[Instruction]:
    """The instructions without those that pad the end: a branch to itself, and what is behind it."""
    return list(takewhile(lambda each: each.target != each.address, listing))


def classes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How many there are by class, the most frequent first."""
    return dict(Counter(map(class_of, instructions)).most_common())


def inner_loop(listing: Listing) -> Loop | None:
    """The loop that has most of the arithmetic itself, not in loops inside it; None where none has any."""
    found = [(sum(does_work(listing[i]) for i in each.own), each) for each in loops(listing)]
    working, loop = max(found, key=lambda each: (each[0], -len(each[1].inside)), default=(0, None))
    return loop if working else None


def _inner(listing: Listing) -> InnerLoop | None:
    loop = inner_loop(listing)
    if loop is None:
        return None
    own = [listing[i] for i in sorted(loop.own)]
    return InnerLoop(
        slots=len(own),
        working=sum(map(does_work, own)),
        classes=classes(own),
        first=listing[loop.head].address,
        last=listing[max(loop.inside)].address,
        has_loops=len(loop.own) < len(loop.inside),
    )


def pending(wait: Instruction) -> int:
    """The groups that `DEPBAR.LE SB0, 0x2` leaves."""
    return int(wait.operands.split(",")[1], 0)


ACCESSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("shared", "load"): ("LDS", "LDSM"),
    ("shared", "store"): ("STS", "STSM", "LDGSTS"),
    ("global", "load"): ("LDG", "LDGSTS"),
    ("global", "store"): ("STG",),
}
_WIDTHS = ("U8", "S8", "U16", "S16", "64", "128", "MT88", "M88", "2", "4")


def widths(
    instructions: Iterable[Instruction], space: Literal["global", "shared"], kind: Literal["load", "store"]
) -> dict[str, int]:
    """The accesses of some instructions to a memory, as `LDS.128`, and how many of each; the most frequent first."""
    wanted = ACCESSES[space, kind]
    found = Counter(
        ".".join((each.opcode, *(m for m in each.modifiers if m in _WIDTHS)))
        for each in instructions
        if each.opcode in wanted
    )
    return dict(found.most_common())
