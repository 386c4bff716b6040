"""Machine code, decoded: what each instruction computes, where it accesses memory, where it branches to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmconv.analysis.machine_code.executed.decide import deciding
from tvmconv.analysis.machine_code.executed.instructions import operation
from tvmconv.analysis.machine_code.executed.operands import (
    Constants,
    Source,
    Values,
    address,
    is_predicate,
    predicate,
)
from tvmconv.analysis.machine_code.executed.operations import Array, Operation
from tvmconv.analysis.machine_code.loops import successors
from tvmconv.analysis.machine_code.mix import ACCESSES
from tvmconv.compiler.listing import Instruction, Listing
from tvmconv.gpu import VECTOR_BYTES

REFUSED = ("RET", "BRX", "BRXU", "JMP", "JMX", "KILL")
BRANCHES = ("BRA", "CALL", "BSSY", "BSYNC", "BREAK", "EXIT", *REFUSED)
_MEMORY = frozenset(opcode for opcodes in ACCESSES.values() for opcode in opcodes)
_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass
class Decoded:
    """An instruction.

    Attributes:
        instruction: as it is written.
        guard: the predicate on which it is executed; None where it always is.
        does: what it computes; None for a branch.
        decides: whether an address or a branch comes of that.
        target: the place in the listing that it branches to.
        addresses: that it accesses: one, or of a copy two, the first in shared memory.
        filled: of a copy, the predicate without which zeros are stored.
        nbytes: that a thread accesses, or the row of a matrix.
    """

    instruction: Instruction
    guard: Source | None
    does: Operation | None = None
    decides: bool = False
    target: int | None = None
    addresses: tuple[Source, ...] = ()
    filled: Source | None = None
    nbytes: int = 0

    @property
    def branches(self) -> bool:
        """Whether threads may go on elsewhere, or wait for others."""
        return self.instruction.opcode in BRANCHES

    @property
    def matters(self) -> bool:
        """Whether it has to be executed."""
        return self.decides or bool(self.addresses) or self.branches


def decode(listing: Listing, constants: Constants, special: Mapping[str, Array]) -> list[Decoded]:
    """The instructions of a kernel.

    Args:
        listing: of the kernel.
        constants: the words of constant banks that are known.
        special: the values of special registers, when it is executed.
    """
    places = {each.address: place for place, each in enumerate(listing)}
    found = [_branch(each, places) if each.opcode in BRANCHES else _other(each, constants, special) for each in listing]
    reads, writes, kills, roots = zip(*map(_flow, found), strict=True)
    for each, decides in zip(found, deciding(reads, writes, kills, roots, successors(listing)), strict=True):
        each.decides = decides
    return found


def _branch(each: Instruction, places: Mapping[int, int]) -> Decoded:
    guard = predicate(each.predicate) if each.predicate else None
    parts = each.operands.split(", ")
    if "DIV" in each.modifiers:  # taken by warps whose threads have parted where they may not have
        guard = predicate("!PT")
    elif each.opcode == "BRA" and len(parts) > 1:  # a second predicate
        guard = _both(guard, predicate(parts[0]))
    return Decoded(each, guard, target=None if each.target is None else places[each.target])


def _other(each: Instruction, constants: Constants, special: Mapping[str, Array]) -> Decoded:
    step = Decoded(each, predicate(each.predicate) if each.predicate else None, operation(each, constants, special))
    if each.opcode not in _MEMORY:
        return step
    parts = each.operands.split(", ")
    *first, last = (part for part in parts if "[" in part)
    wide = "E" in each.modifiers  # of global memory; a copy's first address is one of shared memory
    step.addresses = (*(address(part, constants) for part in first), address(last, constants, wide=wide))
    step.nbytes = next((_BYTES[m] for m in each.modifiers if m in _BYTES), 4)
    if each.opcode in ("LDSM", "STSM"):
        step.nbytes = VECTOR_BYTES
    if each.opcode == "LDGSTS" and is_predicate(parts[-1]):
        step.filled = predicate(parts[-1])
    return step


def _both(one: Source | None, other: Source) -> Source:
    if one is None:
        return other

    def get(values: Values) -> Any:
        a, b = one.get(values), other.get(values)
        return None if a is None or b is None else a & b

    return Source(one.reads | other.reads, get)


def _flow(step: Decoded) -> tuple[int, int, bool, int]:
    """What an instruction reads and writes, whether for all threads, and which reads are of interest."""
    guard = step.guard.reads if step.guard else 0
    reads, writes = guard, 0
    for source in step.does.sources if step.does else ():
        reads |= source.reads
    for number in step.does.writes if step.does else ():
        writes |= 0 if number is None else 1 << number
    roots = guard if step.branches else 0
    for source in (*step.addresses, *((step.filled,) if step.filled else ())):
        roots |= source.reads | guard
    return reads, writes, step.guard is None, roots
