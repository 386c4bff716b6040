"""Occupancy: by hand, and against NVIDIA's own calculator, a C header, on random kernels."""

import functools
import importlib.util
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tvmconv.analysis.occupancy import BLOCKS, REGISTERS_LIMIT, SHARED_MEMORY, WARPS, compute_occupancy, compute_waves
from tvmconv.errors import AnalysisError
from tvmconv.target import RESERVED_SHARED_BYTES, find_architecture, get_block_limits

ARCHS = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"]

# Stands for CUDA's calculator: lines of compute capability, what a multiprocessor has, and a kernel; blocks come out.
PROGRAM = r"""
#include <stdio.h>
#include <limits.h>
#include <string.h>
#include "cuda_occupancy.h"
int main(void) {
  int major, minor, sm_threads, sm_shared, reserved, opt_in, threads, registers, shared;
  while (scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &sm_threads, &sm_shared, &reserved, &opt_in,
               &threads, &registers, &shared) == 9) {
    struct cudaOccDeviceProp p; struct cudaOccFuncAttributes a; struct cudaOccDeviceState s; struct cudaOccResult r;
    memset(&p, 0, sizeof p); memset(&a, 0, sizeof a); memset(&s, 0, sizeof s); memset(&r, 0, sizeof r);
    p.computeMajor = major; p.computeMinor = minor; p.maxThreadsPerBlock = 1024; p.warpSize = 32; p.numSms = 1;
    p.maxThreadsPerMultiprocessor = sm_threads; p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 49152; p.sharedMemPerMultiprocessor = sm_shared; p.sharedMemPerBlockOptin = opt_in;
    p.reservedSharedMemPerBlock = reserved;
    a.maxThreadsPerBlock = 1024; a.numRegs = registers; a.maxDynamicSharedSizeBytes = shared;
    a.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; a.numBlockBarriers = 1;
    s.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
    int failed = cudaOccMaxActiveBlocksPerMultiprocessor(&r, &p, &a, &s, threads, shared);
    printf("%d\n", failed ? -failed : r.activeBlocksPerMultiprocessor);
  }
}
"""


@functools.cache
def header():
    """The folder of CUDA's headers, of the compiler's package or of a toolkit; None if there is none."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    places = [*(each for place in packages for each in place.glob("*/include")), Path("/usr/local/cuda/include")]
    return next((place for place in places if (place / "cuda_occupancy.h").exists()), None)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "blocks", "resources"),
    [
        ("sm_90", 256, 32, 0, 8, [WARPS, REGISTERS_LIMIT]),
        ("sm_90", 32, 16, 0, 32, [BLOCKS]),
        # 168 · 32 in multiples of 256 are 5,376, and 3 warps of these fit in a partition
        ("sm_90", 128, 168, 0, 3, [REGISTERS_LIMIT]),
        ("sm_86", 64, 32, 40_000, 2, [SHARED_MEMORY]),  # with 1 KiB more: 2 in 100 KiB
        ("sm_86", 64, 32, 100 << 10, 0, [SHARED_MEMORY]),
        ("sm_90", 1024, 128, 0, 0, [REGISTERS_LIMIT]),
    ],
)
def test_blocks_are_limited_by_resources(arch, threads, registers, shared_bytes, blocks, resources):
    found = compute_occupancy(arch, threads, registers, shared_bytes)
    assert (found.resident_blocks, found.limiting_resources) == (blocks, resources)
    assert found.warp_fraction == blocks * threads / 32 / found.max_warps


def test_an_unknown_architecture_is_refused():
    with pytest.raises(AnalysisError, match=r"sm_999.*not known"):
        compute_occupancy("sm_999", 32, 32, 0)


def test_waves_are_blocks_over_those_at_a_time():
    found = compute_waves(compute_occupancy("sm_90", 1024, 64, 0), blocks=200, multiprocessors=132)
    assert (found.max_active_blocks, round(found.num_waves, 3)) == (132, 1.515)
    assert found.busy_multiprocessor_fraction == 1.0
    assert compute_waves(compute_occupancy("sm_90", 256, 32, 0), 66, 132).busy_multiprocessor_fraction == 0.5
    with pytest.raises(AnalysisError, match="not one block fits on a multiprocessor: registers"):
        compute_waves(compute_occupancy("sm_90", 1024, 128, 0), 1, 132)


@pytest.mark.skipif(header() is None or shutil.which("cc") is None, reason="no C compiler, or no cuda_occupancy.h")
def test_blocks_are_those_of_nvidias_calculator(tmp_path):
    (tmp_path / "main.c").write_text(PROGRAM)
    compiled = ["cc", "-O0", "-I", str(header()), str(tmp_path / "main.c"), "-o", str(tmp_path / "main")]
    subprocess.run(compiled, check=True)
    random.seed(0)
    lines, ours = [], []
    for arch in ARCHS:
        there, most = find_architecture(arch), get_block_limits(arch).max_shared_bytes
        major, minor = divmod(int(arch.removeprefix("sm_")), 10)
        for _ in range(1500):
            threads, registers = random.randint(1, 1024), random.randint(1, 255)
            shared = random.choice([0, random.randint(0, 49152), random.randint(0, most)])
            reserved = RESERVED_SHARED_BYTES if major >= 8 else 0
            of_device = (major, minor, there.max_threads, there.shared_kib << 10, reserved, most)
            lines.append(" ".join(map(str, (*of_device, threads, registers, shared))))
            ours.append(compute_occupancy(arch, threads, registers, shared).resident_blocks)
    told = subprocess.run([tmp_path / "main"], input="\n".join(lines), capture_output=True, text=True, check=True)
    theirs = list(map(int, told.stdout.split()))
    different = [(line, a, b) for line, a, b in zip(lines, ours, theirs, strict=True) if a != b]
    assert not different, f"{len(different)} of {len(lines)}, such as {different[:3]}"
