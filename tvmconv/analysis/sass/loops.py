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
    predecessors: list[list[int]] = [[] for _ in listing]
    for index, successor_indices in enumerate(successors):
        for successor in successor_indices:
            predecessors[successor].append(index)
    indices_by_head: dict[int, set[int]] = {}
    dominators = _find_dominators(successors, predecessors)
    for index, successor_indices in enumerate(successors):
        for head in successor_indices:
            if head < index and _is_dominated_by(dominators, head, index):
                indices_by_head.setdefault(head, {head}).update(_find_loop_body(index, head, predecessors))
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


def _find_dominators(successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]) -> list[int]:
    """Return the immediate dominator of each instruction; -1 if the instruction is unreachable.

    Source: Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm" (2001).
    """
    order: list[int] = []
    visited_indices, stack = {0}, [(0, iter(successors[0]))] if successors else []
    while stack:
        index, remaining_successors = stack[-1]
        unvisited = next((neighbor for neighbor in remaining_successors if neighbor not in visited_indices), None)
        if unvisited is not None:
            visited_indices.add(unvisited)
            stack.append((unvisited, iter(successors[unvisited])))
        else:
            order.append(index)
            stack.pop()
    postorder_number = {index: number for number, index in enumerate(order)}
    nearest = [-1] * len(successors)
    if successors:
        nearest[0] = 0
    has_changed = True
    while has_changed:
        has_changed = False
        for index in reversed(order[:-1]):
            processed_predecessors = [neighbor for neighbor in predecessors[index] if nearest[neighbor] >= 0]
            intersection = processed_predecessors[0]
            for predecessor in processed_predecessors[1:]:
                while intersection != predecessor:
                    while postorder_number[intersection] < postorder_number[predecessor]:
                        intersection = nearest[intersection]
                    while postorder_number[predecessor] < postorder_number[intersection]:
                        predecessor = nearest[predecessor]
            if nearest[index] != intersection:
                nearest[index], has_changed = intersection, True
    return nearest


def _is_dominated_by(nearest: Sequence[int], head: int, index: int) -> bool:
    while index not in (head, 0, -1):
        index = nearest[index]
    return index == head


def _find_loop_body(index: int, head: int, predecessors: Sequence[Sequence[int]]) -> set[int]:
    """Return the indices from which `index` is reachable without passing through the loop's head."""
    body, worklist = {index, head}, [index]
    while worklist:
        for predecessor in predecessors[worklist.pop()]:
            if predecessor not in body:
                body.add(predecessor)
                worklist.append(predecessor)
    return body
