"""Hardware limits and properties of NVIDIA GPUs by architecture.

The source, unless a comment names another, is the CUDA C++ Programming Guide, "Compute Capabilities", in its tables of
features and technical specifications.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP_SIZE = 32  # threads per warp
WARPGROUP_SIZE = 128  # threads of a warpgroup: four warps, the first with a rank that is a multiple of 4 (PTX, wgmma)
NUM_BANKS = 32  # shared-memory banks
BANK_BYTES = 4  # bytes that one bank serves per cycle
VECTOR_BYTES = 16  # widest memory access of a thread; wider vectors take several accesses

MAX_THREADS_PER_BLOCK = 1024
MAX_THREADS_Z = 64  # block extent along z
MAX_BLOCKS_YZ = 65535  # grid extent along y and z; along x the limit is 2^31 - 1
REGISTERS_PER_MULTIPROCESSOR = 65536  # 32-bit registers
MAX_REGISTERS_PER_THREAD = 255

STATIC_SHARED_BYTES = 48 << 10  # shared memory that a kernel can declare statically, per block
CONSTANT_BYTES = 64 << 10  # total size of the `__constant__` arrays of a kernel
MAX_TEXTURE_WIDTH, MAX_TEXTURE_HEIGHT = 131072, 65000  # texels of a 2-D texture over linear memory

CLUSTER_MIN_ARCH = 90  # first architecture with clusters: PTX ISA, ".reqnctapercluster"
MAX_CLUSTER_BLOCKS = 8  # portable maximum cluster size

ASYNC_COPY_MIN_ARCH = 80  # first architecture with cp.async: PTX ISA, "cp.async"

# Maximum static and dynamic shared memory per block after opting in, in KiB.
_OPT_IN_SHARED = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 101: 227}
_OPT_IN_SHARED |= {103: 227, 110: 227, 120: 99, 121: 99}

# float32 multiply-adds per cycle and multiprocessor: "Arithmetic Instructions", row "32-bit floating-point add".
_FP32_LANES = {75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 100: 128, 103: 128, 120: 128, 121: 128}

# L2 cache in MiB of V100, Titan RTX, A100 (40 GB), GA102, AD102, H100 and H200, and B200: NVIDIA's whitepapers.
_L2_MIB = {70: 6, 75: 6, 80: 40, 86: 6, 89: 96, 90: 50, 100: 126}
_L1_KIB = {
    70: 128,
    75: 96,
    80: 192,
    86: 128,
    89: 128,
    90: 256,
    100: 256,
}  # L1 cache and shared memory per multiprocessor

# Resident threads, resident blocks and shared memory in KiB per multiprocessor: the guide's tables, and
# cuda_occupancy.h for the blocks of 11.0 and 12.
_SM_THREADS = {70: 2048, 72: 2048, 75: 1024, 80: 2048, 86: 1536, 87: 1536, 88: 1536, 89: 1536, 90: 2048, 100: 2048}
_SM_THREADS |= {101: 1536, 103: 2048, 110: 1536, 120: 1536, 121: 1536}
_SM_BLOCKS = {70: 32, 72: 32, 75: 16, 80: 32, 86: 16, 87: 16, 88: 16, 89: 24, 90: 32, 100: 32}
_SM_BLOCKS |= {101: 24, 103: 32, 110: 24, 120: 24, 121: 24}
_SM_SHARED = {70: 96, 72: 96, 75: 64, 80: 164, 86: 100, 87: 164, 88: 100, 89: 100, 90: 228, 100: 228}
_SM_SHARED |= {101: 228, 103: 228, 110: 228, 120: 100, 121: 100}
RESERVED_SHARED_BYTES, RESERVED_SHARED_MIN_ARCH = 1 << 10, 80


@dataclass(frozen=True)
class MultiprocessorSpec:
    """Resources of one streaming multiprocessor.

    Attributes:
        max_threads: Maximum number of resident threads.
        max_blocks: Maximum number of resident blocks.
        shared_bytes: Shared memory in bytes.
        reserved_shared_bytes: Shared memory that the system reserves per resident block, in bytes.
        shared_granularity: Allocation unit of a block's shared memory, in bytes.
        partitions: Number of partitions (warp schedulers), each with an equal part of the registers.
        register_granularity: Allocation unit of a warp's registers.
    """

    max_threads: int
    max_blocks: int
    shared_bytes: int
    reserved_shared_bytes: int
    shared_granularity: int
    partitions: int = 4
    register_granularity: int = 256


@dataclass(frozen=True)
class BlockLimits:
    """Maximum resources of a block; the defaults apply to every NVIDIA GPU.

    Attributes:
        max_threads: Threads per block (OpenCL: work-items per work-group).
        shared_bytes: Static shared memory in bytes (OpenCL: local memory).
        opt_in_shared_bytes: Static and dynamic shared memory in bytes if the launch opts in; None if this is not
            supported.
        max_cluster_blocks: Blocks per cluster; 1 without clusters.
    """

    max_threads: int = MAX_THREADS_PER_BLOCK
    shared_bytes: int = STATIC_SHARED_BYTES
    opt_in_shared_bytes: int | None = None
    max_cluster_blocks: int = 1

    @property
    def max_shared_bytes(self) -> int:
        """Maximum static and dynamic shared memory in bytes."""
        return max(self.shared_bytes, self.opt_in_shared_bytes or 0)


def parse_arch_number(arch: str) -> int:
    """Return the number of an architecture, such as 90 for "sm_90" and "sm_90a"; 0 for any other text."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(match[1]) if match else 0


def get_block_limits(arch: str) -> BlockLimits:
    """Return the maximum resources of a block on an NVIDIA architecture such as "sm_90"."""
    opt_in_kib = _OPT_IN_SHARED.get(parse_arch_number(arch))
    opt_in_bytes = opt_in_kib << 10 if opt_in_kib else None
    return BlockLimits(opt_in_shared_bytes=opt_in_bytes, max_cluster_blocks=get_max_cluster_blocks(arch))


def get_multiprocessor_spec(arch: str) -> MultiprocessorSpec | None:
    """Return the resources of a multiprocessor of an NVIDIA architecture such as "sm_90"; None if it is unknown.

    The source of the granularities is cuda_occupancy.h of CUDA 13.0.
    """
    arch_number = parse_arch_number(arch)
    if arch_number not in _SM_THREADS:
        return None
    reserved_bytes = RESERVED_SHARED_BYTES if arch_number >= RESERVED_SHARED_MIN_ARCH else 0
    granularity = 128 if arch_number >= RESERVED_SHARED_MIN_ARCH else 256
    return MultiprocessorSpec(
        _SM_THREADS[arch_number], _SM_BLOCKS[arch_number], _SM_SHARED[arch_number] << 10, reserved_bytes, granularity
    )


def get_max_cluster_blocks(arch: str | None) -> int:
    """Return the maximum number of blocks per cluster; 1 for a device without clusters or without architecture."""
    return MAX_CLUSTER_BLOCKS if arch and parse_arch_number(arch) >= CLUSTER_MIN_ARCH else 1


def get_fp32_lanes(arch: str) -> int | None:
    """Return the float32 multiply-adds per cycle and multiprocessor; None if unknown."""
    return _FP32_LANES.get(parse_arch_number(arch))


def get_l2_bytes(arch: str) -> int:
    """Return the L2 size in bytes of the largest GPU of an architecture; 4 MiB if it is unknown."""
    return _L2_MIB.get(parse_arch_number(arch), 4) << 20


def get_l1_bytes(arch: str) -> int:
    """Return the L1 cache and shared memory of a multiprocessor in bytes; 96 KiB for an unknown architecture."""
    return _L1_KIB.get(parse_arch_number(arch), 96) << 10
