"""Coefficients of the schedules' latency estimates, which were fitted to measurements, by architecture.

Times are in microseconds, traffic in bytes per microsecond, and rates per SM if nothing else is said. The hardware
numbers that NVIDIA publishes are in `target`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GemmCoefficients:
    """Coefficients of a tiled matrix product on tensor cores; see `schedules/conv/tensor_cores/latency_model.py`."""

    mma_per_us: float  # 16-bit multiply-adds per SM
    smem_bytes_per_us: float  # shared-memory traffic per SM
    dram_bytes_per_us: float  # compulsory traffic of global memory
    k_tile_us: float  # fixed cost of a k-tile: its barrier and the wait for operands
    epilogue_us_per_accumulator: float  # cost of a tile's epilogue per accumulator of a thread
    launch_us: float  # cost of a launch


@dataclass(frozen=True, kw_only=True)
class HopperCoefficients(GemmCoefficients):
    """Coefficients of `hopper`."""

    tma_rows_per_us: float  # rows (pixels and output channels) that TMA copies per SM
    stage_reuse_k_tiles: float  # number of k-tiles after which a stage is full again
    cluster_wait_us: float  # additional latency of a stage that the CTAs of a cluster share
    reduction_us_per_element: float  # cost of a cluster reduction per element of the tile
    tile_start_us: float  # cost of starting a tile in a CTA that computes several
    split_k_cluster_us: float  # cost of a split-K cluster
    # Largest best estimate in ping-pong, relative to that of cooperative configs and both without the bound by memory,
    # with which the default config is ping-pong.
    max_pingpong_ratio: float


@dataclass(frozen=True, kw_only=True)
class MmaSyncCoefficients(GemmCoefficients):
    """Coefficients of `mma_sync`."""

    l2_bytes_per_us: float  # L2 traffic of the operands of all blocks
    l2_latency_us: float  # latency of a k-tile's operands, divided by the number of k-tiles in flight
    mma_issue_us: float  # cost of each mma of a warp
    workspace_launch_us: float  # cost of a second launch
    cluster_us_per_block: float  # cost of a cluster reduction per block of the cluster


@dataclass(frozen=True)
class TransformCoefficients:
    """Coefficients of the transforms of `winograd_hopper`, besides the product."""

    bytes_per_us: float  # bytes that the transforms read and write
    launch_us: float  # cost of the additional launches


@dataclass(frozen=True)
class WinogradCoefficients:
    """Coefficients of `winograd` and `winograd_fused` in float32."""

    fma_per_us: float  # multiply-adds of the GPU in the product
    bytes_per_us: float  # bytes of the transformed operands, some of which stay in the L2 cache
    launch_us: float  # cost of all launches


@dataclass(frozen=True)
class StripCoefficients:
    """Coefficients of the NHWC direct schedules, in clock cycles of an SM."""

    l2_bytes_per_cycle: float  # bytes between one SM and the L2 cache
    l1_lines_per_cycle: float  # approximate lookups of the L1 cache per warp
    overhead_instructions: float  # instructions per thread before its first load and after its last store


@dataclass(frozen=True, kw_only=True)
class DepthwiseCoefficients:
    """Coefficients of `schedules/conv/nchw_direct/depthwise_latency.py`, in clock cycles of an SM."""

    issue_factor: float  # cycles of a scheduler per counted instruction
    cycles_per_instruction: float  # cycles of a warp that nothing else delays
    row_cycles: float  # additional cycles of a warp per input row
    overhead_instructions: float  # instructions per thread before its first load and after its last store
    read_factor: float  # cycles of the L1 cache per counted cycle
    l2_bytes_per_cycle: float  # bytes between one SM and the L2 cache
    spill_factor: float  # relative cost of as many spilled registers as a thread has


@dataclass(frozen=True)
class FittedLatency:
    """Coefficients of all estimates for one architecture."""

    hopper: HopperCoefficients
    mma_sync: MmaSyncCoefficients
    winograd_transforms: TransformCoefficients
    winograd: WinogradCoefficients
    strips: StripCoefficients
    depthwise: DepthwiseCoefficients


FITTED = {
    "sm_90": FittedLatency(
        # Fitted to 8,792 timings in float16 and bfloat16 on H200s: 363 layers of ResNet-50, d2l-tvm, YOLOv8s,
        # EfficientNet-B0, ConvNeXt-T, Stable Diffusion 1.5, fifteen networks of torchvision and others, at batch sizes
        # 1 to 32. Half of all estimates are within 8 % of the measurement. Among the measured configs of a layer, the
        # one with the best estimate takes 1.05 times the fastest time (geometric mean). It takes more than 1.15 times
        # for 24 of the 278 layers with at least twelve measured configs.
        hopper=HopperCoefficients(
            mma_per_us=5.24e6,
            smem_bytes_per_us=2.53e5,
            tma_rows_per_us=1.21e3,
            dram_bytes_per_us=3.73e6,
            k_tile_us=0.129,
            stage_reuse_k_tiles=3.03,
            cluster_wait_us=0.788,
            epilogue_us_per_accumulator=0.00751,
            reduction_us_per_element=1.04e-4,
            tile_start_us=0.158,
            split_k_cluster_us=0.654,
            launch_us=1.49,
            # Fitted to 22 layers with large outputs in float16 on an H100 (2026-11-25). On 21 of them, the best configs
            # by both estimates were timed in turn. Values from 1.012 to 1.057 make ping-pong the default of the same 11
            # layers. Its kernels are 0.99 to 1.14 times as fast as cooperative ones there, and the geometric mean of
            # all 21 is 1.026. It is 1.017 with 1.00; with 1.12 it is 1.016, and one layer is 0.82 times as fast.
            max_pingpong_ratio=1.02,
        ),
        # Fitted to 3,824 timings in float16 on one H200: layers of ResNet-50, YOLOv8s, ConvNeXt-T and d2l-tvm, at batch
        # sizes 1 and 32. Half of all estimates are within 10 % of the measurement. Among the measured configs of a
        # layer, the one with the best estimate takes 1.09 times the fastest time, and the fastest of the twelve with
        # the best estimates 1.01 times (geometric means).
        mma_sync=MmaSyncCoefficients(
            mma_per_us=1.77e6,
            smem_bytes_per_us=1.97e5,
            l2_bytes_per_us=1.28e7,
            dram_bytes_per_us=2.68e6,
            l2_latency_us=0.56,
            k_tile_us=0.116,
            mma_issue_us=0.0034,
            epilogue_us_per_accumulator=0.0054,
            workspace_launch_us=0.70,
            cluster_us_per_block=0.68,
            launch_us=1.83,
        ),
        # Fitted to the three fastest configs of each of 57 layers of ResNet-50, Stable Diffusion 1.5, VGG-16 and
        # YOLOv8s, in float16 and TF32 on one H200. 90 % of the estimates are within 9 % of the measurement.
        winograd_transforms=TransformCoefficients(bytes_per_us=3.8e6, launch_us=0.6),
        # Fitted to the fastest config of each of 75 layers in float32 on H200s. Half of the estimates are within 12 %
        # of the measurement, and 90 % within 23 %.
        winograd=WinogradCoefficients(fma_per_us=2.12e7, bytes_per_us=1.16e7, launch_us=5.98),
        strips=StripCoefficients(l2_bytes_per_cycle=24, l1_lines_per_cycle=2, overhead_instructions=60),
        # Fitted to 1,162 timings on H200s: 36 layers of `depthwise_nhwc` in float16 and TF32 at batches of 1 to 32, and
        # one of `depthwise_nchw`. Of six other layers, channels first at batch 32, the config with the best estimate
        # takes 1.08 times the fastest time (geometric mean), and 1.37 times by `strips`. The mean rank correlation is
        # 0.61, and 0.55 by `strips`.
        depthwise=DepthwiseCoefficients(
            issue_factor=1.3,
            cycles_per_instruction=6,
            row_cycles=80,
            overhead_instructions=50,
            read_factor=1.3,
            l2_bytes_per_cycle=88,
            spill_factor=3.5,
        ),
    )
}
H200_FIT = FITTED["sm_90"]  # the only fit: defaults and searches on other GPUs are ranked by it as well
