"""Natural loops of the machine code's control flow.

A loop is a branch back to an instruction that dominates the branch (Aho, Lam, Sethi and Ullman, "Compilers", 9.6). Code
that the compiler places after the kernel's end, and that branches back into the middle, is therefore no loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.compiler.sass_listing import Listing, SassInstruction

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
    """Return whether a branch depends on a predicate, in front of it or among its operands."""
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
