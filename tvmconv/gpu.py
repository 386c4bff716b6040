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


def max_cluster(arch: str | None) -> int:
    """Blocks of a cluster at most on an architecture, or on a device that has none: 1."""
    return MAX_CLUSTER if arch and number(arch) >= CLUSTERS_SINCE else 1


def fp32_lanes(arch: str) -> int | None:
    """float32 multiply-adds a clock and multiprocessor; None where that is not known."""
    return _FP32_LANES.get(number(arch))
