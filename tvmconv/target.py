"""Hardware numbers of NVIDIA GPUs: limits and latencies, and peak rates of a GPU, from which times are estimated.

A number is the same for all GPUs (a constant), for those of an architecture (`Architecture`), or belongs to one GPU
(`Target`). The source, unless a comment names another, is the CUDA C++ Programming Guide, "Compute Capabilities", in
its tables of features and technical specifications.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tvmconv.arithmetic import ceil_div

WARP_SIZE = 32  # threads per warp
WARPGROUP_SIZE = 128  # threads of a warpgroup: four warps, the first with a rank that is a multiple of 4 (PTX, wgmma)
NUM_BANKS = 32  # shared-memory banks
BANK_BYTES = 4  # bytes that one bank serves per cycle
VECTOR_BYTES = 16  # widest memory access of a thread; wider vectors take several accesses
SECTOR_BYTES, LINE_BYTES = 32, 128  # units in which global memory is moved, and looked up by L1

MAX_THREADS_PER_BLOCK = 1024
MAX_THREADS_Z = 64  # block extent along z
MAX_BLOCKS_YZ = 65535  # grid extent along y and z; along x the limit is 2^31 - 1
REGISTERS_PER_MULTIPROCESSOR = 65536  # 32-bit registers
MAX_REGISTERS_PER_THREAD = 255
REGISTER_GRANULARITY = 256  # allocation unit of a warp's registers: cuda_occupancy.h of CUDA 13.0

PORTABLE_SHARED_BYTES = 99 << 10  # dynamic shared memory per block that all architectures since sm_80 allow
STATIC_SHARED_BYTES = 48 << 10  # shared memory that a kernel can declare statically, per block
CONSTANT_BYTES = 64 << 10  # total size of the `__constant__` arrays of a kernel
MAX_TEXTURE_WIDTH, MAX_TEXTURE_HEIGHT = 131072, 65000  # texels of a 2-D texture over linear memory

CLUSTER_MIN_ARCH = 90  # first architecture with clusters: PTX ISA, ".reqnctapercluster"
MAX_CLUSTER_BLOCKS = 8  # portable maximum cluster size
DEPENDENT_LAUNCH_MIN_ARCH = 90  # first architecture with programmatic dependent launch: PTX ISA, "griddepcontrol"
ASYNC_COPY_MIN_ARCH = 80  # first architecture with cp.async: PTX ISA, "cp.async"
RESERVED_SHARED_BYTES, RESERVED_SHARED_MIN_ARCH = 1 << 10, 80  # per resident block, for the system

# Rates of a multiprocessor per clock. Instructions: "Hardware Multithreading" and "Arithmetic Instructions" in the
# CUDA C++ Programming Guide. L1 and shared memory share one data path: Nsight Compute, "Kernel Profiling Guide", L1TEX.
# L2: NVIDIA A100 whitepaper, "A100 L2 cache".
SCHEDULERS, INTEGER_LANES = 4, 64  # each scheduler issues an instruction; a partition for each has its registers
L1_BYTES_PER_CLOCK, L2_BYTES_PER_CLOCK = 128, 64
L1_SECTORS_PER_CLOCK, L2_SECTORS_PER_CLOCK = L1_BYTES_PER_CLOCK // SECTOR_BYTES, L2_BYTES_PER_CLOCK // SECTOR_BYTES
WAVEFRONTS_PER_CLOCK = 1  # of shared memory
# A 16×8×16 multiplication takes a clock, and mma.sync reaches 62.9 % of that: Luo et al., see `INSTRUCTION_CLOCKS`.
CLOCKS_PER_MATRIX_MULTIPLY = 1.6
# Approximate multiples of the float32 rate.
TENSOR_CORE_RATE = {"tf32": 8, **dict.fromkeys(("float16", "bfloat16"), 16)}
TENSOR_CORE_RATE |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), 32)

# Clocks until a result is ready. Arithmetic and moves between register files: Z. Jia et al., "Dissecting the NVIDIA
# Volta GPU Architecture via Microbenchmarking", 2018, table 4.1. Memory: W. Luo et al., "Benchmarking and Dissecting
# the Nvidia Hopper GPU Architecture", 2024, arXiv 2402.13499, latencies of H800: shared memory 29, L1 41, L2 263.
# Global loads are assumed to hit L2, which holds the arrays once they have been read.
ARITHMETIC_CLOCKS, L2_CLOCKS = 4, 263
INSTRUCTION_CLOCKS = {
    **dict.fromkeys(("LDG", "LD", "LDGSTS", "ATOMG", "RED"), L2_CLOCKS),
    **{"LDS": 29, "LDSM": 33, "LDL": 41, "LDC": 29, "ULDC": 12, "S2R": 25, "S2UR": 25, "SHFL": 23},
    **{"HMMA": 33, "MUFU": 23, "R2UR": 12, "I2F": 14, "F2I": 14, "F2F": 14},
}
BARRIER_CLOCKS = 20  # of a barrier at which all threads arrive at the same time
ISSUE_CLOCKS = {"BRA": 4}  # until the next instruction issues, 1 by default

LAUNCH_SECONDS = 1.5e-6  # of a small kernel; the trained cost models contain this number
RESIDENT_WRITE_FRACTION = 1 / 3  # of L2 that holds written lines when a kernel ends: filters on an H200


class Architecture(NamedTuple):
    """Numbers of an architecture, those of an unknown one by default; per multiprocessor, if nothing else is said."""

    max_threads: int = 0  # resident; 0 if unknown
    max_blocks: int = 0  # resident
    shared_kib: int = 0
    opt_in_shared_kib: int | None = None  # maximum static and dynamic shared memory of a block after opting in
    fp32_lanes: int | None = None  # multiply-adds per clock: "Arithmetic Instructions", "32-bit floating-point add"
    l1_kib: int = 96  # L1 cache and shared memory
    l2_mib: int = 4  # of the largest GPU

    @property
    def l1_bytes(self) -> int:
        """L1 cache and shared memory in bytes."""
        return self.l1_kib << 10

    @property
    def l2_bytes(self) -> int:
        """L2 cache in bytes."""
        return self.l2_mib << 20


# Blocks of 11.0 and 12: cuda_occupancy.h. L2 of V100, Titan RTX, A100 (40 GB), GA102, AD102, H100 and H200, and B200:
# NVIDIA's whitepapers.
_ARCHITECTURES = {
    70: Architecture(2048, 32, 96, 96, None, 128, 6),
    72: Architecture(2048, 32, 96, 96),
    75: Architecture(1024, 16, 64, 64, 64, 96, 6),
    80: Architecture(2048, 32, 164, 163, 64, 192, 40),
    86: Architecture(1536, 16, 100, 99, 128, 128, 6),
    87: Architecture(1536, 16, 164, 163, 128),
    88: Architecture(1536, 16, 100, 99),
    89: Architecture(1536, 24, 100, 99, 128, 128, 96),
    90: Architecture(2048, 32, 228, 227, 128, 256, 50),
    100: Architecture(2048, 32, 228, 227, 128, 256, 126),
    101: Architecture(1536, 24, 228, 227),
    103: Architecture(2048, 32, 228, 227, 128),
    110: Architecture(1536, 24, 228, 227),
    120: Architecture(1536, 24, 100, 99, 128),
    121: Architecture(1536, 24, 100, 99, 128),
}


@dataclass(frozen=True)
class BlockLimits:
    """Maximum resources of a block; the defaults apply to every NVIDIA GPU."""

    max_threads: int = MAX_THREADS_PER_BLOCK  # threads per block (OpenCL: work-items per work-group)
    shared_bytes: int = STATIC_SHARED_BYTES  # static shared memory in bytes (OpenCL: local memory)
    # Static and dynamic shared memory in bytes if the launch opts in; None if this is not supported.
    opt_in_shared_bytes: int | None = None
    max_cluster_blocks: int = 1  # blocks per cluster; 1 without clusters

    @property
    def max_shared_bytes(self) -> int:
        """Maximum static and dynamic shared memory in bytes."""
        return max(self.shared_bytes, self.opt_in_shared_bytes or 0)


@dataclass(frozen=True)
class Target:
    """A GPU with its peak rates, the input of every estimate of a time."""

    name: str  # name by the driver, such as "NVIDIA H200"
    arch: str  # architecture, such as "sm_90"
    multiprocessors: int  # number of multiprocessors
    flops: float  # peak rate of float32 operations, in FLOP/s
    bandwidth: float  # peak bandwidth of global memory, in bytes/s
    launch_seconds: float = LAUNCH_SECONDS  # seconds of a small kernel
    # Rates of tensor cores by dtype in FLOP/s, where they differ from multiples of `flops`.
    tensor_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Bandwidth of the L2 cache in bytes/s; None if it is not distinguished from `bandwidth`.
    l2_bandwidth: float | None = None

    @property
    def architecture(self) -> Architecture:
        """Numbers of the architecture."""
        return find_architecture(self.arch)

    @property
    def fp32_lanes(self) -> int:
        """Float32 multiply-adds per clock and multiprocessor."""
        return self.architecture.fp32_lanes or 128

    @property
    def clock_hz(self) -> float:
        """Clock rate that the peak rate implies."""
        return self.flops / (2 * self.fp32_lanes * self.multiprocessors)

    def get_peak_flops(self, dtype: str) -> float:
        """Return the peak rate for a dtype in FLOP/s, that of tensor cores if they support it."""
        return self.tensor_flops.get(dtype) or self.flops * TENSOR_CORE_RATE.get(dtype, 1)

    def count_blocks_per_sm(self, num_blocks: int) -> int:
        """Return the number of blocks of the multiprocessor that executes the most blocks of a grid."""
        return ceil_div(num_blocks, self.multiprocessors)

    def roofline_seconds(self, workload: Any, *, in_l2: bool = False) -> float:
        """Return the approximate minimum seconds of a `tvmconv.workloads.Workload`, whose arrays may be in L2.

        These are a launch, and its arithmetic or its memory traffic (S. Williams et al., "Roofline", CACM 52(4), 2009).
        """
        bandwidth = self.l2_bandwidth if in_l2 and self.l2_bandwidth else self.bandwidth
        arithmetic_seconds = workload.flops / self.get_peak_flops(workload.dtype)
        return self.launch_seconds + max(arithmetic_seconds, workload.min_bytes / bandwidth)

    def to_json(self) -> dict[str, Any]:
        """Return the first five attributes, from which cost models and result files restore the target."""
        return {name: getattr(self, name) for name in ("name", "arch", "multiprocessors", "flops", "bandwidth")}


H100 = Target("NVIDIA H100 80GB HBM3", "sm_90", 132, 66.9e12, 3.35e12)
H200 = Target("NVIDIA H200", "sm_90", 132, 66.9e12, 4.8e12)
DATA_SHEET_TARGETS = {target.name: target for target in (H100, H200)}
UNKNOWN_TARGET = Target("a device with unknown rates", "", 1, 1e12, 1e11)  # such as a CPU
# The best rates that any kernel in the logs has reached on a GPU, tvmconv's or a library's, without its launch, and the
# time of the smallest kernel.
BEST_RATES = {
    H200.name: replace(
        H200,
        bandwidth=4.1e12,
        launch_seconds=1.07e-6,
        tensor_flops={"float16": 795e12, "bfloat16": 795e12, "tf32": 430e12},
        l2_bandwidth=8e12,
    )
}


def parse_arch_number(arch: str) -> int:
    """Return the number of an architecture, such as 90 for "sm_90" and "sm_90a"; 0 for any other text."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(match[1]) if match else 0


def find_architecture(arch: str) -> Architecture:
    """Return the numbers of an architecture such as "sm_90"."""
    return _ARCHITECTURES.get(parse_arch_number(arch), Architecture())


def get_block_limits(arch: str) -> BlockLimits:
    """Return the maximum resources of a block on an NVIDIA architecture such as "sm_90"."""
    opt_in_kib = find_architecture(arch).opt_in_shared_kib
    return BlockLimits(
        opt_in_shared_bytes=opt_in_kib << 10 if opt_in_kib else None, max_cluster_blocks=get_max_cluster_blocks(arch)
    )


def get_max_cluster_blocks(arch: str | None) -> int:
    """Return the maximum number of blocks per cluster; 1 for a device without clusters or without architecture."""
    return MAX_CLUSTER_BLOCKS if arch and parse_arch_number(arch) >= CLUSTER_MIN_ARCH else 1
