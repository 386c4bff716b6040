"""A GPU's numbers: what a block, a thread and a kernel may have, and how memory is banked; by architecture.

Source, where none is named: CUDA C++ Programming Guide, "Compute Capabilities", tables of features and technical
specifications per compute capability.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP_SIZE = 32  # threads that execute together
WARPGROUP_SIZE = (
    128  # threads that multiply together since compute capability 9.0: four warps, the first a multiple of 4
)
NUM_BANKS = 32  # of shared memory
BANK_BYTES = 4  # that a bank serves at a time
VECTOR_BYTES = 16  # of the widest access of a thread; wider vectors are several of them

MAX_THREADS_PER_BLOCK = 1024  # of a block
MAX_THREADS_Z = 64  # of a block along z
MAX_BLOCKS_YZ = 65535  # of a grid along y and along z; along x there may be 2^31 - 1
REGISTERS_PER_MULTIPROCESSOR = 65536  # of 32 bits, of a multiprocessor
MAX_REGISTERS_PER_THREAD = 255  # of a thread

STATIC_SHARED_BYTES = 48 << 10  # of a block, allocated in the kernel's text
CONSTANT_BYTES = 64 << 10  # of a kernel's `__constant__` arrays
MAX_TEXTURE_WIDTH, MAX_TEXTURE_HEIGHT = 131072, 65000  # texels, of a 2-D texture over linear memory

CLUSTER_MIN_ARCH = 90  # the first architecture with clusters of blocks: PTX ISA, ".reqnctapercluster"
MAX_CLUSTER_BLOCKS = 8  # blocks of a cluster that every such GPU can run

ASYNC_COPY_MIN_ARCH = 80  # the first architecture with cp.async: PTX ISA, "cp.async"

# Shared memory that a block may have where it opts in, static and dynamic together, in KiB.
_OPT_IN_SHARED = {70: 96, 72: 96, 75: 64, 80: 163, 86: 99, 87: 163, 88: 99, 89: 99, 90: 227, 100: 227, 101: 227}
_OPT_IN_SHARED |= {103: 227, 110: 227, 120: 99, 121: 99}

# float32 multiply-adds a clock and multiprocessor: "Arithmetic Instructions", row "32-bit floating-point add, multiply,
# multiply-add".
_FP32_LANES = {75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 100: 128, 103: 128, 120: 128, 121: 128}

# The L2 cache in MiB, of V100, Titan RTX, A100 (40 GB), GA102, AD102, H100 and H200, B200: NVIDIA's whitepapers.
_L2_MIB = {70: 6, 75: 6, 80: 40, 86: 6, 89: 96, 90: 50, 100: 126}
_L1_KIB = {70: 128, 75: 96, 80: 192, 86: 128, 89: 128, 90: 256, 100: 256}  # with shared memory, of a multiprocessor

# What a multiprocessor has: threads, blocks, and shared memory in KiB, of which each block takes some for the system.
# The guide's tables, and cuda_occupancy.h for the blocks of 11.0 and 12.
_SM_THREADS = {70: 2048, 72: 2048, 75: 1024, 80: 2048, 86: 1536, 87: 1536, 88: 1536, 89: 1536, 90: 2048, 100: 2048}
_SM_THREADS |= {101: 1536, 103: 2048, 110: 1536, 120: 1536, 121: 1536}
_SM_BLOCKS = {70: 32, 72: 32, 75: 16, 80: 32, 86: 16, 87: 16, 88: 16, 89: 24, 90: 32, 100: 32}
_SM_BLOCKS |= {101: 24, 103: 32, 110: 24, 120: 24, 121: 24}
_SM_SHARED = {70: 96, 72: 96, 75: 64, 80: 164, 86: 100, 87: 164, 88: 100, 89: 100, 90: 228, 100: 228}
_SM_SHARED |= {101: 228, 103: 228, 110: 228, 120: 100, 121: 100}
RESERVED_SHARED_BYTES, RESERVED_SHARED_MIN_ARCH = 1 << 10, 80


@dataclass(frozen=True)
class MultiprocessorSpec:
    """What the blocks on a multiprocessor share.

    Attributes:
        max_threads: that can be there at a time.
        max_blocks: that can be there at a time.
        shared_bytes: shared memory.
        reserved_shared_bytes: of it, what each block takes beside its own.
        shared_granularity: in multiples of which a block gets shared memory.
        partitions: into which its warps are dealt out, each with a part of the registers.
        register_granularity: in multiples of which a warp gets registers.
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
    """What a block may have at most; the defaults are those of every NVIDIA GPU.

    Attributes:
        max_threads: threads (OpenCL: work-items).
        shared_bytes: static shared memory (OpenCL: local memory).
        opt_in_shared_bytes: static and dynamic shared memory together, where the launch asks for it; None for none
            beyond `shared_bytes`.
        max_cluster_blocks: blocks of a cluster; 1 where there are no clusters.
    """

    max_threads: int = MAX_THREADS_PER_BLOCK
    shared_bytes: int = STATIC_SHARED_BYTES
    opt_in_shared_bytes: int | None = None
    max_cluster_blocks: int = 1

    @property
    def max_shared_bytes(self) -> int:
        """Static and dynamic shared memory together."""
        return max(self.shared_bytes, self.opt_in_shared_bytes or 0)


def parse_arch_number(arch: str) -> int:
    """An architecture's number: 90 for "sm_90" and "sm_90a"; 0 for what is written otherwise."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(match[1]) if match else 0


def get_block_limits(arch: str) -> BlockLimits:
    """What a block may have at most on an NVIDIA architecture such as "sm_90"."""
    opt_in = _OPT_IN_SHARED.get(parse_arch_number(arch))
    return BlockLimits(
        opt_in_shared_bytes=opt_in << 10 if opt_in else None, max_cluster_blocks=get_max_cluster_blocks(arch)
    )


def get_multiprocessor_spec(arch: str) -> MultiprocessorSpec | None:
    """What a multiprocessor has, on an NVIDIA architecture such as "sm_90"; None for one that is not known.

    Source of the granularities: cuda_occupancy.h of CUDA 13.0.
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
    """Blocks of a cluster at most on an architecture, or on a device that has none: 1."""
    return MAX_CLUSTER_BLOCKS if arch and parse_arch_number(arch) >= CLUSTER_MIN_ARCH else 1


def get_fp32_lanes(arch: str) -> int | None:
    """float32 multiply-adds a clock and multiprocessor; None where that is not known."""
    return _FP32_LANES.get(parse_arch_number(arch))


def get_l2_bytes(arch: str) -> int:
    """What the L2 cache of an architecture's largest GPU holds; of one that is not known 4 MiB."""
    return _L2_MIB.get(parse_arch_number(arch), 4) << 20


def get_l1_bytes(arch: str) -> int:
    """L1 and shared memory of a multiprocessor, together; of an architecture that is not known 96 KiB."""
    return _L1_KIB.get(parse_arch_number(arch), 96) << 10
