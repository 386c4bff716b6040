"""Counts of each SASS instruction's executions and memory requests: sectors, lines and wavefronts.

All blocks of a grid are interpreted if that takes few steps. Otherwise an evenly spread sample stands for all blocks,
because the blocks at the border of the grid do less than those inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.memory.bank_conflicts import count_copy_wavefronts, count_wavefronts
from tvmconv.analysis.memory.coalescing import count_sectors
from tvmconv.analysis.sass.instruction_mix import ACCESSES
from tvmconv.analysis.sass.interpreter.block_execution import AccessCallback, SassInterpreter, WarpRequest
from tvmconv.analysis.tir.accesses import CachedCount
from tvmconv.arithmetic import round_up
from tvmconv.compiler.executable import CompiledKernel
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import Listing
from tvmconv.emulator.threads import BlockIndex
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import VECTOR_BYTES


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
    return LaunchCounts(counter.counts, min(num_blocks, len(order)) / math.prod(compiled_kernel.launch.grid))


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
    return counter.counts


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


class _RequestCounter:
    def __init__(
        self, compiled_kernel: CompiledKernel, listing: Listing, arch: str, on_access: AccessCallback | None = None
    ) -> None:
        if not listing:
            raise AnalysisError("the kernel has no machine code")
        constant_words = _list_constant_words(compiled_kernel, arch)
        self._interpreter = SassInterpreter(
            listing, compiled_kernel.launch, lambda bank, offset: constant_words.get(offset) if bank == 0 else None
        )
        self._listing, self._arrays, self._on_access = listing, frozenset(compiled_kernel.arguments), on_access
        self._count_wavefronts, self._count_sectors = CachedCount(count_wavefronts), CachedCount(count_sectors)
        self.counts = [InstructionCounts() for _ in listing]

    def count_blocks(self, blocks: Sequence[BlockIndex], max_instructions: int | None = None) -> int:
        """Interpret some blocks, and return the number of executed instructions."""
        execution = self._interpreter.execute_blocks(blocks, self._count_access, max_instructions)
        for counts, num_executed, num_backward_branches in zip(
            self.counts, execution.execution_counts, execution.backward_branch_counts, strict=True
        ):
            counts.num_executed += num_executed
            counts.num_backward_branches += num_backward_branches
        return execution.num_executed

    def _count_access(self, request: WarpRequest) -> None:
        """Count a request; of matrix accesses, only the lanes that provide an address stay active."""
        instruction, counts = self._listing[request.instruction_index], self.counts[request.instruction_index]
        counts.num_requests += int(request.is_active.any(axis=1).sum())
        counts.access_bytes = request.access_bytes
        if instruction.opcode in ("LDSM", "STSM"):
            num_matrices = next((int(item) for item in instruction.modifiers if item in ("1", "2", "4")), 1)
            is_address_lane = np.arange(request.is_active.shape[1]) < 8 * num_matrices
            request = replace(request, is_active=request.is_active & is_address_lane, access_bytes=VECTOR_BYTES)
        if instruction.opcode in ACCESSES["global", "load"] + ACCESSES["global", "store"]:
            self._count_global(request, counts)
        if instruction.opcode in ACCESSES["shared", "load"] + ACCESSES["shared", "store"]:
            self._count_shared(request, counts)
        if self._on_access:
            self._on_access(_make_array_relative(request))

    def _count_global(self, request: WarpRequest, counts: InstructionCounts) -> None:
        is_copy = request.source_addresses is not None
        addresses = request.addresses if request.source_addresses is None else request.source_addresses
        active = request.is_active if request.is_read is None else request.is_read
        if not active.any():
            return
        _, num_sectors, min_sectors, num_lines = self._count_sectors(
            addresses, active, request.access_bytes, is_copy=is_copy
        )
        counts.num_sectors += num_sectors
        counts.min_sectors += min_sectors
        counts.num_lines += num_lines
        array_index = (int(addresses[active][0]) >> ARRAY_ADDRESS_BITS) - 1
        if array_index not in self._arrays:
            opcode = self._listing[request.instruction_index].opcode
            raise AnalysisError(f"{opcode} is executed at an address outside of all arrays")
        counts.array_indices.add(array_index)

    def _count_shared(self, request: WarpRequest, counts: InstructionCounts) -> None:
        addresses, active = request.addresses, request.is_active
        if not active.any():
            return
        if request.source_addresses is not None and request.access_bytes == VECTOR_BYTES:
            assert request.is_read is not None
            totals: Sequence[int] = count_copy_wavefronts(addresses, active, request.source_addresses, request.is_read)
        else:
            totals = self._count_wavefronts(addresses, active, request.access_bytes)
        counts.num_wavefronts += totals[1]
        counts.min_wavefronts += totals[2]
        first, last = int(addresses[active].min()), int(addresses[active].max())
        known_first, known_last = counts.shared_address_range or (first, last)
        counts.shared_address_range = min(known_first, first), max(known_last, last)


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
