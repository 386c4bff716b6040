"""Machine code, decoded: what each instruction computes, where it accesses memory, where it branches to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.opcodes import make_semantics
from tvmconv.analysis.sass.interpreter.operands import (
    Constants,
    OperandReader,
    Values,
    is_predicate,
    parse_address,
    parse_predicate,
)
from tvmconv.analysis.sass.interpreter.semantics import Array, SassSemantics
from tvmconv.analysis.sass.interpreter.slicing import slice_for_addresses
from tvmconv.analysis.sass.loops import find_successors
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.gpu_specs import VECTOR_BYTES

UNSUPPORTED_OPCODES = ("RET", "BRX", "BRXU", "JMP", "JMX", "KILL")
BRANCH_OPCODES = ("BRA", "CALL", "BSSY", "BSYNC", "BREAK", "EXIT", *UNSUPPORTED_OPCODES)
_MEMORY_OPCODES = frozenset(opcode for opcodes in ACCESSES.values() for opcode in opcodes)
_MODIFIER_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass
class DecodedInstruction:
    """An instruction.

    Attributes:
        instruction: as it is written.
        guard: the predicate on which it is executed; None where it always is.
        semantics: what it computes; None for a branch.
        affects_addresses: whether an address or a branch comes of that.
        target_index: the place in the listing that it branches to.
        address_operands: that it accesses: one, or of a copy two, the first in shared memory.
        fill_guard: of a copy, the predicate without which zeros are stored.
        access_bytes: that a thread accesses, or the row of a matrix.
    """

    instruction: SassInstruction
    guard: OperandReader | None
    semantics: SassSemantics | None = None
    affects_addresses: bool = False
    target_index: int | None = None
    address_operands: tuple[OperandReader, ...] = ()
    fill_guard: OperandReader | None = None
    access_bytes: int = 0

    @property
    def is_branch(self) -> bool:
        """Whether threads may go on elsewhere, or wait for others."""
        return self.instruction.opcode in BRANCH_OPCODES

    @property
    def must_execute(self) -> bool:
        """Whether it has to be executed."""
        return self.affects_addresses or bool(self.address_operands) or self.is_branch


def decode_listing(
    listing: Listing, constants: Constants, special_registers: Mapping[str, Array]
) -> list[DecodedInstruction]:
    """The instructions of a kernel.

    Args:
        listing: of the kernel.
        constants: the words of constant banks that are known.
        special_registers: the values of special registers, when it is executed.
    """
    index_by_address = {entry.address: index for index, entry in enumerate(listing)}
    decoded = [
        _decode_branch(entry, index_by_address)
        if entry.opcode in BRANCH_OPCODES
        else _decode_instruction(entry, constants, special_registers)
        for entry in listing
    ]
    read_registers, written_registers, writes_all_threads, root_registers = zip(
        *map(_collect_registers, decoded), strict=True
    )
    for entry, affects_addresses in zip(
        decoded,
        slice_for_addresses(
            read_registers, written_registers, writes_all_threads, root_registers, find_successors(listing)
        ),
        strict=True,
    ):
        entry.affects_addresses = affects_addresses
    return decoded


def _decode_branch(instruction: SassInstruction, index_by_address: Mapping[int, int]) -> DecodedInstruction:
    guard = parse_predicate(instruction.predicate) if instruction.predicate else None
    operand_texts = instruction.operands.split(", ")
    if "DIV" in instruction.modifiers:  # taken by warps whose threads have parted where they may not have
        guard = parse_predicate("!PT")
    elif instruction.opcode == "BRA" and len(operand_texts) > 1:  # a second predicate
        guard = _combine_predicates(guard, parse_predicate(operand_texts[0]))
    return DecodedInstruction(
        instruction,
        guard,
        target_index=None if instruction.target_address is None else index_by_address[instruction.target_address],
    )


def _decode_instruction(
    instruction: SassInstruction, constants: Constants, special_registers: Mapping[str, Array]
) -> DecodedInstruction:
    decoded = DecodedInstruction(
        instruction,
        parse_predicate(instruction.predicate) if instruction.predicate else None,
        make_semantics(instruction, constants, special_registers),
    )
    if instruction.opcode not in _MEMORY_OPCODES:
        return decoded
    operand_texts = instruction.operands.split(", ")
    *first_texts, last_text = (operand_text for operand_text in operand_texts if "[" in operand_text)
    is_wide = "E" in instruction.modifiers  # of global memory; a copy's first address is one of shared memory
    decoded.address_operands = (
        *(parse_address(operand_text, constants) for operand_text in first_texts),
        parse_address(last_text, constants, is_wide=is_wide),
    )
    decoded.access_bytes = next(
        (_MODIFIER_BYTES[modifier] for modifier in instruction.modifiers if modifier in _MODIFIER_BYTES), 4
    )
    if instruction.opcode in ("LDSM", "STSM"):
        decoded.access_bytes = VECTOR_BYTES
    if instruction.opcode == "LDGSTS" and is_predicate(operand_texts[-1]):
        decoded.fill_guard = parse_predicate(operand_texts[-1])
    return decoded


def _combine_predicates(first_predicate: OperandReader | None, second_predicate: OperandReader) -> OperandReader:
    if first_predicate is None:
        return second_predicate

    def read_both(values: Values) -> Any:
        a, b = first_predicate.read(values), second_predicate.read(values)
        return None if a is None or b is None else a & b

    return OperandReader(first_predicate.register_bits | second_predicate.register_bits, read_both)


def _collect_registers(decoded: DecodedInstruction) -> tuple[int, int, bool, int]:
    """What an instruction reads and writes, whether for all threads, and which reads are of interest."""
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
