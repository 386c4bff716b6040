"""Decoder of machine code: the semantics, memory addresses and branch target of each instruction.

Most of a kernel, its arithmetic, affects no memory request. An instruction does if an address, a predicate of an
access, a branch or another such instruction reads its result before another one overwrites it. This is liveness (Aho,
Lam, Sethi and Ullman, "Compilers", 9.2.5) of the registers that accesses and branches read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.operands import (
    Constants,
    OperandReader,
    Values,
    is_predicate,
    parse_address,
    parse_predicate,
)
from tvmconv.analysis.sass.interpreter.semantics import Array, SassSemantics, make_semantics
from tvmconv.analysis.sass.loops import find_predecessors, find_successors
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.target import VECTOR_BYTES

UNSUPPORTED_OPCODES = ("RET", "BRX", "BRXU", "JMP", "JMX", "KILL")
BRANCH_OPCODES = ("BRA", "CALL", "BSSY", "BSYNC", "BREAK", "EXIT", *UNSUPPORTED_OPCODES)
_MEMORY_OPCODES = frozenset(opcode for opcodes in ACCESSES.values() for opcode in opcodes)
_MODIFIER_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass
class DecodedInstruction:
    """A decoded instruction."""

    instruction: SassInstruction  # instruction in the listing
    guard: OperandReader | None  # predicate of the instruction; None if it always executes
    semantics: SassSemantics | None = None  # computation of the instruction; None for a branch
    affects_addresses: bool = False  # whether an address or a branch depends on its results
    target_index: int | None = None  # index of the branch target in the listing
    # accessed addresses: one, or two for a copy, of which the first is in shared memory
    address_operands: tuple[OperandReader, ...] = ()
    fill_guard: OperandReader | None = None  # predicate of a copy that stores zeros if it is false
    access_bytes: int = 0  # bytes per thread, or per matrix row

    @property
    def is_branch(self) -> bool:
        """Whether threads may jump, wait or exit at this instruction."""
        return self.instruction.opcode in BRANCH_OPCODES

    @property
    def must_execute(self) -> bool:
        """Whether the interpreter has to execute the instruction."""
        return self.affects_addresses or bool(self.address_operands) or self.is_branch


def decode_listing(
    listing: Listing, constants: Constants, special_registers: Mapping[str, Array]
) -> list[DecodedInstruction]:
    """Decode the instructions of a kernel."""
    index_by_address = {entry.address: index for index, entry in enumerate(listing)}
    decoded = [
        _decode_branch(entry, index_by_address)
        if entry.opcode in BRANCH_OPCODES
        else _decode_instruction(entry, constants, special_registers)
        for entry in listing
    ]
    reads, writes, writes_all_threads, roots = zip(*map(_collect_registers, decoded), strict=True)
    affects_addresses = _find_affecting(reads, writes, writes_all_threads, roots, find_successors(listing))
    for entry, is_affecting in zip(decoded, affects_addresses, strict=True):
        entry.affects_addresses = is_affecting
    return decoded


def _decode_branch(instruction: SassInstruction, index_by_address: Mapping[int, int]) -> DecodedInstruction:
    guard = parse_predicate(instruction.predicate) if instruction.predicate else None
    operands = instruction.operands.split(", ")
    if "DIV" in instruction.modifiers:  # only warps that diverged unexpectedly take this branch
        guard = parse_predicate("!PT")
    elif instruction.opcode == "BRA" and len(operands) > 1:  # the first operand is a second predicate
        guard = _combine_predicates(guard, parse_predicate(operands[0]))
    target_address = instruction.target_address
    target_index = None if target_address is None else index_by_address[target_address]
    return DecodedInstruction(instruction, guard, target_index=target_index)


def _decode_instruction(
    instruction: SassInstruction, constants: Constants, special_registers: Mapping[str, Array]
) -> DecodedInstruction:
    guard = parse_predicate(instruction.predicate) if instruction.predicate else None
    decoded = DecodedInstruction(instruction, guard, make_semantics(instruction, constants, special_registers))
    if instruction.opcode not in _MEMORY_OPCODES:
        return decoded
    operands = instruction.operands.split(", ")
    *first_texts, last_text = (text for text in operands if "[" in text)
    is_wide = "E" in instruction.modifiers  # applies to the global address; a copy's first address is in shared memory
    decoded.address_operands = (
        *(parse_address(text, constants) for text in first_texts),
        parse_address(last_text, constants, is_wide=is_wide),
    )
    widths = (_MODIFIER_BYTES[modifier] for modifier in instruction.modifiers if modifier in _MODIFIER_BYTES)
    decoded.access_bytes = next(widths, 4)
    if instruction.opcode in ("LDSM", "STSM"):
        decoded.access_bytes = VECTOR_BYTES
    if instruction.opcode == "LDGSTS" and is_predicate(operands[-1]):
        decoded.fill_guard = parse_predicate(operands[-1])
    return decoded


def _combine_predicates(first_predicate: OperandReader | None, second_predicate: OperandReader) -> OperandReader:
    if first_predicate is None:
        return second_predicate

    def read_both(values: Values) -> Any:
        a, b = first_predicate.read(values), second_predicate.read(values)
        return None if a is None or b is None else a & b

    return OperandReader(first_predicate.register_bits | second_predicate.register_bits, read_both)


def _collect_registers(decoded: DecodedInstruction) -> tuple[int, int, bool, int]:
    """Return bit sets of the read and written registers, whether all threads write, and the reads to slice for."""
    guard = decoded.guard.register_bits if decoded.guard else 0
    read_registers, written_registers = guard, 0
    for source in decoded.semantics.sources if decoded.semantics else ():
        read_registers |= source.register_bits
    for number in decoded.semantics.written_registers if decoded.semantics else ():
        written_registers |= 0 if number is None else 1 << number
    root_registers = guard if decoded.is_branch else 0
    for source in (*decoded.address_operands, *((decoded.fill_guard,) if decoded.fill_guard else ())):
        root_registers |= source.register_bits | guard
    return read_registers, written_registers, decoded.guard is None, root_registers


def _find_affecting(
    read_registers: Sequence[int],
    written_registers: Sequence[int],
    writes_all_threads: Sequence[bool],
    root_registers: Sequence[int],
    successors: Sequence[Sequence[int]],
) -> list[bool]:
    """Return for each instruction whether it affects a memory request; registers are sets of bits."""
    live_registers = [0] * len(read_registers)  # before each instruction
    predecessors = find_predecessors(successors)
    worklist, is_queued = list(range(len(read_registers))), [True] * len(read_registers)
    while worklist:
        index = worklist.pop()
        is_queued[index] = False
        live_out = 0
        for neighbor in successors[index]:
            live_out |= live_registers[neighbor]
        live_in = live_out | root_registers[index]
        if written_registers[index] & live_out:
            kept = live_out & ~written_registers[index] if writes_all_threads[index] else live_out
            live_in = kept | read_registers[index] | root_registers[index]
        if live_in != live_registers[index]:
            live_registers[index] = live_in
            for neighbor in predecessors[index]:
                if not is_queued[neighbor]:
                    is_queued[neighbor] = True
                    worklist.append(neighbor)
    return [
        any(written_registers[index] & live_registers[neighbor] for neighbor in successor_indices)
        for index, successor_indices in enumerate(successors)
    ]
