"""A GPU's numbers: what a block, a thread and a kernel may have, and how memory is banked; by architecture.

Source, where none is named: CUDA C++ Programming Guide, "Compute Capabilities", tables of features and technical
specifications per compute capability.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP = 32  # threads that execute together
WARPGROUP = 128  # threads that multiply together since compute capability 9.0: four warps, the first a multiple of 4
BANKS = 32  # of shared memory
BANK_BYTES = 4  # that a bank serves at a time
VECTOR_BYTES = 16  # of the widest access of a thread; wider vectors are several of them

MAX_THREADS = 1024  # of a block
MAX_THREADS_Z = 64  # of a block along z
MAX_BLOCKS_YZ = 65535  # of a grid along y and along z; along x there may be 2^31 - 1
REGISTERS = 65536  # of 32 bits, of a multiprocessor
MAX_REGISTERS = 255  # of a thread

STATIC_SHARED_BYTES = 48 << 10  # of a block, allocated in the kernel's text
CONSTANT_BYTES = 64 << 10  # of a kernel's `__constant__` arrays
MAX_TEXTURE_WIDTH, MAX_TEXTURE_HEIGHT = 131072, 65000  # texels, of a 2-D texture over linear memory

CLUSTERS_SINCE = 90  # the first architecture with clusters of blocks: PTX ISA, ".reqnctapercluster"
MAX_CLUSTER = 8  # blocks of a cluster that every such GPU can run

ASYNC_COPY_SINCE = 80  # the first architecture with cp.async: PTX ISA, "cp.async"

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
RESERVED_SHARED_BYTES, RESERVED_SINCE = 1 << 10, 80


@dataclass(frozen=True)
class Multiprocessor:
    """What the blocks on a multiprocessor share.

    Attributes:
        threads: that can be there at a time.
        blocks: that can be there at a time.
        shared_bytes: shared memory.
        reserved_shared_bytes: of it, what each block takes beside its own.
        shared_granularity: in multiples of which a block gets shared memory.
        partitions: into which its warps are dealt out, each with a part of the registers.
        register_granularity: in multiples of which a warp gets registers.
    """

    threads: int
    blocks: int
    shared_bytes: int
    reserved_shared_bytes: int
    shared_granularity: int
    partitions: int = 4
    register_granularity: int = 256


@dataclass(frozen=True)
class Limits:
    """What a block may have at most; the defaults are those of every NVIDIA GPU.

    Attributes:
        max_threads: threads (OpenCL: work-items).
        shared_bytes: static shared memory (OpenCL: local memory).
        opt_in_shared_bytes: static and dynamic shared memory together, where the launch asks for it; None for none
            beyond `shared_bytes`.
        max_cluster: blocks of a cluster; 1 where there are no clusters.
    """

    max_threads: int = MAX_THREADS
    shared_bytes: int = STATIC_SHARED_BYTES
    opt_in_shared_bytes: int | None = None
    max_cluster: int = 1

    @property
    def all_shared_bytes(self) -> int:
        """Static and dynamic shared memory together."""
        return max(self.shared_bytes, self.opt_in_shared_bytes or 0)


def number(arch: str) -> int:
    """An architecture's number: 90 for "sm_90" and "sm_90a"; 0 for what is written otherwise."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(match[1]) if match else 0


def limits(arch: str) -> Limits:
    """What a block may have at most on an NVIDIA architecture such as "sm_90"."""
    opt_in = _OPT_IN_SHARED.get(number(arch))
    return Limits(opt_in_shared_bytes=opt_in << 10 if opt_in else None, max_cluster=max_cluster(arch))


def multiprocessor(arch: str) -> Multiprocessor | None:
    """What a multiprocessor has, on an NVIDIA architecture such as "sm_90"; None for one that is not known.

    Source of the granularities: cuda_occupancy.h of CUDA 13.0.
    """
    which = number(arch)
    if which not in _SM_THREADS:
        return None
    reserved = RESERVED_SHARED_BYTES if which >= RESERVED_SINCE else 0
    granularity = 128 if which >= RESERVED_SINCE else 256
    return Multiprocessor(_SM_THREADS[which], _SM_BLOCKS[which], _SM_SHARED[which] << 10, reserved, granularity)


def max_cluster(arch: str | None) -> int:
    """Blocks of a cluster at most on an architecture, or on a device that has none: 1."""
    return MAX_CLUSTER if arch and number(arch) >= CLUSTERS_SINCE else 1


def fp32_lanes(arch: str) -> int | None:
    """float32 multiply-adds a clock and multiprocessor; None where that is not known."""
    return _FP32_LANES.get(number(arch))


def l2_bytes(arch: str) -> int:
    """What the L2 cache of an architecture's largest GPU holds; of one that is not known 4 MiB."""
    return _L2_MIB.get(number(arch), 4) << 20


def l1_bytes(arch: str) -> int:
    """L1 and shared memory of a multiprocessor, together; of an architecture that is not known 96 KiB."""
    return _L1_KIB.get(number(arch), 96) << 10
