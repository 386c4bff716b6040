"""Counts of one block's requests to shared and global memory, taken from the machine code where it is available.

The compiler merges, drops and hoists accesses of the TIR, so only the machine code shows the accesses that are made.
The line table of the machine code relates each access to the TIR statement that it comes from.
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
MAX_BLOCK_INSTRUCTIONS = 1_000_000  # warp instructions of a block to interpret, which takes some seconds
NO_STATEMENT = -1  # statement index of an instruction that the compiler assigns to no line of the TIR


@dataclass(frozen=True)
class BlockAccessCounts:
    """Memory requests of one block of a device kernel.

    Attributes:
        shared_accesses: Accesses to shared memory.
        global_accesses: Accesses to global memory without those of TMA, constant memory and textures.
        instruction_counts: SASS instructions in their order with their counts; None if the TIR was counted instead.
        fallback_reason: Reason why the machine code was not interpreted; empty if it was.
    """

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]
    instruction_counts: list[tuple[SassInstruction, InstructionCounts]] | None = None
    fallback_reason: str = ""


_COUNTS_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockAccessCounts]] = WeakKeyDictionary()  # by device kernel's name


def count_block_accesses(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockAccessCounts:
    """Count the memory requests of the middle block of one of a kernel's device kernels.

    The TIR is counted instead (`tvmconv.analysis.block_counts`) if there is no nvdisasm, if the machine code has an
    unsupported instruction, or if the block executes more than `MAX_BLOCK_INSTRUCTIONS`.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        lowered_kernel: One of `kernel.kernels`.

    Returns:
        The requests of all accesses, cached per kernel.

    Raises:
        AnalysisError: The accesses cannot be counted, or they depend on the data.
    """
    cache = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        try:
            return count_sass_accesses(kernel, lowered_kernel)
        except (AnalysisError, CompileError) as error:
            tir_counts = count_block(kernel, lowered_kernel)
            cache[lowered_kernel.name] = BlockAccessCounts(
                tir_counts.shared_accesses, tir_counts.global_accesses, fallback_reason=str(error)
            )
    return cache[lowered_kernel.name]


def count_sass_accesses(
    kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int | None = None
) -> BlockAccessCounts:
    """Count the memory requests of the middle block of a device kernel from its machine code alone.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        lowered_kernel: One of the kernel's device kernels.
        max_instructions: Maximum number of warp instructions to interpret; `MAX_BLOCK_INSTRUCTIONS` by default.

    Returns:
        The requests of all accesses, cached per kernel.

    Raises:
        AnalysisError: The machine code has an unsupported instruction, or executes too many of them.
        CompileError: The kernel does not compile, or there is no disassembler.
    """
    cache = _COUNTS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        limit = max_instructions or MAX_BLOCK_INSTRUCTIONS
        cache[lowered_kernel.name] = _count_from_sass(kernel, lowered_kernel, limit)
    if cache[lowered_kernel.name].instruction_counts is None:
        raise AnalysisError(cache[lowered_kernel.name].fallback_reason)
    return cache[lowered_kernel.name]


def _interpret(
    kernel: Kernel,
    lowered_kernel: LoweredKernel,
    block: BlockIndex,
    max_instructions: int,
    on_access: executed.AccessCallback | None = None,
) -> tuple[LinkedSources, list[InstructionCounts]]:
    """Interpret a block's machine code, and return it with the counts of each instruction."""
    index, arch = kernel.kernels.index(lowered_kernel), str(kernel.device.arch)
    sources = link_sources(kernel)[index]
    compiled_kernel = kernel.executable.kernels[index]
    counts = count_requests(compiled_kernel, sources.listing, arch, [block], on_access, max_instructions)
    return sources, counts


def _count_from_sass(kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int) -> BlockAccessCounts:
    middle_block = select_middle_block(lowered_kernel)
    sources, instruction_counts = _interpret(kernel, lowered_kernel, middle_block, max_instructions)
    array_names = list_array_names(kernel, lowered_kernel)
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
                array = ", ".join(array_names[n] for n in sorted(counts.array_indices))
                global_counts[statement_index, kind, array].append(counts)
    return BlockAccessCounts(
        [_sum_shared_access(key, counts) for key, counts in sorted(shared_counts.items())],
        [_sum_global_access(key, counts) for key, counts in sorted(global_counts.items())],
        list(zip(sources.listing, instruction_counts, strict=True)),
    )


def count_instructions(
    kernel: Kernel, lowered_kernel: LoweredKernel, block: BlockIndex
) -> list[tuple[SassInstruction, InstructionCounts]]:
    """Return the SASS instructions of a device kernel in their order, each with its counts in one block.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        lowered_kernel: One of the kernel's device kernels.
        block: Index of the block in the grid as (x, y, z).

    Returns:
        Pairs of an instruction and its counts.

    Raises:
        AnalysisError: The machine code has an unsupported instruction, or executes more than
            `MAX_BLOCK_INSTRUCTIONS`.
        CompileError: The kernel does not compile, or there is no disassembler.
    """
    sources, instruction_counts = _interpret(kernel, lowered_kernel, block, MAX_BLOCK_INSTRUCTIONS)
    return list(zip(sources.listing, instruction_counts, strict=True))


def find_costliest_requests(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    """Return the costliest warp request of each access of the middle block, in the order of the TIR's statements.

    The accesses are those of the TIR (`tvmconv.analysis.memory.requests.find_worst_requests`) if the machine code
    cannot be interpreted.

    Args:
        kernel: Kernel for an NVIDIA architecture.
        lowered_kernel: One of `kernel.kernels`.

    Raises:
        AnalysisError: An access cannot be executed, or it depends on the data.
    """
    try:
        return _find_costliest_in_sass(kernel, lowered_kernel)
    except (AnalysisError, CompileError):
        return find_worst_requests(kernel, lowered_kernel)


def _find_costliest_in_sass(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    costliest: dict[tuple[int, MemorySpace], CostliestRequest] = {}
    listing = link_sources(kernel)[kernel.kernels.index(lowered_kernel)].listing

    def note_request(request: executed.WarpRequest) -> None:
        instruction, is_copy = listing[request.instruction_index], request.source_addresses is not None
        shared_part = request.addresses, request.is_active
        global_part = (request.source_addresses, request.is_read) if is_copy else shared_part
        memory_parts: tuple[tuple[MemorySpace, NDArray[np.int64] | None, NDArray[np.bool_] | None], ...] = (
            ("shared", *shared_part),
            ("global", *global_part),
        )
        for space, addresses, active in memory_parts:
            for kind in REQUEST_KINDS:
                if addresses is None or active is None or instruction.opcode not in ACCESSES[space, kind]:
                    continue
                site = AccessSite(0, space, kind, "", request.access_bytes)
                key = request.instruction_index, space
                if worst := select_costlier(costliest.get(key), site, addresses, active, is_copy=is_copy):
                    costliest[key] = worst

    middle_block = select_middle_block(lowered_kernel)
    sources, instruction_counts = _interpret(kernel, lowered_kernel, middle_block, MAX_BLOCK_INSTRUCTIONS, note_request)
    array_names, buffers = list_array_names(kernel, lowered_kernel), _SharedBufferNames(sources, instruction_counts)
    requests_by_access: dict[tuple[int, MemorySpace, RequestKind, str], CostliestRequest] = {}
    for (instruction_index, space), request in costliest.items():
        statement = sources.find_statement(listing[instruction_index])
        statement_index = NO_STATEMENT if statement is None else statement
        counts = instruction_counts[instruction_index]
        array_text = ", ".join(array_names[n] for n in sorted(counts.array_indices))
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
    """Names of a device kernel's shared buffers, by the address range that the stores to each buffer cover.

    The range tells which buffer an instruction accesses if its statement reads several buffers.
    """

    def __init__(self, sources: LinkedSources, instruction_counts: Iterable[InstructionCounts]) -> None:
        function = sources.lowered_kernel.function
        self._has_instructions = has_instructions(function)
        self._names_by_statement: defaultdict[tuple[str, int], dict[str, None]] = defaultdict(dict)
        shared_bytes = sources.lowered_kernel.shared_bytes + sources.lowered_kernel.dynamic_shared_bytes
        if not self._has_instructions and shared_bytes:
            for access in iterate_accesses(function, is_shared):
                self._names_by_statement[access.kind, access.statement_index][str(access.buffer.name)] = None
        self._address_ranges: dict[str, tuple[int, int]] = {}
        for instruction, counts in zip(sources.listing, instruction_counts, strict=True):
            statement = sources.find_statement(instruction)
            names = self._names_by_statement.get(("store", NO_STATEMENT if statement is None else statement), {})
            address_range = counts.shared_address_range
            if instruction.opcode in ACCESSES["shared", "store"] and address_range and len(names) == 1:
                (name,) = names
                first, last = self._address_ranges.get(name, address_range)
                self._address_ranges[name] = min(first, address_range[0]), max(last, address_range[1])

    def find_name(self, kind: str, statement: int, counts: InstructionCounts) -> str:
        """Return the name of the buffer that an instruction accesses, or all candidates joined by commas."""
        if self._has_instructions:
            return "shared"
        names: Mapping[str, None] = self._names_by_statement.get((kind, statement), {})
        if counts.shared_address_range and len(names) != 1:
            first, last = counts.shared_address_range
            containing = [name for name, (start, end) in self._address_ranges.items() if start <= first and last <= end]
            names = dict.fromkeys(name for name in containing if name in names or not names) or names
        return ", ".join(names) or "shared"
