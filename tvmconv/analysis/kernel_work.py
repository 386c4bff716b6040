"""Amounts of work of a device kernel, from which `predicted_time` predicts its time.

The machine code of the middle block is interpreted to count them (`tvmconv.analysis.sass.interpreter`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tvmconv.analysis.block_accesses import count_instructions
from tvmconv.analysis.memory.footprint import ArrayFootprints, compute_footprints, count_kernel_dram_bytes
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.sass.instruction_mix import ACCESSES, count_lane_clocks
from tvmconv.analysis.sass.interpreter.instruction import count_registers
from tvmconv.analysis.sass.interpreter.request_counts import InstructionCounts
from tvmconv.analysis.sass.linked_sources import read_instructions
from tvmconv.analysis.sass.warp_pipeline import WarpPipeline, build_code
from tvmconv.analysis.tir.accesses import select_middle_block
from tvmconv.compiler.lowered_module import LoweredKernel
from tvmconv.compiler.sass_listing import SassInstruction
from tvmconv.errors import AnalysisError
from tvmconv.kernel import Kernel
from tvmconv.target import SECTOR_BYTES, find_architecture

# Integer arithmetic has half the lanes of float32: "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_INTEGER_OPCODES = frozenset(
    [
        *("IMAD", "LEA", "IADD3", "VIADD", "SHF", "LOP3", "PRMT", "SEL", "IABS", "VIADDMNMX", "IDP"),
        *("ISETP", "PLOP3", "P2R", "FSEL", "FMNMX"),
    ]
)
_LOCAL_OPCODES = ("LDL", "STL")
_ASYNC_OPCODES = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA")  # the interpreter does not model the work of TMA and wgmma

_ASYNC_REASON = "the time that TMA copies and wgmma instructions take is not modelled"


@dataclass(frozen=True)
class KernelWork:
    """Work of a device kernel; the numbers are per block unless their description names the grid."""

    blocks: int  # blocks of the grid
    resident: int  # blocks that a multiprocessor holds at a time
    alone: float  # clocks that one warp takes without other warps
    issued: float  # instructions of all warps
    floats: float  # clocks of float32 and float16 arithmetic per lane, summed over all warps
    integers: float  # integer instructions of all warps
    matrices: float  # matrix multiply instructions of all warps
    wavefronts: float  # shared-memory wavefronts
    spilled: float  # local-memory wavefronts
    lines: float  # 128-byte lines that L1 looks up
    l1_sectors: float  # 32-byte sectors that L1 moves
    l2_sectors: float  # 32-byte sectors that move between L1 and L2
    dram_bytes: int  # bytes of the whole grid that move to or from DRAM; 0 if all arrays fit L2

    def to_json(self) -> dict[str, float]:
        """Return the fields by name, rounded to integers for a JSON file."""
        return {name: round(value) for name, value in asdict(self).items()}


def count_kernel_work(kernel: Kernel, max_instructions: int | None = None) -> list[KernelWork]:
    """Count the work of each timed device kernel of a kernel."""
    if any(lowered_kernel.tensor_maps for lowered_kernel in kernel.timed_kernels):
        raise AnalysisError(_ASYNC_REASON)  # known without the machine code
    return [_count_lowered_kernel(kernel, lowered_kernel, max_instructions) for lowered_kernel in kernel.timed_kernels]


def _count_lowered_kernel(kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int | None) -> KernelWork:
    occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    listing = read_instructions(kernel)[lowered_kernel.name]
    if any(instruction.opcode in _ASYNC_OPCODES for instruction in listing):
        raise AnalysisError(_ASYNC_REASON)
    if not occupancy.resident_blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(occupancy.limiting_resources)}")
    middle_block = select_middle_block(lowered_kernel)
    instruction_counts = count_instructions(kernel, lowered_kernel, middle_block, max_instructions)
    num_executed = [counts.num_executed for _, counts in instruction_counts]
    num_backward_branches = [counts.num_backward_branches for _, counts in instruction_counts]
    warp = WarpPipeline()
    warp.execute(build_code(listing, num_executed, num_backward_branches))
    issued_by_opcode: Counter[str] = Counter()
    for instruction, counts in instruction_counts:
        issued_by_opcode[instruction.opcode] += counts.num_executed
    footprints = compute_footprints(kernel, lowered_kernel)
    architecture = find_architecture(str(kernel.device.arch))
    shared_bytes = kernel.cubin.kernels[lowered_kernel.name].shared_bytes + lowered_kernel.dynamic_shared_bytes
    l1_bytes = architecture.l1_bytes // occupancy.resident_blocks - shared_bytes
    return KernelWork(
        blocks=math.prod(lowered_kernel.launch.grid),
        resident=occupancy.resident_blocks,
        alone=warp.clocks,
        issued=issued_by_opcode.total(),
        floats=sum(count_lane_clocks(instruction) * counts.num_executed for instruction, counts in instruction_counts),
        integers=sum(issued_by_opcode[name] for name in _INTEGER_OPCODES),
        matrices=issued_by_opcode["HMMA"],
        wavefronts=sum(counts.num_wavefronts for _, counts in instruction_counts),
        spilled=sum(
            count_registers(instruction) * counts.num_executed
            for instruction, counts in instruction_counts
            if instruction.opcode in _LOCAL_OPCODES
        ),
        lines=sum(counts.num_lines for _, counts in instruction_counts),
        l1_sectors=sum(counts.num_sectors for _, counts in instruction_counts),
        l2_sectors=_count_l2_sectors(instruction_counts, footprints, l1_bytes),
        dram_bytes=0
        if _sum_array_bytes(kernel, footprints) <= architecture.l2_bytes
        else count_kernel_dram_bytes(kernel, lowered_kernel, footprints, architecture.l2_bytes),
    )


def _count_l2_sectors(
    instruction_counts: Sequence[tuple[SassInstruction, InstructionCounts]],
    footprints: ArrayFootprints | None,
    l1_bytes: int,
) -> int:
    """Return the sectors that a block stores to and loads from L2; it loads each once if they fit its part of L1."""
    stored_sectors, loaded_sectors = (
        sum(counts.num_sectors for instruction, counts in instruction_counts if instruction.opcode in opcodes)
        for opcodes in (ACCESSES["global", "store"], ACCESSES["global", "load"])
    )
    if footprints is None:
        return stored_sectors + loaded_sectors
    distinct_sectors = sum(access.num_sectors for (kind, _), access in footprints.items() if kind == "load")
    if distinct_sectors * SECTOR_BYTES <= l1_bytes:
        loaded_sectors = min(loaded_sectors, distinct_sectors)
    return stored_sectors + loaded_sectors


def _sum_array_bytes(kernel: Kernel, footprints: ArrayFootprints | None) -> int:
    if footprints:
        return sum(footprint.array_bytes for footprint in footprints.values())
    return kernel.workload.min_bytes
