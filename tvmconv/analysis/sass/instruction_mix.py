"""Instruction mix of a kernel's machine code: classes, arithmetic, the innermost loop, and the widths of accesses.

A warp scheduler issues one instruction per clock, so instructions other than arithmetic take its issue slots (CUDA C++
Programming Guide, "Hardware Multithreading"). Each instruction counts once, independent of loops. Opcodes: CUDA Binary
Utilities, "Instruction Set Reference".

A loop is a branch back to an instruction that dominates the branch (Aho, Lam, Sethi and Ullman, "Compilers", 9.6). Code
that the compiler places after the kernel's end, and that branches back into the middle, is therefore no loop.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.emulator.observers import AccessKind, MemorySpace
from tvmconv.target import WARP_SIZE, WARPGROUP_SIZE

_BRANCHES = ("BRA", "CALL")  # functions are inlined: a CALL leads to the code that follows, and does not return


@dataclass(frozen=True)
class NaturalLoop:
    """A natural loop."""

    head: int  # index of the loop's first instruction
    all_indices: frozenset[int]  # indices of the loop's instructions, inner loops included
    own_indices: frozenset[int]  # indices of the loop's instructions outside of inner loops


def find_loops(listing: Listing) -> list[NaturalLoop]:
    """Return the loops of a kernel by their head; the branch to itself at the kernel's end is not a loop."""
    successors = find_successors(listing)
    predecessors = find_predecessors(successors)
    reachable = _find_reachable({0} if listing else set(), successors)
    indices_by_head: dict[int, set[int]] = {}
    for head in range(len(listing)):
        if tails := [index for index in predecessors[head] if index > head]:
            dominated = reachable - _find_reachable({0}, successors, without=head)
            for tail in dominated.intersection(tails):
                body = {head} | _find_reachable({tail}, predecessors, without=head)
                indices_by_head[head] = indices_by_head.get(head, set()) | body
    loops = []
    for head, indices in sorted(indices_by_head.items()):
        own_indices = indices.difference(*(body for body in indices_by_head.values() if body < indices))
        loops.append(NaturalLoop(head, frozenset(indices), frozenset(own_indices)))
    return loops


def find_successors(listing: Listing) -> list[list[int]]:
    """Return, for each instruction, the indices of the instructions that may execute next."""
    index_by_address = {instruction.address: index for index, instruction in enumerate(listing)}
    join_by_register: dict[str, int] = {}  # index at which diverged threads converge, by barrier register
    all_successors: list[list[int]] = []
    for index, instruction in enumerate(listing):
        successor_indices: list[int] = []
        register = instruction.operands.split(",")[0].strip()
        if instruction.opcode == "BSSY" and instruction.target_address is not None:
            join_by_register[register] = index_by_address[instruction.target_address]
        elif instruction.opcode in _BRANCHES and instruction.target_address is not None:
            successor_indices.append(index_by_address[instruction.target_address])
        elif instruction.opcode == "BSYNC" and register in join_by_register:
            successor_indices.append(join_by_register[register])
        falls_through = instruction.opcode not in ("EXIT", "RET", *_BRANCHES) or _is_conditional(instruction)
        if falls_through and index + 1 < len(listing):
            successor_indices.append(index + 1)
        all_successors.append(successor_indices)
    return all_successors


def _is_conditional(instruction: SassInstruction) -> bool:
    return bool(instruction.predicate) or (instruction.opcode == "BRA" and "," in instruction.operands)


def find_predecessors(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, for each instruction, the indices of the instructions that may execute before it."""
    predecessors: list[list[int]] = [[] for _ in successors]
    for index, successor_indices in enumerate(successors):
        for successor in successor_indices:
            predecessors[successor].append(index)
    return predecessors


def _find_reachable(starts: set[int], neighbors: Sequence[Sequence[int]], without: int | None = None) -> set[int]:
    """Return the indices that are reachable from some indices on ways that do not pass through another index."""
    reached = starts - {without}
    worklist = list(reached)
    while worklist:
        for neighbor in neighbors[worklist.pop()]:
            if neighbor != without and neighbor not in reached:
                reached.add(neighbor)
                worklist.append(neighbor)
    return reached


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
# Clocks per float32 lane, and operations per thread. Two halves take a lane as long as one float32: "Arithmetic
# Instructions" in the CUDA C++ Programming Guide.
_LANE_COSTS = {
    **{"FFMA": (1, 2), "FMUL": (1, 1), "FADD": (1, 1)},
    **{"FFMA2": (2, 4), "FMUL2": (2, 2), "FADD2": (2, 2)},  # two float32 each
    **{"HFMA2": (1, 4), "HMUL2": (1, 2), "HADD2": (1, 2)},
}


def classify_instruction(instruction: SassInstruction) -> str:
    """Return the class of an instruction, one of the module's constants."""
    if instruction.opcode == "IMAD" and "MOV" in instruction.modifiers:
        return MOVES
    if instruction.opcode == "HFMA2" and instruction.operands.split(", ")[1:3] == ["-RZ", "RZ"]:  # a constant
        return MOVES
    return next((name for name, pattern in _PATTERNS if pattern.fullmatch(instruction.opcode)), OTHER)


def count_lane_clocks(instruction: SassInstruction) -> int:
    """Return the clocks that an instruction takes in each float32 lane of its warp."""
    return _find_lane_cost(instruction)[0]


def count_lane_flops(instruction: SassInstruction) -> int:
    """Return the multiplications and additions of an instruction of one warp, tensor cores excluded."""
    return WARP_SIZE * _find_lane_cost(instruction)[1]


def count_matrix_flops(instruction: SassInstruction) -> int:
    """Return a warp's tensor-core multiplications and additions: the tile of `HMMA.16816`, a quarter of `HGMMA`'s."""
    shape_modifier = instruction.modifiers[0] if instruction.modifiers else ""
    if instruction.opcode == "HGMMA":
        return 2 * math.prod(map(int, shape_modifier.split("x"))) // (WARPGROUP_SIZE // WARP_SIZE)
    if instruction.opcode == "HMMA" and (match := re.fullmatch(r"(16)(8)(\d+)", shape_modifier)):
        return 2 * math.prod(map(int, match.groups()))
    return 0


def _find_lane_cost(instruction: SassInstruction) -> tuple[int, int]:
    if instruction.opcode not in _LANE_COSTS or classify_instruction(instruction) == MOVES:
        return 0, 0
    clocks, flops = _LANE_COSTS[instruction.opcode]
    is_conversion = instruction.opcode == "HADD2" and "F32" in instruction.modifiers  # converts a half to float32
    return clocks, 0 if is_conversion else flops


def is_work(instruction: SassInstruction) -> bool:
    """Return whether an instruction multiplies and adds, in lanes or in tensor cores."""
    instruction_class = classify_instruction(instruction)
    return instruction_class == TENSOR or (instruction_class == ARITHMETIC and instruction.opcode in _MULTIPLY_ADD)


@dataclass(frozen=True)
class InnerLoop:
    """Loop that contains most of the arithmetic."""

    # instructions per iteration without those of inner loops, which are issue slots of a warp
    num_issue_slots: int
    num_work_slots: int  # multiply-add and tensor-core instructions among them
    class_counts: dict[str, int]  # instructions by class, the most frequent first
    first_address: int  # address of the first instruction in bytes
    last_address: int  # address of the last instruction in bytes
    has_loops: bool  # whether the loop contains other loops

    @property
    def work_fraction(self) -> float:
        """Fraction of the issue slots with multiply-add or tensor-core instructions, from 0 to 1."""
        return self.num_work_slots / self.num_issue_slots


@dataclass(frozen=True)
class InstructionMix:
    """Instruction mix of a kernel."""

    num_instructions: int
    class_counts: dict[str, int]  # instructions by class, the most frequent first
    # loop with most of the arithmetic; None if no loop has any because all loops are unrolled
    inner_loop: InnerLoop | None
    num_barriers: int  # `BAR` instructions, at which the threads of a block wait for each other
    # maximum number of groups of asynchronous copies (cp.async) that a wait leaves pending; None without such copies
    max_pending_groups: int | None
    num_mbarriers: int  # initialized mbarriers, with which threads wait for TMA copies


def analyze_mix(listing: Listing) -> InstructionMix:
    """Return the instruction mix of a kernel without the padding at its end."""
    instructions = select_reachable(listing)
    waits = [item for item in instructions if item.opcode == "DEPBAR" and "LE" in item.modifiers]
    has_copies = any(item.opcode == "LDGDEPBAR" for item in instructions)
    return InstructionMix(
        num_instructions=len(instructions),
        class_counts=count_classes(instructions),
        inner_loop=_describe_inner_loop(listing),
        num_barriers=sum(item.opcode == "BAR" and "ARV" not in item.modifiers for item in instructions),
        max_pending_groups=max(map(count_pending_groups, waits), default=0) if has_copies else None,
        num_mbarriers=sum(item.opcode == "SYNCS" and "EXCH" in item.modifiers for item in instructions),
    )


def select_reachable(listing: Listing) -> list[SassInstruction]:
    """Return the instructions without the padding at the end, which starts with a branch to itself."""
    return list(takewhile(lambda instruction: instruction.target_address != instruction.address, listing))


def count_classes(instructions: Iterable[SassInstruction]) -> dict[str, int]:
    """Return the number of instructions by class, the most frequent first."""
    return dict(Counter(map(classify_instruction, instructions)).most_common())


def find_inner_loop(listing: Listing) -> NaturalLoop | None:
    """Return the loop with most of the arithmetic outside of inner loops; None if no loop has arithmetic."""
    candidates = [(sum(is_work(listing[index]) for index in loop.own_indices), loop) for loop in find_loops(listing)]
    num_work, loop = max(candidates, key=lambda item: (item[0], -len(item[1].all_indices)), default=(0, None))
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
    """Return the number of groups that a wait such as `DEPBAR.LE SB0, 0x2` leaves pending."""
    return int(wait.operands.split(",")[1], 0)


ACCESSES: dict[tuple[MemorySpace, AccessKind], tuple[str, ...]] = {
    ("shared", "load"): ("LDS", "LDSM"),
    ("shared", "store"): ("STS", "STSM", "LDGSTS"),
    ("global", "load"): ("LDG", "LDGSTS"),
    ("global", "store"): ("STG",),
}
_WIDTHS = ("U8", "S8", "U16", "S16", "64", "128", "MT88", "M88", "2", "4")


def count_access_widths(
    instructions: Iterable[SassInstruction], space: MemorySpace, kind: AccessKind
) -> dict[str, int]:
    """Count the accesses of instructions to a memory space by opcode and width (`LDS.128`), the most frequent first."""
    opcodes = ACCESSES[space, kind]
    width_counts = Counter(
        ".".join((instruction.opcode, *(item for item in instruction.modifiers if item in _WIDTHS)))
        for instruction in instructions
        if instruction.opcode in opcodes
    )
    return dict(width_counts.most_common())
