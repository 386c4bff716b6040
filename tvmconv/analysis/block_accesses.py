"""Counts of one block's memory requests and arithmetic, from the machine code or from the TIR, cached per kernel.

The compiler merges, drops and hoists accesses of the TIR, so only the machine code shows the accesses that are made.
The line table of the machine code relates each access to the TIR statement that it comes from.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal
from weakref import WeakKeyDictionary

from tvmconv.analysis.memory.bank_conflicts import (
    SharedAccess,
    count_shared_accesses,
    list_shared_accesses,
    make_wavefront_counter,
)
from tvmconv.analysis.memory.coalescing import (
    GlobalAccess,
    count_global_accesses,
    list_global_accesses,
    make_sector_counter,
)
from tvmconv.analysis.memory.requests import CostliestRequest, find_worst_requests, select_costlier
from tvmconv.analysis.memory.traffic import BlockTraffic, TrafficObserver, count_traffic
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter import block_execution as executed
from tvmconv.analysis.sass.interpreter.request_counts import (
    InstructionCounts,
    count_requests,
    count_requests_by_block,
    list_array_names,
)
from tvmconv.analysis.sass.linked_sources import LinkedSources, link_sources, read_instructions
from tvmconv.analysis.tir.accesses import (
    AccessTotals,
    RequestObserver,
    is_shared,
    iterate_accesses,
    select_middle_block,
)
from tvmconv.analysis.tir.scopes import has_instructions, needs_execution
from tvmconv.compiler.executable import CompiledKernel
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import Listing, SassInstruction
from tvmconv.emulator.execution import run_with_observer
from tvmconv.emulator.observers import AccessSite, ForwardingObserver, MemorySpace
from tvmconv.emulator.threads import BlockIndex, count_lanes, expand_to_clusters
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.kernel import Kernel

RequestKind = Literal["load", "store"]
REQUEST_KINDS: tuple[RequestKind, ...] = ("load", "store")
MAX_BLOCK_INSTRUCTIONS = 1_000_000  # warp instructions of a block to interpret, which takes some seconds
# Part of these instructions that blocks may take together, beyond which each is interpreted alone.
JOINT_FRACTION = 0.25


@dataclass(frozen=True)
class BlockAccessCounts:
    """Memory requests of one block of a device kernel."""

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]  # accesses to global memory without those of TMA, constant memory and textures
    # SASS instructions in their order with their counts; None if the TIR was counted instead
    instruction_counts: list[tuple[SassInstruction, InstructionCounts]] | None = None
    fallback_reason: str = ""  # reason why the machine code was not interpreted; empty if it was


@dataclass(frozen=True)
class BlockCounts:
    """Memory accesses and arithmetic of one block of a device kernel by its TIR."""

    shared_accesses: list[SharedAccess]
    global_accesses: list[GlobalAccess]
    traffic: BlockTraffic  # bytes and operations of the block without the accesses of TMA and wgmma


# Counts of the instructions of a block, by the name of the device kernel and the block.
_INSTRUCTION_CACHE: WeakKeyDictionary[Kernel, dict[tuple[str, BlockIndex], list[InstructionCounts]]]
_INSTRUCTION_CACHE = WeakKeyDictionary()
# By the name of the device kernel.
_SASS_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockAccessCounts]] = WeakKeyDictionary()
_TIR_CACHE: WeakKeyDictionary[Kernel, dict[str, BlockCounts]] = WeakKeyDictionary()


def count_block(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    """Count the memory accesses and arithmetic of a block of one of a kernel's device kernels from the TIR.

    If indices are evaluated, the shared accesses are those of the first block, the global ones those of the middle
    block, and the arithmetic that of the busiest block. If the kernel is emulated, which takes seconds for long loops,
    all are those of the middle block.
    """
    cache = _TIR_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        if needs_execution(lowered_kernel.function):
            cache[lowered_kernel.name] = _count_by_execution(kernel, lowered_kernel)
        else:
            cache[lowered_kernel.name] = BlockCounts(
                count_shared_accesses(kernel, lowered_kernel),
                count_global_accesses(kernel, lowered_kernel),
                count_traffic(kernel, lowered_kernel),
            )
    return cache[lowered_kernel.name]


def _count_by_execution(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockCounts:
    lanes_per_block = count_lanes(lowered_kernel)
    blocks = expand_to_clusters(lowered_kernel.launch, [select_middle_block(lowered_kernel)])
    totals = AccessTotals({"shared": make_wavefront_counter(), "global": make_sector_counter()})
    requests = RequestObserver(lanes_per_block, ("shared", "global"), totals.add)
    traffic = TrafficObserver(len(blocks), lanes_per_block, kernel.memory_scopes, wants_async_proxy=False)
    run_with_observer(lowered_kernel, kernel.memory_scopes, blocks, ForwardingObserver(requests, traffic))
    busiest = traffic.select_busiest(lowered_kernel.launch.threads_per_block)
    return BlockCounts(list_shared_accesses(totals), list_global_accesses(totals), busiest)


def count_block_accesses(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockAccessCounts:
    """Count the memory requests of the middle block of one of a kernel's device kernels.

    The TIR is counted instead (`count_block`) if there is no nvdisasm, if the machine code has an
    unsupported instruction, or if the block executes more than `MAX_BLOCK_INSTRUCTIONS`.
    """
    cache = _SASS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        try:
            return count_sass_accesses(kernel, lowered_kernel)
        except (AnalysisError, CompileError) as error:
            tir_counts = count_block(kernel, lowered_kernel)
            cache[lowered_kernel.name] = BlockAccessCounts(
                tir_counts.shared_accesses, tir_counts.global_accesses, fallback_reason=str(error)
            )
    return cache[lowered_kernel.name]


def count_sass_accesses(kernel: Kernel, lowered_kernel: LoweredKernel) -> BlockAccessCounts:
    """Count the memory requests of the middle block of a device kernel from its machine code alone."""
    cache = _SASS_CACHE.setdefault(kernel, {})
    if lowered_kernel.name not in cache:
        cache[lowered_kernel.name] = _count_from_sass(kernel, lowered_kernel, MAX_BLOCK_INSTRUCTIONS)
    if cache[lowered_kernel.name].instruction_counts is None:
        raise AnalysisError(cache[lowered_kernel.name].fallback_reason)
    return cache[lowered_kernel.name]


def count_several_blocks(kernel: Kernel, lowered_kernel: LoweredKernel, blocks: Iterable[BlockIndex]) -> None:
    """Interpret some blocks of a device kernel together, for later calls of the other functions of this module.

    Several blocks take little longer than one, because most of the time is spent per executed instruction, not per
    thread. Nothing is kept if the machine code cannot be interpreted. The later call then finds the reason.
    """
    known_counts = _INSTRUCTION_CACHE.setdefault(kernel, {})
    missing = [block for block in dict.fromkeys(blocks) if (lowered_kernel.name, block) not in known_counts]
    if len(missing) < 2:
        return
    max_instructions = int(JOINT_FRACTION * MAX_BLOCK_INSTRUCTIONS)
    with contextlib.suppress(AnalysisError, CompileError):
        counts_by_block = count_requests_by_block(*_list_code(kernel, lowered_kernel), missing, max_instructions)
        for block, counts in zip(missing, counts_by_block, strict=True):
            known_counts[lowered_kernel.name, block] = counts


def _list_code(kernel: Kernel, lowered_kernel: LoweredKernel) -> tuple[CompiledKernel, Listing, str]:
    """Return what the interpreter needs of a device kernel: the compiled kernel, its machine code and architecture."""
    index = kernel.kernels.index(lowered_kernel)
    listing = read_instructions(kernel).get(lowered_kernel.name, ())
    return kernel.executable.kernels[index], listing, str(kernel.device.arch)


def _interpret(
    kernel: Kernel,
    lowered_kernel: LoweredKernel,
    block: BlockIndex,
    max_instructions: int,
    on_access: executed.AccessCallback | None = None,
) -> list[InstructionCounts]:
    known_counts, key = _INSTRUCTION_CACHE.setdefault(kernel, {}), (lowered_kernel.name, block)
    if on_access or key not in known_counts:
        code = _list_code(kernel, lowered_kernel)
        known_counts[key] = count_requests(*code, [block], on_access, max_instructions)
    return known_counts[key]


def _link_instructions(kernel: Kernel, lowered_kernel: LoweredKernel) -> LinkedSources:
    return link_sources(kernel)[kernel.kernels.index(lowered_kernel)]


def _count_from_sass(kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int) -> BlockAccessCounts:
    middle_block = select_middle_block(lowered_kernel)
    sources = _link_instructions(kernel, lowered_kernel)
    instruction_counts = _interpret(kernel, lowered_kernel, middle_block, max_instructions)
    array_names = list_array_names(kernel, lowered_kernel)
    buffers = _SharedBufferNames(sources, instruction_counts)
    counts_by_access: defaultdict[tuple[MemorySpace, int, RequestKind, str], InstructionCounts]
    counts_by_access = defaultdict(InstructionCounts)
    for instruction, counts in zip(sources.listing, instruction_counts, strict=True):
        statement = sources.find_statement_index(instruction)
        for kind in REQUEST_KINDS:
            if counts.num_requests and instruction.opcode in ACCESSES["shared", kind]:
                counts_by_access["shared", statement, kind, buffers.find_name(kind, statement, counts)].add(counts)
            if counts.num_sectors and instruction.opcode in ACCESSES["global", kind]:
                array = ", ".join(array_names[n] for n in sorted(counts.array_indices))
                counts_by_access["global", statement, kind, array].add(counts)
    shared_accesses, global_accesses = [], []
    for (space, statement, kind, name), total in sorted(counts_by_access.items(), key=lambda item: item[0]):
        if space == "shared":
            costs = total.num_requests, total.num_wavefronts, total.min_wavefronts
            shared_accesses.append(SharedAccess(kind, name, *costs, total.access_bytes, statement))
        else:
            costs = total.num_requests, total.num_sectors, total.min_sectors
            global_accesses.append(GlobalAccess(kind, name, *costs, total.num_lines, total.access_bytes, statement))
    return BlockAccessCounts(
        shared_accesses, global_accesses, list(zip(sources.listing, instruction_counts, strict=True))
    )


def count_instructions(
    kernel: Kernel, lowered_kernel: LoweredKernel, block: BlockIndex, max_instructions: int | None = None
) -> list[tuple[SassInstruction, InstructionCounts]]:
    """Return the SASS instructions of a device kernel in their order, each with its counts in one block.

    The instructions are not related to statements of the TIR, which takes longer (`count_sass_accesses`).
    """
    access_counts = _SASS_CACHE.get(kernel, {}).get(lowered_kernel.name)
    if access_counts and access_counts.fallback_reason:
        raise AnalysisError(access_counts.fallback_reason)
    counts = _interpret(kernel, lowered_kernel, block, max_instructions or MAX_BLOCK_INSTRUCTIONS)
    return list(zip(read_instructions(kernel)[lowered_kernel.name], counts, strict=True))


def find_costliest_requests(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    """Return the costliest warp request of each access of the middle block, in the order of the TIR's statements.

    The accesses are those of the TIR (`tvmconv.analysis.memory.requests.find_worst_requests`) if the machine code
    cannot be interpreted.
    """
    try:
        return _find_costliest_in_sass(kernel, lowered_kernel)
    except (AnalysisError, CompileError):
        return find_worst_requests(kernel, lowered_kernel)


def _find_costliest_in_sass(kernel: Kernel, lowered_kernel: LoweredKernel) -> list[CostliestRequest]:
    costliest: dict[tuple[int, MemorySpace], CostliestRequest] = {}
    sources = _link_instructions(kernel, lowered_kernel)

    def note_request(request: executed.WarpRequest) -> None:
        opcode, is_copy = sources.listing[request.instruction_index].opcode, request.source_addresses is not None
        for (space, kind), opcodes in ACCESSES.items():
            if opcode not in opcodes:
                continue
            addresses, active = request.addresses, request.is_active
            if is_copy and space == "global":
                assert request.source_addresses is not None
                assert request.is_read is not None
                addresses, active = request.source_addresses, request.is_read
            site = AccessSite(0, space, kind, "", request.access_bytes)
            key = request.instruction_index, space
            if worst := select_costlier(costliest.get(key), site, addresses, active, is_copy=is_copy):
                costliest[key] = worst

    middle_block = select_middle_block(lowered_kernel)
    instruction_counts = _interpret(kernel, lowered_kernel, middle_block, MAX_BLOCK_INSTRUCTIONS, note_request)
    array_names, buffers = list_array_names(kernel, lowered_kernel), _SharedBufferNames(sources, instruction_counts)
    requests_by_access: dict[tuple[int, MemorySpace, RequestKind, str], CostliestRequest] = {}
    for (instruction_index, space), request in costliest.items():
        statement = sources.find_statement_index(sources.listing[instruction_index])
        counts = instruction_counts[instruction_index]
        array_text = ", ".join(array_names[n] for n in sorted(counts.array_indices))
        name = buffers.find_name(request.kind, statement, counts) if space == "shared" else array_text
        key = statement, space, request.kind, name
        if key not in requests_by_access or requests_by_access[key].cost < request.cost:
            requests_by_access[key] = replace(request, name=name, statement_index=statement)
    return [requests_by_access[key] for key in sorted(requests_by_access)]


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
            names = self._names_by_statement.get(("store", sources.find_statement_index(instruction)), {})
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
