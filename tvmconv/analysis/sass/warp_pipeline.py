"""Time that one warp takes alone on its multiprocessor, from its machine code.

A warp issues its instructions in order, one per clock, and each waits for its operands (CUDA C++ Programming Guide,
"Hardware Multithreading"). The time of a warp is the time at which its last instruction issues if each result is ready
a fixed latency after its instruction. The time reflects the number of independent operations, the distance of
prefetches, and the waits at barriers. V. Volkov ("Understanding Latency Hiding on GPUs", 2016, chapter 4) calls this
the latency-bound regime; J.-C. Huang et al. ("GPUMech", 2014) compute it by the same walk over the instructions.

A loop's body is walked twice, and each further iteration takes as long as the second one.

The opcodes are those of the "Instruction Set Reference" of NVIDIA's CUDA Binary Utilities. Trip counts of loops come
from the interpreter (`interpreter.request_counts`), and instructions that no warp executed are left out. Other forward
branches are assumed not to be taken, so code that only some warps execute counts for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tvmconv.analysis.sass.instruction_mix import count_pending_groups, find_loops
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.target import ARITHMETIC_CLOCKS, BARRIER_CLOCKS, INSTRUCTION_CLOCKS, ISSUE_CLOCKS

Register = tuple[str, int]  # register file (R, UR, P or UP) and number

_REGISTER = re.compile(r"(?<![A-Z0-9_.])(UR|R|UP|P)(\d+)(\.64)?")

# These opcodes write no register. A store reads the register that it stores.
_STORES = ("STG", "STS", "STL", "ST", "STSM")
_CONTROL = ("BRA", "EXIT", "RET", "BSSY", "BSYNC", "WARPSYNC")
_WRITE_NOTHING = frozenset([*_STORES, *_CONTROL, "RED", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "MEMBAR", "CCTL"])
_REGISTERS_BY_WIDTH = {"64": 2, "128": 4}


@dataclass(frozen=True)
class SassOp:
    """One instruction with its registers."""

    name: str  # opcode, such as "FFMA"
    written_registers: tuple[Register, ...]  # registers that it writes
    read_registers: tuple[Register, ...]  # registers that it reads
    max_pending_groups: int = 0  # maximum number of groups of asynchronous copies that are pending after a DEPBAR


@dataclass
class SassLoop:
    """A loop of the machine code."""

    body: list[SassOp | SassLoop]  # instructions and inner loops
    # average number of executions of the body each time that a warp enters the loop
    trip_count: float = field(default=1.0)


SassCode = list[SassOp | SassLoop]


def build_code(listing: Listing, execution_counts: Sequence[int], backward_branch_counts: Sequence[int]) -> SassCode:
    """Build the nested code of the instructions that warps execute."""
    indices_by_head = {loop.head: loop.all_indices for loop in find_loops(listing)}

    def nest_loops(indices: Sequence[int], enclosing_head: int | None = None) -> SassCode:
        body: SassCode = []
        nested_indices: set[int] = set()
        for index in indices:
            if index in nested_indices or not execution_counts[index]:
                continue
            if index in indices_by_head and index != enclosing_head:
                nested_indices |= indices_by_head[index]
                body.append(SassLoop(nest_loops(sorted(indices_by_head[index]), index), compute_trip_count(index)))
            else:
                body.append(_make_op(listing[index]))
        return body

    def compute_trip_count(head: int) -> float:
        branches = [index for index in indices_by_head[head] if listing[index].target_address == listing[head].address]
        num_backward = sum(backward_branch_counts[index] for index in branches)
        return execution_counts[head] / max(1, execution_counts[head] - num_backward)

    return nest_loops(range(len(listing)))


def _make_op(instruction: SassInstruction) -> SassOp:
    num_words = next((_REGISTERS_BY_WIDTH[item] for item in instruction.modifiers if item in _REGISTERS_BY_WIDTH), 1)
    operands = instruction.operands
    if instruction.opcode == "SHFL":  # its first operand is a predicate
        operands = operands.partition(",")[2]
    written_operand, _, read_operands = operands.partition(",")
    read_registers, written_registers = list(_iterate_registers(instruction.predicate)), list[Register]()
    if instruction.opcode in _WRITE_NOTHING:
        read_registers += _iterate_registers(instruction.operands, num_words if instruction.opcode in _STORES else 1)
    else:
        written_registers += _iterate_registers(
            written_operand, _count_written_registers(instruction.opcode, instruction.modifiers, num_words)
        )
        read_registers += _iterate_registers(read_operands, 2 if instruction.opcode == "HMMA" else 1)
    max_pending_groups = count_pending_groups(instruction) if instruction.opcode == "DEPBAR" else 0
    return SassOp(instruction.opcode, tuple(written_registers), tuple(read_registers), max_pending_groups)


def _count_written_registers(name: str, modifiers: tuple[str, ...], num_words: int) -> int:
    if name == "HMMA" or name == "LDSM":
        return 4 if "F32" in modifiers or "4" in modifiers else 2
    return 2 if "WIDE" in modifiers else num_words


def _iterate_registers(operands: str, min_registers: int = 1) -> Iterator[Register]:
    for kind, number, is_wide in _REGISTER.findall(operands):
        for offset in range(max(min_registers, 2 if is_wide else 1)):
            yield kind, int(number) + offset


@dataclass
class WarpPipeline:
    """Pipeline of one warp that runs alone."""

    clocks: float = 0.0  # clock at which the next instruction can issue
    _ready_cycle: dict[Register, float] = field(default_factory=dict)
    _group_done_cycle: float = 0.0  # clock at which the copies since the last commit are done
    _committed_groups: list[float] = field(default_factory=list)

    def execute(self, code: SassCode) -> None:
        """Advance the clock by the time of the code."""
        for node in code:
            if isinstance(node, SassOp):
                self._issue(node)
                continue
            self.execute(node.body)
            if node.trip_count > 1:
                clocks_before = self.clocks
                self.execute(node.body)
                self._advance((node.trip_count - 2) * (self.clocks - clocks_before))

    def _issue(self, op: SassOp) -> None:
        registers = (*op.read_registers, *op.written_registers)
        issue_cycle = max([self.clocks, *(self._ready_cycle.get(register, 0.0) for register in registers)])
        done_cycle = issue_cycle + INSTRUCTION_CLOCKS.get(op.name, ARITHMETIC_CLOCKS)
        match op.name:
            case "LDGSTS":
                self._group_done_cycle = max(self._group_done_cycle, done_cycle)
            case "LDGDEPBAR":
                self._committed_groups.append(self._group_done_cycle)
            case "DEPBAR":
                while len(self._committed_groups) > op.max_pending_groups:
                    issue_cycle = max(issue_cycle, self._committed_groups.pop(0))
            case "BAR":
                issue_cycle += BARRIER_CLOCKS
        self._ready_cycle |= dict.fromkeys(op.written_registers, done_cycle)
        self.clocks = issue_cycle + ISSUE_CLOCKS.get(op.name, 1)

    def _advance(self, clocks: float) -> None:
        self.clocks += clocks
        self._ready_cycle = {register: ready + clocks for register, ready in self._ready_cycle.items()}
        self._group_done_cycle += clocks
        self._committed_groups = [ready + clocks for ready in self._committed_groups]
