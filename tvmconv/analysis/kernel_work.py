"""What a step of a kernel has to do, as the few numbers from which its time is predicted.

All of it is what the machine code of the middle block does, which is executed for that
(`tvmconv.analysis.sass.interpreter`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tvmconv.analysis.block_accesses import count_sass_accesses
from tvmconv.analysis.memory.coalescing import SECTOR_BYTES, GlobalAccess
from tvmconv.analysis.memory.footprint import ArrayFootprints, compute_footprints, count_kernel_dram_bytes
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.sass.arithmetic import count_lane_clocks
from tvmconv.analysis.sass.interpreter.semantics import count_registers
from tvmconv.analysis.sass.sass_ops import build_code
from tvmconv.analysis.sass.warp_pipeline import WarpPipeline
from tvmconv.errors import AnalysisError
from tvmconv.gpu_specs import get_l1_bytes, get_l2_bytes

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.kernel import Kernel

# Integer arithmetic has half the lanes of float32: "Arithmetic Instructions" in the CUDA C++ Programming Guide.
_INTEGER_OPCODES = frozenset(
    [
        *("IMAD", "LEA", "IADD3", "VIADD", "SHF", "LOP3", "PRMT", "SEL", "IABS", "VIADDMNMX", "IDP"),
        *("ISETP", "PLOP3", "P2R", "FSEL", "FMNMX"),
    ]
)
_LOCAL_OPCODES = ("LDL", "STL")
_ASYNC_OPCODES = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA")  # what TMA and wgmma do is not of a warp's making


@dataclass(frozen=True)
class KernelWork:
    """What a step does, in one block where nothing else is said.

    Attributes:
        blocks: of the grid.
        resident: blocks that a multiprocessor holds at a time.
        alone: clocks that one warp would take by itself.
        issued: instructions, of all warps.
        floats: clocks that their float32 and float16 arithmetic takes each of a warp's lanes.
        integers: of these, integer arithmetic.
        matrices: of these, multiplications of matrices.
        wavefronts: of shared memory.
        spilled: wavefronts of local memory.
        lines: that L1 looks up, of 128 bytes.
        l1_sectors: that L1 moves.
        l2_sectors: that come from L2 and go there.
        dram_bytes: from memory and to it, of the whole grid; 0 where all arrays fit L2.
    """

    blocks: int
    resident: int
    alone: float
    issued: float
    floats: float
    integers: float
    matrices: float
    wavefronts: float
    spilled: float
    lines: float
    l1_sectors: float
    l2_sectors: float
    dram_bytes: int

    def to_json(self) -> dict[str, float]:
        """By name, rounded to whole ones, as a file keeps them."""
        return {name: round(value) for name, value in asdict(self).items()}


def count_kernel_work(kernel: Kernel, max_instructions: int | None = None) -> list[KernelWork]:
    """What each timed step of a kernel does.

    Args:
        kernel: for an NVIDIA architecture.
        max_instructions: number of instructions of a block that are executed at most; by default a million.

    Raises:
        AnalysisError: it cannot be counted, depends on the data, or is done by TMA and wgmma.
        CompileError: the kernel does not compile, or there is no nvdisasm.
    """
    return [_count_lowered_kernel(kernel, lowered_kernel, max_instructions) for lowered_kernel in kernel.timed_kernels]


def _count_lowered_kernel(kernel: Kernel, lowered_kernel: LoweredKernel, max_instructions: int | None) -> KernelWork:
    kernel_occupancy = compute_kernel_occupancy(kernel, lowered_kernel)
    listing = kernel.listings[lowered_kernel.name]
    if any(counts.opcode in _ASYNC_OPCODES for counts in listing):
        raise AnalysisError("the time that TMA copies and wgmma instructions take is not modelled")
    if not kernel_occupancy.resident_blocks:
        raise AnalysisError(f"not one block fits on a multiprocessor: {', '.join(kernel_occupancy.limiting_resources)}")
    access_counts = count_sass_accesses(kernel, lowered_kernel, max_instructions)
    assert access_counts.instruction_counts is not None
    warp = WarpPipeline()
    warp.execute(
        build_code(
            listing,
            [counts.num_executed for _, counts in access_counts.instruction_counts],
            [counts.num_backward_branches for _, counts in access_counts.instruction_counts],
        )
    )
    issued_by_opcode: Counter[str] = Counter()
    for instruction, counts in access_counts.instruction_counts:
        issued_by_opcode[instruction.opcode] += counts.num_executed
    array_footprints = compute_footprints(kernel, lowered_kernel)
    arch = str(kernel.device.arch)
    l2_capacity_bytes = get_l2_bytes(arch)
    shared_bytes = kernel.cubin.kernels[lowered_kernel.name].shared_bytes + lowered_kernel.dynamic_shared_bytes
    return KernelWork(
        blocks=math.prod(lowered_kernel.launch.grid),
        resident=kernel_occupancy.resident_blocks,
        alone=warp.clocks,
        issued=issued_by_opcode.total(),
        floats=sum(
            count_lane_clocks(instruction) * counts.num_executed
            for instruction, counts in access_counts.instruction_counts
        ),
        integers=sum(issued_by_opcode[name] for name in _INTEGER_OPCODES),
        matrices=issued_by_opcode["HMMA"],
        wavefronts=sum(counts.wavefronts for counts in access_counts.shared_accesses),
        spilled=sum(
            count_registers(local_access) * counts.num_executed
            for local_access, counts in access_counts.instruction_counts
            if local_access.opcode in _LOCAL_OPCODES
        ),
        lines=sum(counts.num_lines for counts in access_counts.global_accesses),
        l1_sectors=sum(counts.sectors for counts in access_counts.global_accesses),
        l2_sectors=_count_l2_sectors(
            access_counts.global_accesses,
            array_footprints,
            get_l1_bytes(arch) // kernel_occupancy.resident_blocks - shared_bytes,
        ),
        dram_bytes=0
        if _sum_array_bytes(kernel, array_footprints) <= l2_capacity_bytes
        else count_kernel_dram_bytes(kernel, lowered_kernel, array_footprints, l2_capacity_bytes),
    )


def _count_l2_sectors(
    global_accesses: list[GlobalAccess], array_footprints: ArrayFootprints | None, l1_room_bytes: int
) -> int:
    """Sectors that a block loads from L2, each once where they fit the block's part of L1, and those that it stores."""
    stored_sectors = sum(access.sectors for access in global_accesses if access.kind == "store")
    loaded_sectors = sum(access.sectors for access in global_accesses if access.kind == "load")
    if array_footprints is None:
        return stored_sectors + loaded_sectors
    distinct_sectors = sum(access.num_sectors for (kind, _), access in array_footprints.items() if kind == "load")
    return stored_sectors + (
        min(loaded_sectors, distinct_sectors) if distinct_sectors * SECTOR_BYTES <= l1_room_bytes else loaded_sectors
    )


def _sum_array_bytes(kernel: Kernel, array_footprints: ArrayFootprints | None) -> int:
    return (
        sum(footprint.array_bytes for footprint in array_footprints.values())
        if array_footprints
        else kernel.workload.min_bytes
    )
