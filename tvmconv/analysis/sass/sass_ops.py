"""Machine code as nested loops of operations with the registers that they write and read.

The opcodes are those of the "Instruction Set Reference" of NVIDIA's CUDA Binary Utilities. Trip counts of loops come
from the interpreter (`interpreter.request_counts`), and instructions that no warp executed are left out. Other forward
branches are assumed not to be taken, so code that only some warps execute counts for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tvmconv.analysis.sass.instruction_mix import count_pending_groups
from tvmconv.analysis.sass.loops import find_loops
from tvmconv.compiler.sass_listing import Listing, SassInstruction

Register = tuple[str, int]  # register file (R, UR, P or UP) and number

_REGISTER = re.compile(r"(?<![A-Z0-9_.])(UR|R|UP|P)(\d+)(\.64)?")

# These opcodes write no register. A store reads the register that it stores.
_STORES = ("STG", "STS", "STL", "ST", "STSM")
_CONTROL = ("BRA", "EXIT", "RET", "BSSY", "BSYNC", "WARPSYNC")
_WRITE_NOTHING = frozenset([*_STORES, *_CONTROL, "RED", "LDGSTS", "LDGDEPBAR", "DEPBAR", "BAR", "MEMBAR", "CCTL"])
_REGISTERS_BY_WIDTH = {"64": 2, "128": 4}


@dataclass(frozen=True)
class SassOp:
    """One instruction with its registers.

    Attributes:
        name: Opcode, such as "FFMA".
        written_registers: Registers that it writes.
        read_registers: Registers that it reads.
        max_pending_groups: Maximum number of groups of asynchronous copies that are pending after a DEPBAR.
    """

    name: str
    written_registers: tuple[Register, ...]
    read_registers: tuple[Register, ...]
    max_pending_groups: int = 0


@dataclass
class SassLoop:
    """A loop of the machine code.

    Attributes:
        body: Instructions and inner loops.
        trip_count: Average number of executions of the body each time that a warp enters the loop.
    """

    body: list[SassOp | SassLoop]
    trip_count: float = field(default=1.0)


SassCode = list[SassOp | SassLoop]


def build_code(listing: Listing, execution_counts: Sequence[int], backward_branch_counts: Sequence[int]) -> SassCode:
    """Build the nested code of the instructions that warps execute.

    Args:
        listing: Machine code of a device kernel.
        execution_counts: Number of executions by a warp of each instruction.
        backward_branch_counts: Number of times that a warp takes each branch backward.
    """
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
    """Return the number of consecutive registers that an instruction writes."""
    if name == "HMMA" or name == "LDSM":
        return 4 if "F32" in modifiers or "4" in modifiers else 2
    return 2 if "WIDE" in modifiers else num_words


def _iterate_registers(operands: str, min_registers: int = 1) -> Iterator[Register]:
    for kind, number, is_wide in _REGISTER.findall(operands):
        for offset in range(max(min_registers, 2 if is_wide else 1)):
            yield kind, int(number) + offset
