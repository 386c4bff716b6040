"""What one block's accesses ask of shared and global memory, as the machine code makes them: exact, where it is known.

The text of a kernel has accesses that the compiler merges, drops, or makes only once; its machine code has those that
there are. They are told by the statement of the text that they come from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.block_counts import count_block
from tvmconv.analysis.memory.bank_conflicts import SharedAccess, is_shared
from tvmconv.analysis.memory.coalescing import GlobalAccess, select_middle_block
from tvmconv.analysis.memory.requests import CostliestRequest, find_worst_requests, select_costlier
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter import block_execution as executed
from tvmconv.analysis.sass.interpreter.request_counts import InstructionCounts, count_requests, list_array_names
from tvmconv.analysis.sass.linked_sources import link_sources
from tvmconv.analysis.tir.accesses import iterate_accesses
from tvmconv.analysis.tir.scopes import has_instructions
from tvmconv.emulator.observers import AccessSite, MemorySpace
from tvmconv.errors import AnalysisError, CompileError

if TYPE_CHECKING:
    from tvmconv.analysis.sass.linked_sources import LinkedSources
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.compiler.sass_listing import SassInstruction
    from tvmconv.emulator.blocks import BlockIndex
    from tvmconv.kernel import Kernel

RequestKind = Literal["load", "store"]
REQUEST_KINDS: tuple[RequestKind, ...] = ("load", "store")
MAX_BLOCK_INSTRUCTIONS = 1_000_000  # instructions of a block that are executed: some seconds
NO_STATEMENT = -1  # of what the compiler has moved to a line without one


@dataclass(frozen=True)
class BlockAccessCounts:
    """What a block of a step asks.

    Attributes:
        shared_accesses: its accesses to shared memory.
        global_accesses: its accesses to global memory, but for TMA's, constant memory's and textures'.
        instruction_counts: its instructions, in their order, and what each does; None where the text was counted
            instead.
        fallback_reason: why the machine code was not executed; empty where it was.
    """

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]
    instruction_counts: list[tuple[SassInstruction, InstructionCounts]] | None = None
    fallback_reason: str = ""


_COUNTS_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockAccessCounts]] = WeakKeyDictionary()  # steps by name


def count_block_accesses(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockAccessCounts:
    """What the middle block of one of a kernel's steps asks.

    Where there is no nvdisasm, or the machine code is not understood or takes more than `MAX_BLOCK_INSTRUCTIONS` to
    execute, it is what the text asks (`tvmconv.analysis.block_counts`).

    Raises:
        AnalysisError: what the kernel does cannot be counted, or depends on the data.
    """
    counts_by_kernel = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in counts_by_kernel:
        try:
            return count_sass_accesses(kernel, lowered_kernel)
        except (AnalysisError, CompileError) as error:
            text_counts = count_block(kernel, lowered_kernel)
            counts_by_kernel[lowered_kernel.name] = BlockAccessCounts(
                text_counts.shared_accesses, text_counts.global_accesses, fallback_reason=str(error)
            )
    return counts_by_kernel[lowered_kernel.name]


def count_sass_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int | None = None
) -> BlockAccessCounts:
    """What the middle block of one of a kernel's steps asks, by its machine code alone.

    Args:
        kernel: for an NVIDIA architecture.
        lowered_kernel: one of its steps.
        max_instructions: number of instructions of the block that are executed at most; `MAX_BLOCK_INSTRUCTIONS` by
            default.

    Raises:
        AnalysisError: the machine code is not understood, or takes more steps to execute.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    counts_by_kernel = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in counts_by_kernel:
        counts_by_kernel[lowered_kernel.name] = _count_from_sass(
            kernel, lowered_kernel, max_instructions or MAX_BLOCK_INSTRUCTIONS
        )
    if counts_by_kernel[lowered_kernel.name].instruction_counts is None:
        raise AnalysisError(counts_by_kernel[lowered_kernel.name].fallback_reason)
    return counts_by_kernel[lowered_kernel.name]


def _count_from_sass(kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int) -> BlockAccessCounts:
    kernel_index = kernel.kernels.index(lowered_kernel)
    sources = link_sources(kernel)[kernel_index]
    instruction_counts = count_requests(
        kernel.executable.kernels[kernel_index],
        sources.listing,
        str(kernel.device.arch),
        [select_middle_block(lowered_kernel)],
        max_instructions=max_instructions,
    )
    names = list_array_names(kernel, lowered_kernel)
    buffers = _SharedBufferNames(sources, instruction_counts)
    shared_counts: defaultdict[tuple[int, RequestKind, str], list[InstructionCounts]] = defaultdict(list)
    global_counts: defaultdict[tuple[int, RequestKind, str], list[InstructionCounts]] = defaultdict(list)
    for instruction, counts in zip(sources.listing, instruction_counts, strict=True):
        statement = sources.find_statement(instruction)
        statement_index = NO_STATEMENT if statement is None else statement
        for kind in REQUEST_KINDS:
            if counts.num_requests and instruction.opcode in ACCESSES["shared", kind]:
                shared_counts[statement_index, kind, buffers.find_name(kind, statement_index, counts)].append(counts)
            if counts.num_sectors and instruction.opcode in ACCESSES["global", kind]:
                global_counts[statement_index, kind, ", ".join(names[n] for n in sorted(counts.array_indices))].append(
                    counts
                )
    return BlockAccessCounts(
        [_sum_shared_access(key, sources) for key, sources in sorted(shared_counts.items())],
        [_sum_global_access(key, sources) for key, sources in sorted(global_counts.items())],
        list(zip(sources.listing, instruction_counts, strict=True)),
    )


def count_instructions(
    kernel: Kernel, lowered_kernel: LoweredKernel, block: BlockIndex
) -> list[tuple[SassInstruction, InstructionCounts]]:
    """Return the instructions of a step, in their order, and what each does in one block.

    Args:
        kernel: for an NVIDIA architecture.
        lowered_kernel: one of its steps.
        block: of the grid, as (x, y, z).

    Raises:
        AnalysisError: the machine code is not understood, or takes more than `MAX_BLOCK_INSTRUCTIONS` to execute.
        CompileError: the kernel does not compile, or there is no disassembler.
    """
    kernel_index = kernel.kernels.index(lowered_kernel)
    listing = link_sources(kernel)[kernel_index].listing
    instruction_counts = count_requests(
        kernel.executable.kernels[kernel_index],
        listing,
        str(kernel.device.arch),
        [block],
        max_instructions=MAX_BLOCK_INSTRUCTIONS,
    )
    return list(zip(listing, instruction_counts, strict=True))


def find_costliest_requests(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    """Of each access of the middle block the first request of a warp that takes most, in the order of the text.

    Where the machine code is not known or understood, of each access of the text
    (`tvmconv.analysis.memory.requests.find_worst_requests`).

    Raises:
        AnalysisError: an access cannot be executed, or depends on the data.
    """
    try:
        return _find_costliest_in_sass(kernel, lowered_kernel)
    except (AnalysisError, CompileError):
        return find_worst_requests(kernel, lowered_kernel)


def _find_costliest_in_sass(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    kernel_index = kernel.kernels.index(lowered_kernel)
    sources = link_sources(kernel)[kernel_index]
    costliest: dict[tuple[int, MemorySpace], CostliestRequest] = {}

    def note_request(warp_request: executed.WarpRequest) -> None:
        instruction, copies = sources.listing[warp_request.instruction_index], warp_request.source_addresses is not None
        memory_parts: tuple[tuple[MemorySpace, NDArray[np.int64] | None, NDArray[np.bool_] | None], ...] = (
            ("shared", warp_request.addresses, warp_request.is_active),
            (
                "global",
                *(
                    (warp_request.source_addresses, warp_request.is_read)
                    if copies
                    else (warp_request.addresses, warp_request.is_active)
                ),
            ),
        )
        for space, addresses, active in memory_parts:
            for kind in REQUEST_KINDS:
                if addresses is None or active is None or instruction.opcode not in ACCESSES[space, kind]:
                    continue
                site = AccessSite(0, space, kind, "", warp_request.access_bytes)
                if worst := select_costlier(
                    costliest.get((warp_request.instruction_index, space)), site, addresses, active, is_copy=copies
                ):
                    costliest[warp_request.instruction_index, space] = worst

    arch = str(kernel.device.arch)
    instruction_counts = count_requests(
        kernel.executable.kernels[kernel_index],
        sources.listing,
        arch,
        [select_middle_block(lowered_kernel)],
        note_request,
        MAX_BLOCK_INSTRUCTIONS,
    )
    names, buffers = list_array_names(kernel, lowered_kernel), _SharedBufferNames(sources, instruction_counts)
    requests_by_access: dict[tuple[int, MemorySpace, RequestKind, str], CostliestRequest] = {}
    for (instruction_index, space), request in costliest.items():
        statement = sources.find_statement(sources.listing[instruction_index])
        statement_index, counts = (
            NO_STATEMENT if statement is None else statement,
            instruction_counts[instruction_index],
        )
        array_text = ", ".join(names[n] for n in sorted(counts.array_indices))
        name = buffers.find_name(request.kind, statement_index, counts) if space == "shared" else array_text
        key = statement_index, space, request.kind, name
        if key not in requests_by_access or requests_by_access[key].cost < request.cost:
            requests_by_access[key] = replace(request, name=name, statement_index=statement_index)
    return [requests_by_access[key] for key in sorted(requests_by_access)]


def _sum_shared_access(key: tuple[int, RequestKind, str], instruction_counts: list[InstructionCounts]) -> SharedAccess:
    statement, kind, buffer = key
    return SharedAccess(
        kind=kind,
        buffer=buffer,
        num_requests=sum(counts.num_requests for counts in instruction_counts),
        wavefronts=sum(counts.num_wavefronts for counts in instruction_counts),
        min_wavefronts=sum(counts.min_wavefronts for counts in instruction_counts),
        nbytes=max(counts.access_bytes for counts in instruction_counts),
        statement_index=statement,
    )


def _sum_global_access(key: tuple[int, RequestKind, str], instruction_counts: list[InstructionCounts]) -> GlobalAccess:
    statement, kind, array = key
    return GlobalAccess(
        kind=kind,
        array=array,
        num_requests=sum(counts.num_requests for counts in instruction_counts),
        sectors=sum(counts.num_sectors for counts in instruction_counts),
        min_sectors=sum(counts.min_sectors for counts in instruction_counts),
        nbytes=max(counts.access_bytes for counts in instruction_counts),
        num_lines=sum(counts.num_lines for counts in instruction_counts),
        statement_index=statement,
    )


class _SharedBufferNames:
    """The shared buffers of a step, by where their stores go: of a statement that reads several, which one it is."""

    def __init__(self, sources: LinkedSources, instruction_counts: Iterable[InstructionCounts]) -> None:
        self._has_instructions = has_instructions(sources.lowered_kernel.function)
        self._names_by_statement: defaultdict[tuple[str, int], dict[str, None]] = defaultdict(dict)
        if (
            not self._has_instructions
            and sources.lowered_kernel.shared_bytes + sources.lowered_kernel.dynamic_shared_bytes
        ):
            for access in iterate_accesses(sources.lowered_kernel.function, is_shared):
                self._names_by_statement[access.kind, access.statement_index][str(access.buffer.name)] = None
        self._address_ranges: dict[str, tuple[int, int]] = {}
        for instruction, counts in zip(sources.listing, instruction_counts, strict=True):
            statement = sources.find_statement(instruction)
            names = self._names_by_statement.get(("store", NO_STATEMENT if statement is None else statement), {})
            if instruction.opcode in ACCESSES["shared", "store"] and counts.shared_address_range and len(names) == 1:
                (name,) = names
                first, last = self._address_ranges.get(name, counts.shared_address_range)
                self._address_ranges[name] = (
                    min(first, counts.shared_address_range[0]),
                    max(last, counts.shared_address_range[1]),
                )

    def find_name(self, kind: str, statement: int, counts: InstructionCounts) -> str:
        """The buffer that an instruction of a statement accesses; all that it may be, where that is not known."""
        if self._has_instructions:
            return "shared"
        names: Mapping[str, None] = self._names_by_statement.get((kind, statement), {})
        if counts.shared_address_range and len(names) != 1:
            first, last = counts.shared_address_range
            containing_buffers = [
                name
                for name, (first_address, last_address) in self._address_ranges.items()
                if first_address <= first and last <= last_address
            ]
            names = dict.fromkeys(name for name in containing_buffers if name in names or not names) or names
        return ", ".join(names) or "shared"
