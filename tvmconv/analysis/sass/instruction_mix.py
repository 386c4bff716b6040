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

from tvmconv.analysis.sass.loops import NaturalLoop, find_loops
from tvmconv.compiler.sass_listing import Listing, SassInstruction

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


def classify_instruction(instruction: SassInstruction) -> str:
    """The class of an instruction: one of the names above."""
    if instruction.opcode == "IMAD" and "MOV" in instruction.modifiers:
        return MOVES
    if instruction.opcode == "HFMA2" and instruction.operands.split(", ")[1:3] == ["-RZ", "RZ"]:  # a constant
        return MOVES
    return next((name for name, pattern in _PATTERNS if pattern.fullmatch(instruction.opcode)), OTHER)


def is_work(instruction: SassInstruction) -> bool:
    """Whether it multiplies and adds, in lanes or in tensor cores."""
    instruction_class = classify_instruction(instruction)
    return instruction_class == TENSOR or (instruction_class == ARITHMETIC and instruction.opcode in _MULTIPLY_ADD)


@dataclass(frozen=True)
class InnerLoop:
    """The loop in which most of the arithmetic is.

    Attributes:
        num_issue_slots: instructions of an iteration, those of loops inside it left out: issue slots of a warp.
        num_work_slots: of these, the multiply-adds and the instructions of tensor cores.
        class_counts: its instructions by class, the most frequent first.
        first_address: the address that it begins at, in bytes.
        last_address: the address of its last instruction.
        has_loops: whether there are loops inside it.
    """

    num_issue_slots: int
    num_work_slots: int
    class_counts: dict[str, int]
    first_address: int
    last_address: int
    has_loops: bool

    @property
    def work_fraction(self) -> float:
        """The share of the slots that does the work, 0 to 1."""
        return self.num_work_slots / self.num_issue_slots


@dataclass(frozen=True)
class InstructionMix:
    """What a kernel's machine code is made of.

    Attributes:
        num_instructions: how many.
        class_counts: by class, the most frequent first.
        inner_loop: the loop with most of the arithmetic; None where no loop has any, as all is unrolled.
        num_barriers: `BAR_HEIGHT` instructions, at which a block's threads wait for each other.
        max_pending_groups: groups of asynchronous copies (cp.async) that a wait leaves under way at most; None without
            any.
        num_mbarriers: initialised, at which copies by TMA are waited for.
    """

    num_instructions: int
    class_counts: dict[str, int]
    inner_loop: InnerLoop | None
    num_barriers: int
    max_pending_groups: int | None
    num_mbarriers: int


def analyze_mix(listing: Listing) -> InstructionMix:
    """What a kernel's instructions are; what pads its end is left out."""
    instructions = select_reachable(listing)
    wait_instructions = [
        instruction for instruction in instructions if instruction.opcode == "DEPBAR" and "LE" in instruction.modifiers
    ]
    has_copies = any(instruction.opcode == "LDGDEPBAR" for instruction in instructions)
    return InstructionMix(
        num_instructions=len(instructions),
        class_counts=count_classes(instructions),
        inner_loop=_describe_inner_loop(listing),
        num_barriers=sum(
            instruction.opcode == "BAR" and "ARV" not in instruction.modifiers for instruction in instructions
        ),
        max_pending_groups=max((count_pending_groups(instruction) for instruction in wait_instructions), default=0)
        if has_copies
        else None,
        num_mbarriers=sum(
            instruction.opcode == "SYNCS" and "EXCH" in instruction.modifiers for instruction in instructions
        ),
    )


def select_reachable(listing: Listing) -> list[SassInstruction]:
    """The instructions without those that pad the end: a branch to itself, and what is behind it."""
    return list(takewhile(lambda instruction: instruction.target_address != instruction.address, listing))


def count_classes(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """How many there are by class, the most frequent first."""
    return dict(Counter(map(classify_instruction, instructions)).most_common())


def find_inner_loop(listing: Listing) -> NaturalLoop | None:
    """The loop that has most of the arithmetic itself, not in loops inside it; None where none has any."""
    candidates = [
        (sum(is_work(listing[index]) for index in candidate.own_indices), candidate)
        for candidate in find_loops(listing)
    ]
    num_work, loop = max(
        candidates, key=lambda candidate: (candidate[0], -len(candidate[1].all_indices)), default=(0, None)
    )
    return loop if num_work else None


def _describe_inner_loop(listing: Listing) -> InnerLoop | None:
    loop = find_inner_loop(listing)
    if loop is None:
        return None
    instructions = [listing[index] for index in sorted(loop.own_indices)]
    return InnerLoop(
        num_issue_slots=len(instructions),
        num_work_slots=sum(map(is_work, instructions)),
        class_counts=count_classes(instructions),
        first_address=listing[loop.head].address,
        last_address=listing[max(loop.all_indices)].address,
        has_loops=len(loop.own_indices) < len(loop.all_indices),
    )


def count_pending_groups(wait: SassInstruction) -> int:
    """The groups that `DEPBAR.LE SB0, 0x2` leaves."""
    return int(wait.operands.split(",")[1], 0)


ACCESSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("shared", "load"): ("LDS", "LDSM"),
    ("shared", "store"): ("STS", "STSM", "LDGSTS"),
    ("global", "load"): ("LDG", "LDGSTS"),
    ("global", "store"): ("STG",),
}
_WIDTHS = ("U8", "S8", "U16", "S16", "64", "128", "MT88", "M88", "2", "4")


def count_access_widths(
    instructions: Iterable[SassInstruction], space: Literal["global", "shared"], kind: Literal["load", "store"]
) -> dict[str, int]:
    """The accesses of some instructions to a memory, as `LDS.128`, and how many of each; the most frequent first."""
    opcodes = ACCESSES[space, kind]
    width_counts = Counter(
        ".".join((instruction.opcode, *(modifier for modifier in instruction.modifiers if modifier in _WIDTHS)))
        for instruction in instructions
        if instruction.opcode in opcodes
    )
    return dict(width_counts.most_common())
