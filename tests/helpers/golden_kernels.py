"""One small kernel for each variant of an instruction that the emulator executes.

The same TIR is emulated and compiled for sm_90a, where `golden_record` records what the hardware computes.
"""

from typing import Any

import golden_barriers  # noqa: F401  these modules add their kernels to `KERNELS`
import golden_matrices  # noqa: F401
import golden_threads  # noqa: F401
import golden_tma  # noqa: F401
from golden_parts import KERNELS, GoldenKernel, fractions

import tvmconv as tc


def scheduled(text: str, schedule: str, config: dict[str, Any], tolerance: float) -> GoldenKernel:
    """A workload of fractions with a schedule of the library."""
    workload = tc.parse(text)
    shapes = list(zip(workload.argument_shapes, workload.argument_dtypes, strict=True))[:-1]
    inputs = tuple(fractions(shape, dtype, seed) for seed, (shape, dtype) in enumerate(shapes, 1))
    return GoldenKernel(
        inputs, lambda: tc.build(workload, schedule, arch="sm_90", config=config).lowered_module, tolerance
    )


CONV = "conv2d:1x32x8x8,32x32x3x3,s1,p1"
HALF, SINGLE = 2e-4, 1e-6  # rounding of the output to float16, and of sums in another order
HOPPER = {"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 16, "block_k_bytes": 64, "stages": 2}
KERNELS |= {
    "schedule_implicit_gemm": scheduled(CONV, "implicit_gemm", {"pipeline": "async3"}, SINGLE),
    "schedule_tensor_core": scheduled(f"{CONV},f16,nhwc", "tensor_core", {}, HALF),
    "schedule_mma_sync": scheduled(f"{CONV},f16,nhwc", "mma_sync", {}, HALF),
    "schedule_mma_sync_tf32": scheduled(f"{CONV},tf32,nhwc", "mma_sync", {}, SINGLE),
    "schedule_hopper": scheduled(f"{CONV},f16,nhwc", "hopper", HOPPER, HALF),
    "schedule_shuffle": scheduled("filter1d:1024,k5", "shuffle", {}, SINGLE),
}
