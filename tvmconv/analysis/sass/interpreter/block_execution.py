"""Execution of the machine code of blocks, restricted to the instructions that addresses and branches depend on.

The threads of several blocks are executed together, one instruction at a time for all threads that have reached it.
Diverged threads of a warp converge where the compiler says so (`BSSY`, `BSYNC`), and the threads at the smallest index
execute first. Blocks and warps do not wait for one another, because their requests do not depend on memory contents. A
kernel whose requests do depend on them raises an error.

Most of a kernel, its arithmetic, affects no memory request. An instruction does if an address, a predicate of an
access, a branch or another such instruction reads its result before another one overwrites it. This is liveness (Aho,
Lam, Sethi and Ullman, "Compilers", 9.2.5) of the registers that accesses and branches read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.sass.instruction_mix import ACCESSES, find_predecessors, find_successors
from tvmconv.analysis.sass.interpreter.instruction import Array, SassSemantics
from tvmconv.analysis.sass.interpreter.operands import (
    FIRST_PREDICATE,
    FIRST_STACK_SLOT,
    Constants,
    OperandReader,
    Values,
    combine_operands,
    is_predicate,
    parse_address,
    parse_predicate,
)
from tvmconv.analysis.sass.interpreter.semantics import make_semantics
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.emulator.threads import BlockIndex
from tvmconv.errors import AnalysisError
from tvmconv.target import VECTOR_BYTES, WARP_SIZE

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
        second_guard = parse_predicate(operands[0])
        guard = combine_operands(np.logical_and, guard, second_guard) if guard else second_guard
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


MAX_INSTRUCTIONS = 4_000_000  # default limit of executed instructions
_STACK_WORDS = 4096


@dataclass(frozen=True)
class WarpRequest:
    """Memory request of one execution of an instruction by some warps."""

    instruction_index: int  # index of the instruction in the listing
    addresses: NDArray[np.int64]  # addresses in bytes, of shape (warps, 32)
    is_active: NDArray[np.bool_]  # whether a thread takes part, of the same shape
    access_bytes: int  # bytes per thread
    # source addresses of a copy from global to shared memory, of the same shape; else None
    source_addresses: NDArray[np.int64] | None = None
    # whether a thread of a copy reads its source instead of storing zeros, of the same shape
    is_read: NDArray[np.bool_] | None = None


AccessCallback = Callable[[WarpRequest], None]
Key = TypeVar("Key")


@dataclass(frozen=True)
class BlockExecution:
    """Result of the execution of some blocks."""

    executions_by_block: NDArray[np.int64]  # executions by a warp, of shape (instructions, blocks)
    backward_branches_by_block: NDArray[np.int64]  # times that a warp takes each branch backward, of the same shape
    num_executed: int  # executed instructions, each for all threads that have reached it


class SassInterpreter:
    """Interpreter of a kernel's machine code."""

    def __init__(self, listing: Listing, launch: LaunchConfig, constants: Constants) -> None:
        self._launch = launch
        self._num_warps = ceil_div(launch.threads_per_block, WARP_SIZE)
        self._special_registers: dict[str, Array] = {}
        self._instructions = decode_listing(listing, constants, self._special_registers)
        join_targets = {instruction.target_index for instruction in self._instructions}  # threads may join here
        join_targets |= {index + 1 for index, instruction in enumerate(listing) if instruction.opcode == "BSYNC"}
        self._next_required = [len(listing)] * (len(listing) + 1)  # index of the next instruction to execute
        for index in reversed(range(len(listing))):
            is_required = index in join_targets or self._instructions[index].must_execute
            self._next_required[index] = index if is_required else self._next_required[index + 1]

    def execute_blocks(
        self, blocks: Sequence[BlockIndex], on_access: AccessCallback, max_instructions: int | None = None
    ) -> BlockExecution:
        """Execute some blocks."""
        self._special_registers.clear()
        self._special_registers.update(self._evaluate_special_registers(blocks))
        is_thread = np.arange(self._num_warps * WARP_SIZE) < self._launch.threads_per_block
        mask, limit = np.tile(is_thread, len(blocks)), max_instructions or MAX_INSTRUCTIONS
        return _BlockExecutor(self._instructions, self._next_required, mask, len(blocks), on_access, limit).execute()

    def _evaluate_special_registers(self, blocks: Sequence[BlockIndex]) -> dict[str, Array]:
        x, y, _ = self._launch.block
        thread = np.tile(np.arange(self._num_warps * WARP_SIZE), len(blocks))
        registers = {
            "SR_TID.X": thread % x,
            "SR_TID.Y": thread // x % y,
            "SR_TID.Z": thread // (x * y),
            "SR_LANEID": thread % WARP_SIZE,
            "SRZ": np.zeros(1),
        }
        block_indices = np.repeat(np.array(blocks, np.int64), self._num_warps * WARP_SIZE, axis=0)
        for axis, name in enumerate("XYZ"):
            is_uniform = len({block[axis] for block in blocks}) == 1
            registers[f"SR_CTAID.{name}"] = block_indices[:1, axis] if is_uniform else block_indices[:, axis]
        cluster_x, cluster_y, cluster_z = self._launch.cluster
        cta_rank = block_indices % (cluster_x, cluster_y, cluster_z) @ (1, cluster_x, cluster_x * cluster_y)
        registers["SR_CgaCtaId"] = cta_rank if cluster_x * cluster_y * cluster_z > 1 else np.zeros(1)
        return {name: value.astype(np.uint32) for name, value in registers.items()}


class _BlockExecutor:
    def __init__(
        self,
        instructions: Sequence[DecodedInstruction],
        next_required: Sequence[int],
        thread_mask: NDArray[np.bool_],
        num_blocks: int,
        on_access: AccessCallback,
        max_instructions: int,
    ) -> None:
        self._instructions, self._next_required = instructions, next_required
        self._on_access, self._max_instructions = on_access, max_instructions
        self._thread_mask, self._num_blocks = thread_mask, num_blocks
        self._num_thread_mask_warps = self._count_warps(thread_mask)
        self._values: Values = [None] * (FIRST_STACK_SLOT + _STACK_WORDS)
        self._values[:FIRST_PREDICATE] = [np.zeros(1, np.uint32)] * FIRST_PREDICATE
        self._values[FIRST_PREDICATE:FIRST_STACK_SLOT] = [np.zeros(1, bool)] * (FIRST_STACK_SLOT - FIRST_PREDICATE)
        self._masks_by_index: dict[int, NDArray[np.bool_]] = {0: thread_mask}
        self._convergence_masks: dict[str, NDArray[np.bool_]] = {}  # threads that have to converge, by barrier register
        self._waiting_masks: dict[tuple[str, int], NDArray[np.bool_]] = {}  # threads at each BSYNC, by register, index
        self._exited = ~thread_mask
        shape = len(instructions) + 1, num_blocks  # the counts of warps are those of each block
        self._num_entered = np.zeros(shape, np.int64)  # warps that start a straight run of instructions at each index
        self._num_left = np.zeros(shape, np.int64)  # warps whose run ends before each index
        self._num_backward_branches = np.zeros(shape, np.int64)
        self._num_executed = 0

    def execute(self) -> BlockExecution:
        """Execute the blocks until all threads have exited."""
        while self._masks_by_index:
            index = min(self._masks_by_index)
            self._execute_from(index, self._masks_by_index.pop(index))
            if not self._masks_by_index and self._waiting_masks:
                self._release_waiting(force=True)
        num_inside = np.cumsum(self._num_entered - self._num_left, axis=0)
        return BlockExecution(num_inside[:-1], self._num_backward_branches[:-1], self._num_executed)

    def _execute_from(self, index: int, mask: NDArray[np.bool_]) -> None:
        """Execute from one index on until the threads diverge, join others, wait or exit."""
        is_full = self._is_whole(mask)
        num_warps = self._num_thread_mask_warps if is_full else self._count_warps(mask)
        self._num_entered[index] += num_warps
        instructions, next_required = self._instructions, self._next_required
        while True:
            next_index = next_required[index]
            if next_index >= len(instructions):
                self._num_left[len(instructions)] += num_warps
                return
            index = next_index
            if self._masks_by_index and index in self._masks_by_index:  # other threads wait here to execute
                self._num_left[index] += num_warps
                _add_threads(self._masks_by_index, index, mask)
                return
            self._num_executed += 1
            if self._num_executed > self._max_instructions:
                raise AnalysisError(f"the machine code takes more than {self._max_instructions:,} steps to execute")
            instruction = instructions[index]
            if instruction.address_operands:
                self._access(index, instruction, mask)
            if instruction.affects_addresses:
                self._compute(instruction, None if is_full else mask)
            if instruction.is_branch:
                continuing = self._branch(index, instruction, mask)
                if continuing is None:
                    self._num_left[index + 1] += num_warps
                    return
                if continuing is not mask:
                    self._num_left[index + 1] += num_warps
                    mask, is_full, num_warps = continuing, self._is_whole(continuing), self._count_warps(continuing)
                    self._num_entered[index + 1] += num_warps
            index += 1

    def _count_warps(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the number of warps of each block that have a thread in a mask."""
        return mask.reshape(self._num_blocks, -1, WARP_SIZE).any(axis=2).sum(axis=1)

    def _is_whole(self, mask: NDArray[np.bool_]) -> bool:
        return mask is self._thread_mask or bool((mask == self._thread_mask).all())

    def _apply_guard(self, instruction: DecodedInstruction, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if instruction.guard is None:
            return mask
        value = instruction.guard.read(self._values)
        if value is None:
            raise AnalysisError(f"the predicate of {instruction.instruction.text} depends on an unknown value")
        return mask & value

    def _compute(self, instruction: DecodedInstruction, mask: NDArray[np.bool_] | None) -> None:
        semantics = instruction.semantics
        assert semantics is not None
        values = self._values
        results: Sequence[Array | None] = [None] * len(semantics.written_registers)
        if semantics.function:
            operands = [source.read(values) for source in semantics.sources]
            if all(value is not None for value in operands):
                results = semantics.function(*operands)
        if instruction.guard is not None:
            guard_value = instruction.guard.read(values)
            if guard_value is None:
                results, mask = [None] * len(semantics.written_registers), None
            else:
                mask = guard_value if mask is None else mask & guard_value
                if len(mask) == 1:
                    if not mask[0]:
                        return
                    mask = None
        for number, value in zip(semantics.written_registers, results, strict=True):
            if number is None:
                continue
            previous = values[number]
            if mask is None or value is None or (previous is None and bool(mask.all())):
                values[number] = value
            else:
                values[number] = np.where(mask, value, np.zeros(1, value.dtype) if previous is None else previous)

    def _access(self, index: int, instruction: DecodedInstruction, mask: NDArray[np.bool_]) -> None:
        mask = self._apply_guard(instruction, mask)
        if not mask.any():
            return
        values = [source.read(self._values) for source in instruction.address_operands]
        addresses = [_group_by_warp(value.view(np.int64), mask) for value in values if value is not None]
        if len(addresses) < len(values):
            raise AnalysisError(f"the address of {instruction.instruction.text} depends on an unknown value")
        request = WarpRequest(index, addresses[0], _group_by_warp(mask, mask), instruction.access_bytes)
        if len(addresses) > 1:
            is_read = mask
            if instruction.fill_guard:
                fill_value = instruction.fill_guard.read(self._values)
                if fill_value is None:
                    raise AnalysisError(f"the fill predicate of {instruction.instruction.text} is an unknown value")
                is_read = mask & fill_value
            request = replace(request, source_addresses=addresses[1], is_read=_group_by_warp(is_read, mask))
        self._on_access(request)

    def _branch(self, index: int, instruction: DecodedInstruction, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Return the threads that continue after an instruction: `mask` itself if all do, None if none does."""
        opcode = instruction.instruction.opcode
        register = instruction.instruction.operands.split(",")[0].strip()
        if opcode == "BSSY":
            previous_mask = self._convergence_masks.get(register, mask)  # the warps of `mask` start a new region
            self._convergence_masks[register] = np.where(_spread_over_warps(mask), mask, previous_mask)
            return mask
        if opcode == "BREAK":
            leaving_mask = self._apply_guard(instruction, mask)
            if register in self._convergence_masks:
                self._convergence_masks[register] = self._convergence_masks[register] & ~leaving_mask
            return mask
        if opcode == "BSYNC":
            return self._converge(index, register, mask)
        taken_mask = self._apply_guard(instruction, mask)
        if not taken_mask.any():
            return mask
        fallthrough_mask = mask & ~taken_mask
        if opcode in UNSUPPORTED_OPCODES:
            raise AnalysisError(f"the machine code has the unsupported instruction {instruction.instruction.name}")
        if opcode == "EXIT":
            self._exited = self._exited | taken_mask
            self._release_waiting()
        elif instruction.target_index is not None and instruction.target_index != index:
            target_mask = self._masks_by_index.get(instruction.target_index)
            num_present = 0 if target_mask is None else self._count_warps(target_mask)
            merged_mask = _add_threads(self._masks_by_index, instruction.target_index, taken_mask)
            if instruction.target_index < index:  # a warp that is at the target already continues as one warp
                self._num_backward_branches[index] += self._count_warps(merged_mask) - num_present
        else:
            raise AnalysisError("the machine code has an infinite loop, a branch to itself")
        return fallthrough_mask if fallthrough_mask.any() else None

    def _converge(self, index: int, register: str, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        expected_mask = self._convergence_masks.get(register)
        if expected_mask is None:
            return mask
        if not (expected_mask & _spread_over_warps(mask) & ~mask & ~self._exited).any():
            return mask
        _add_threads(self._waiting_masks, (register, index), mask)
        self._release_waiting()
        return None

    def _release_waiting(self, *, force: bool = False) -> None:
        """Release the waiting threads of warps whose threads have all arrived, or of all warps if `force`."""
        for (register, index), waiting_mask in list(self._waiting_masks.items()):
            missing_mask = self._convergence_masks[register] & ~waiting_mask & ~self._exited
            is_incomplete = _spread_over_warps(missing_mask) & (not force)
            released_mask = waiting_mask & ~is_incomplete
            if not released_mask.any():
                continue
            remaining_mask = waiting_mask & is_incomplete
            if remaining_mask.any():
                self._waiting_masks[register, index] = remaining_mask
            else:
                del self._waiting_masks[register, index]
            _add_threads(self._masks_by_index, index + 1, released_mask)


def _add_threads(masks: dict[Key, NDArray[np.bool_]], key: Key, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Add threads to those that are waiting at a place, and return all of them."""
    masks[key] = masks[key] | mask if key in masks else mask
    return masks[key]


def _spread_over_warps(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask of all threads of the warps that have a thread in `mask`."""
    return np.repeat(mask.reshape(-1, WARP_SIZE).any(axis=1), WARP_SIZE)


def _group_by_warp(value: Array, shape_mask: Array) -> Array:
    """Reshape one value per thread to (warps, 32)."""
    full_value: Array = value if value.shape == shape_mask.shape else np.repeat(value, len(shape_mask))
    return full_value.reshape(-1, WARP_SIZE)
