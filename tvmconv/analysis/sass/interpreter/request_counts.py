"""Counts of each SASS instruction's executions and memory requests: sectors, lines and wavefronts.

All blocks of a grid are interpreted if that takes few steps. Otherwise an evenly spread sample stands for all blocks,
because the blocks at the border of the grid do less than those inside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.bank_conflicts import count_copy_wavefronts_by_request, count_wavefronts_by_request
from tvmconv.analysis.memory.coalescing import count_lines_by_request, count_sectors_by_request
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.block_execution import AccessCallback, SassInterpreter, WarpRequest
from tvmconv.arithmetic import round_up
from tvmconv.compiler.executable import CompiledKernel
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import Listing
from tvmconv.emulator.threads import BlockIndex
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import LINE_BYTES, VECTOR_BYTES, WARP_SIZE

_GLOBAL_OPCODES = frozenset(ACCESSES["global", "load"] + ACCESSES["global", "store"])
_SHARED_OPCODES = frozenset(ACCESSES["shared", "load"] + ACCESSES["shared", "store"])


class _ConstantBankLayout(NamedTuple):
    """Offsets of the launch parameters in constant bank 0 in bytes, from an architecture on."""

    min_architecture: int
    arguments_offset: int
    block_offset: int
    grid_offset: int
    stack_offset: int
    descriptors_offset: int


ARRAY_ADDRESS_BITS = 40  # low bits of an address; the bits above are the number of the argument that contains it
_ARRAY_START = 1 << 32  # offset of an argument's array, so that addresses slightly below it belong to it, too
# The arguments, the sizes of block and grid, the end of the stack, and descriptors of global memory, whose contents do
# not matter. Source: machine code (docs/tvm.md).
_CONSTANT_BANKS = (
    _ConstantBankLayout(100, 0x380, 0x360, 0x370, 0x37C, 0x358),
    _ConstantBankLayout(90, 0x210, 0x0, 0xC, 0x28, 0x208),
    _ConstantBankLayout(0, 0x160, 0x0, 0xC, 0x28, 0x118),
)
_STACK_END_ADDRESS = 0xFFFF00
_THREADS_PER_BATCH = 16384  # threads that are executed together, at which NumPy's overhead is small
_THREADS_OF_FIRST_BATCH = 2048  # threads of the first blocks, which show how many steps a block takes
_MAX_GRID_INSTRUCTIONS = 200_000  # limit of a grid without its first blocks, some seconds
_MAX_SAMPLED_BLOCKS = 16384
_DRAWS_PER_BLOCK = 3  # numbers drawn per block, so that nearly all blocks of a small grid are drawn


@dataclass
class InstructionCounts:
    """Executions of one instruction, and its memory requests."""

    num_executed: int = 0  # executions by a warp
    num_backward_branches: int = 0  # times that a warp takes the branch backward
    num_requests: int = 0  # executions with at least one active thread
    num_sectors: int = 0  # global-memory sectors that the requests touch
    min_sectors: int = 0  # sectors if the bytes of each request were contiguous
    num_lines: int = 0  # 128-byte lines of global memory
    num_wavefronts: int = 0  # shared-memory wavefronts
    min_wavefronts: int = 0  # wavefronts without bank conflicts
    array_indices: set[int] = field(default_factory=set)  # indices of the accessed arrays in the program
    shared_address_range: tuple[int, int] | None = None  # smallest and largest shared address in bytes
    access_bytes: int = 0  # bytes per thread

    def add(self, counts: InstructionCounts) -> None:
        """Add the requests of another instruction of the same access."""
        for name in ("num_requests", "num_sectors", "min_sectors", "num_lines", "num_wavefronts", "min_wavefronts"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        self.access_bytes = max(self.access_bytes, counts.access_bytes)


@dataclass(frozen=True)
class LaunchCounts:
    """Memory requests of a launch, or of a sample of its blocks."""

    instruction_counts: list[InstructionCounts]  # counts of each instruction, summed over the interpreted blocks
    block_fraction: float  # fraction of the grid's blocks that were interpreted


def count_launch_requests(compiled_kernel: CompiledKernel, listing: Listing, arch: str) -> LaunchCounts:
    """Count the memory requests of a device kernel's instructions in a whole launch."""
    counter = _RequestCounter(compiled_kernel, listing, arch)
    order = sample_grid(compiled_kernel.launch.grid, _MAX_SAMPLED_BLOCKS)
    num_first_blocks, blocks_per_batch = (
        max(1, num_threads // compiled_kernel.launch.threads_per_block)
        for num_threads in (_THREADS_OF_FIRST_BATCH, _THREADS_PER_BATCH)
    )
    num_instructions = counter.count_blocks(order[:num_first_blocks])
    num_blocks = num_first_blocks + blocks_per_batch * (_MAX_GRID_INSTRUCTIONS // num_instructions)
    for batch_start in range(num_first_blocks, min(num_blocks, len(order)), blocks_per_batch):
        counter.count_blocks(order[batch_start : batch_start + blocks_per_batch])
    return LaunchCounts(counter.list_counts(), min(num_blocks, len(order)) / math.prod(compiled_kernel.launch.grid))


def count_requests(
    compiled_kernel: CompiledKernel,
    listing: Listing,
    arch: str,
    blocks: Sequence[BlockIndex],
    on_access: AccessCallback | None = None,
    max_instructions: int | None = None,
) -> list[InstructionCounts]:
    """Count the memory requests of a device kernel's instructions in some blocks, in the order of the listing."""
    counter = _RequestCounter(compiled_kernel, listing, arch, on_access)
    counter.count_blocks(blocks, max_instructions)
    return counter.list_counts()


def count_requests_by_block(
    compiled_kernel: CompiledKernel,
    listing: Listing,
    arch: str,
    blocks: Sequence[BlockIndex],
    max_instructions: int | None = None,
) -> list[list[InstructionCounts]]:
    """Return the counts of `count_requests` for each of some blocks.

    The blocks are executed together, so that several blocks take little longer than one of them.
    """
    counter = _RequestCounter(compiled_kernel, listing, arch, num_groups=len(blocks))
    counter.count_blocks(blocks, max_instructions)
    return [counter.list_counts(group) for group in range(len(blocks))]


def list_array_names(kernel: Kernel, lowered_kernel: LoweredKernel) -> dict[int, str]:
    """Return the names of the arrays and of the workspace of a device kernel, by their index in the program."""
    parameter_names = {parameter.index: parameter.name.removesuffix("_ptr") for parameter in lowered_kernel.parameters}
    return parameter_names | dict(enumerate(kernel.memory_scopes))


def sample_grid(grid: BlockIndex, max_blocks: int) -> list[BlockIndex]:
    """Return all blocks of a small grid, else `max_blocks` of them, as (x, y, z); any first few are evenly spread.

    The blocks are a fraction of the grid apart that no tile's width divides, the golden ratio (the additive recurrence
    of Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences").
    """
    count = math.prod(grid)
    draws = np.arange(min(_DRAWS_PER_BLOCK * count, 2 * _DRAWS_PER_BLOCK * max_blocks))
    positions = (draws * (math.sqrt(5) - 1) / 2 + 0.5) % 1
    block_numbers, first_indices = np.unique((positions * count).astype(np.int64), return_index=True)
    block_numbers = block_numbers[np.argsort(first_indices)][:max_blocks]
    z, y, x = np.unravel_index(block_numbers, grid[::-1])
    return list(zip(x.tolist(), y.tolist(), z.tolist(), strict=True))


# Sums of an instruction's requests, in the order of the rows of `_InstructionTotals.sums`.
_SUM_NAMES = ("num_requests", "num_sectors", "min_sectors", "num_lines", "num_wavefronts", "min_wavefronts")
_SECTOR_ROWS, _WAVEFRONT_ROWS = slice(1, 4), slice(4, 6)
_NO_ADDRESS = np.iinfo(np.int64).max
_MAX_PENDING_ROWS = 1 << 16  # rows of 32 addresses that are kept until they are counted, 16 MiB


class _InstructionTotals:
    """Counts of one instruction for each group of blocks; the arrays have a column for each group."""

    def __init__(self, num_groups: int) -> None:
        self.sums = np.zeros((len(_SUM_NAMES), num_groups), np.int64)
        self.first_shared_addresses = np.full(num_groups, _NO_ADDRESS)
        self.last_shared_addresses = np.full(num_groups, -1)
        self.groups_by_array: dict[int, NDArray[np.bool_]] = {}  # groups that access an array, by its index
        self.access_bytes = 0

    def make_counts(self, group: int, num_executed: int, num_backward_branches: int) -> InstructionCounts:
        """Return the counts of one group."""
        first, last = int(self.first_shared_addresses[group]), int(self.last_shared_addresses[group])
        num_requests = int(self.sums[0, group])
        return InstructionCounts(
            num_executed=num_executed,
            num_backward_branches=num_backward_branches,
            **dict(zip(_SUM_NAMES, self.sums[:, group].tolist(), strict=True)),
            array_indices={index for index, is_accessed in self.groups_by_array.items() if is_accessed[group]},
            shared_address_range=(first, last) if first <= last else None,
            access_bytes=self.access_bytes if num_requests else 0,
        )


class _RequestCounter:
    """Counter of the requests of blocks, either of all blocks as one group or of each block as its own group."""

    def __init__(
        self,
        compiled_kernel: CompiledKernel,
        listing: Listing,
        arch: str,
        on_access: AccessCallback | None = None,
        num_groups: int = 1,
    ) -> None:
        if not listing:
            raise AnalysisError("the kernel has no machine code")
        constant_words = _list_constant_words(compiled_kernel, arch)
        self._interpreter = SassInterpreter(
            listing, compiled_kernel.launch, lambda bank, offset: constant_words.get(offset) if bank == 0 else None
        )
        self._listing, self._arrays, self._on_access = listing, frozenset(compiled_kernel.arguments), on_access
        self._num_groups = num_groups
        self._pending_requests: defaultdict[int, list[WarpRequest]] = defaultdict(list)  # by index of the instruction
        self._num_pending_rows = 0
        self._totals = [_InstructionTotals(num_groups) for _ in listing]
        self._num_executed = np.zeros((len(listing), num_groups), np.int64)
        self._num_backward_branches = np.zeros((len(listing), num_groups), np.int64)

    def count_blocks(self, blocks: Sequence[BlockIndex], max_instructions: int | None = None) -> int:
        """Interpret some blocks, and return the number of executed instructions."""
        execution = self._interpreter.execute_blocks(blocks, self._collect_request, max_instructions)
        self._count_pending()
        shape = len(self._listing), self._num_groups, -1
        self._num_executed += execution.executions_by_block.reshape(shape).sum(axis=2)
        self._num_backward_branches += execution.backward_branches_by_block.reshape(shape).sum(axis=2)
        return execution.num_executed

    def list_counts(self, group: int = 0) -> list[InstructionCounts]:
        """Return the counts of each instruction in one group of blocks."""
        executed = self._num_executed[:, group].tolist(), self._num_backward_branches[:, group].tolist()
        return [totals.make_counts(group, *counts) for totals, *counts in zip(self._totals, *executed, strict=True)]

    def _collect_request(self, request: WarpRequest) -> None:
        """Keep a request until there are enough to count them together, which is far quicker than one by one."""
        self._pending_requests[request.instruction_index].append(request)
        self._num_pending_rows += len(request.addresses)
        if self._num_pending_rows > _MAX_PENDING_ROWS:
            self._count_pending()

    def _count_pending(self) -> None:
        for requests in self._pending_requests.values():
            self._count_requests(requests)
        self._pending_requests.clear()
        self._num_pending_rows = 0

    def _count_requests(self, requests: Sequence[WarpRequest]) -> None:
        """Count the requests of one instruction, whose matrix accesses have only the lanes that provide an address."""
        index, access_bytes = requests[0].instruction_index, requests[0].access_bytes
        instruction, totals = self._listing[index], self._totals[index]
        addresses = np.concatenate([request.addresses for request in requests])
        active = np.concatenate([request.is_active for request in requests])
        sources = [request.source_addresses for request in requests if request.source_addresses is not None]
        reads = [request.is_read for request in requests if request.is_read is not None]
        source_addresses, is_read = (np.concatenate(sources), np.concatenate(reads)) if sources else (None, None)
        totals.sums[0] += self._sum_groups(active.any(axis=1, keepdims=True).T, len(requests))[0]
        totals.access_bytes = access_bytes
        if instruction.opcode in ("LDSM", "STSM"):
            num_matrices = next((int(item) for item in instruction.modifiers if item in ("1", "2", "4")), 1)
            active = np.logical_and(active, np.arange(WARP_SIZE) < 8 * num_matrices)
            access_bytes = VECTOR_BYTES
        request = WarpRequest(index, addresses, active, access_bytes, source_addresses, is_read)
        distinct, distinct_rows = _find_distinct_requests(request)
        if instruction.opcode in _GLOBAL_OPCODES:
            counts = _count_sectors_by_row(distinct)[:, distinct_rows]
            totals.sums[_SECTOR_ROWS] += self._sum_groups(counts, len(requests))
            self._note_arrays(request, len(requests), totals)
        if instruction.opcode in _SHARED_OPCODES:
            counts = _count_wavefronts_by_row(distinct)[:, distinct_rows]
            totals.sums[_WAVEFRONT_ROWS] += self._sum_groups(counts, len(requests))
            self._note_shared_addresses(request, len(requests), totals)
        if self._on_access:
            self._on_access(_make_array_relative(distinct))

    def _sum_groups(self, counts: NDArray[Any], num_requests: int) -> NDArray[np.int64]:
        """Return the sums over the groups' rows of an array with a column for each row of some requests."""
        return counts.reshape(len(counts), num_requests, self._num_groups, -1).sum(axis=(1, 3))

    def _note_arrays(self, request: WarpRequest, num_requests: int, totals: _InstructionTotals) -> None:
        """Note the arrays that contain the first address of each group's requests."""
        addresses = request.addresses if request.source_addresses is None else request.source_addresses
        active = request.is_active if request.is_read is None else request.is_read
        active_by_group = active.reshape(num_requests * self._num_groups, -1)
        first_threads = active_by_group.argmax(axis=1)[:, None]
        first_addresses = np.take_along_axis(addresses.reshape(active_by_group.shape), first_threads, axis=1)
        array_indices = ((first_addresses >> ARRAY_ADDRESS_BITS) - 1).reshape(num_requests, -1)
        is_accessed = active_by_group.any(axis=1).reshape(num_requests, -1)
        for array_index in np.unique(array_indices[is_accessed]).tolist():
            if array_index not in self._arrays:
                opcode = self._listing[request.instruction_index].opcode
                raise AnalysisError(f"{opcode} is executed at an address outside of all arrays")
            groups = (is_accessed & (array_indices == array_index)).any(axis=0)
            totals.groups_by_array[array_index] = groups | totals.groups_by_array.get(array_index, False)

    def _note_shared_addresses(self, request: WarpRequest, num_requests: int, totals: _InstructionTotals) -> None:
        """Note the smallest and the largest address of each group."""
        first, last = (
            np.where(request.is_active, request.addresses, unused).reshape(num_requests, self._num_groups, -1)
            for unused in (_NO_ADDRESS, -1)
        )
        totals.first_shared_addresses = np.minimum(totals.first_shared_addresses, first.min(axis=(0, 2)))
        totals.last_shared_addresses = np.maximum(totals.last_shared_addresses, last.max(axis=(0, 2)))


def _find_distinct_requests(request: WarpRequest) -> tuple[WarpRequest, NDArray[np.intp]]:
    """Return the distinct rows of requests in their order, and the number of the distinct row of each row.

    Rows whose addresses differ by whole lines have the same costs, so they count as one.
    """
    keys = _make_relative(request.addresses, request.is_active)
    if request.source_addresses is not None and request.is_read is not None:
        keys = np.concatenate([keys, _make_relative(request.source_addresses, request.is_read)], axis=1)
    multipliers = np.random.default_rng(0).integers(1, 1 << 63, keys.shape[1], np.uint64)
    hashes = keys.astype(np.uint64) @ multipliers
    _, first_rows, distinct_rows = np.unique(hashes, return_index=True, return_inverse=True)
    if (keys != keys[first_rows[distinct_rows]]).any():  # two different rows have the same hash
        first_rows = distinct_rows = np.arange(len(keys))
    order = np.argsort(first_rows)
    rows = first_rows[order]
    distinct = replace(
        request,
        addresses=request.addresses[rows],
        is_active=request.is_active[rows],
        source_addresses=None if request.source_addresses is None else request.source_addresses[rows],
        is_read=None if request.is_read is None else request.is_read[rows],
    )
    return distinct, np.argsort(order)[distinct_rows]


def _make_relative(addresses: NDArray[np.int64], active: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return addresses relative to the first line of their row plus 1, and 0 for threads that take no part."""
    first_addresses = np.where(active, addresses, _NO_ADDRESS).min(axis=1, keepdims=True) // LINE_BYTES * LINE_BYTES
    return np.where(active, addresses - first_addresses + 1, 0)


def _count_sectors_by_row(request: WarpRequest) -> NDArray[np.int64]:
    """Return the sectors, the sectors at least, and the lines of each row."""
    addresses, active, is_copy = request.addresses, request.is_active, False
    if request.source_addresses is not None and request.is_read is not None:
        addresses, active, is_copy = request.source_addresses, request.is_read, True
    sectors = count_sectors_by_request(addresses, active, request.access_bytes, is_copy=is_copy)
    return np.stack([*sectors, count_lines_by_request(addresses, active, request.access_bytes)])


def _count_wavefronts_by_row(request: WarpRequest) -> NDArray[np.int64]:
    """Return the wavefronts and the wavefronts at least of each row."""
    arrays = request.addresses, request.is_active
    wavefronts, min_wavefronts = count_wavefronts_by_request(*arrays, request.access_bytes)
    if request.source_addresses is not None and request.is_read is not None and request.access_bytes == VECTOR_BYTES:
        wavefronts = count_copy_wavefronts_by_request(*arrays, request.source_addresses, request.is_read)
    return np.stack([wavefronts, min_wavefronts])


def _list_constant_words(compiled_kernel: CompiledKernel, arch: str) -> dict[int, int]:
    """Return the known words of constant bank 0 by offset: launch parameters, stack and arguments."""
    architecture = int("".join(filter(str.isdigit, arch)))
    layout = next(layout for layout in _CONSTANT_BANKS if architecture >= layout.min_architecture)
    launch = compiled_kernel.launch
    words = {layout.stack_offset: _STACK_END_ADDRESS, layout.descriptors_offset: 0, layout.descriptors_offset + 4: 0}
    for offset, extents in ((layout.block_offset, launch.block), (layout.grid_offset, launch.grid)):
        words |= {offset + 4 * axis: extent for axis, extent in enumerate(extents)}
    tensor_maps = dict(compiled_kernel.tensor_maps)
    argument_offset = layout.arguments_offset
    for position, index in enumerate(compiled_kernel.arguments):
        if position in tensor_maps:
            argument_offset = round_up(argument_offset, 64) + 128
            continue
        offset = ((index + 1) << ARRAY_ADDRESS_BITS) + _ARRAY_START
        words[argument_offset], words[argument_offset + 4] = offset & 0xFFFFFFFF, offset >> 32
        argument_offset += 8
    return words


def _make_array_relative(request: WarpRequest) -> WarpRequest:
    return replace(
        request,
        addresses=_subtract_array_start(request.addresses),
        source_addresses=None if request.source_addresses is None else _subtract_array_start(request.source_addresses),
    )


def _subtract_array_start(addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Make global addresses relative to their array; shared addresses stay."""
    offsets = (addresses & (1 << ARRAY_ADDRESS_BITS) - 1) - _ARRAY_START
    return np.where(addresses >> ARRAY_ADDRESS_BITS > 0, offsets, addresses)
