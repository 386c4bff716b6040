"""Channels-first convolutions on tensor cores: conversions around channels-last kernels, and kernels without them."""

import math
from pathlib import Path

import emulate
import pytest
from small_tiles import SMALL as SMALL_TILES
from verified_schedules import verify_promising

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.analysis.races import find_races
from tvmconv.workloads.dtypes import get_itemsize

CHANNELS_FIRST = Path(__file__).parent.parent / "data" / "channels-first-workloads.txt"  # odd ones, and mixed layouts
SMALL, WIDE = {"split_k": 1, "block_n": 48, "warpgroups": 1}, {"split_k": 1, "warpgroups": 2, "wgmma_m_tiles": 2}
WORKLOADS = (
    ("conv2d:2x24x7x7,16x24x3x3,s2,p1,f16,bias,add,relu", 3),  # 49 pixels: no vector of them is aligned
    ("conv2d:2x32x6x6,144x32x3x3,s1,p1,bf16,add,silu", 3),
    ("conv2d:1x32x10x12,72x32x3x3,s1,p1,tf32,add", 3),
    ("conv2d:2x64x9x8,64x32x3x3,s1,p1,g2,f16,bias", 3),
    ("conv2d:1x32x9x10,40x32x3x2,s1x2,p1x0x2x1,d2,f16,bias", 3),
    ("conv1d:2x32x37,32x32x5,s1,p2,bf16,bias", 3),
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,f16", 3),
    ("conv2d:2x64x8x8,72x64x1x1,s1,p0,f16,bias,add,relu", 1),  # pixels are an MN-major operand
    ("conv2d:3x72x8x12,48x72x1x1,s1,p0,bf16,bias", 1),
    ("conv1d:2x128x320,64x64x1,s1,p0,g2,f16", 1),
    ("conv2d:3x64x9x10,72x64x1x1,s1,p0,f16,bias", 2),  # 90 pixels are no multiple of a box
    ("conv2d:1x64x8x8,40x64x1x1,s1,p0,tf32", 2),  # only 16-bit operands may be MN-major
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default"),
        pytest.param({**SMALL, "cluster_m": 2}, id="cluster"),
        pytest.param(SMALL, id="small", marks=pytest.mark.slow),
        pytest.param(WIDE, id="wide", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("text", "launches"), WORKLOADS)
def test_hopper_computes_channels_first_workloads(text, launches, config):
    kernel = emulate.build_checked(text, "hopper", config)
    if config.get("split_k") == 1:
        assert len(kernel.kernels) == launches


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("hopper", "conv2d:1x128x7x7,64x128x3x3,s1,p1,f16,bias,add"),
        ("mma_sync", "conv2d:2x24x7x7,16x24x3x3,s2,p1,f16,bias,add,relu"),
        ("mma_sync", "conv2d:1x7x9x8,13x7x3x3,s1,p1,f16"),  # odd numbers of channels and pixels
        ("mma_sync", "conv2d:1x32x9x8,40x16x3x3,s1,p1,g2,tf32"),
        ("winograd_hopper", "conv2d:1x32x9x8,40x32x3x3,s1,p1,f16,bias,add,relu"),
    ],
)
def test_conversions_surround_channels_last_kernels(schedule, text):
    w = tc.parse(text)
    config = {"split_k": 2} if schedule == "hopper" else {}
    kernel = tc.build(w, schedule, arch="sm_90", config=config)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance
    assert len(kernel.kernels) > len(tc.build(w.to_channels_last(), schedule, arch="sm_90", config=config).kernels)


@pytest.mark.parametrize(
    ("schedule", "text", "elements"),
    [
        ("hopper", "conv2d:2x32x12x24,24x32x1x1,s2,p0,f16,bias", 2 * 32 * 6 * 12),  # four pixels of a vector
        ("hopper", "conv2d:2x32x11x9,24x32x1x3,s2x1,p0,tf32,nchw-nhwc", 2 * 32 * 6 * 9),  # whole lines
        ("mma_sync", "conv3d:1x10x5x6x7,24x10x1x1x1,s3x2x2,p0,bf16", 10 * 2 * 3 * 4),
    ],
)
def test_conversions_leave_out_pixels_that_no_tap_reads(schedule, text, elements):
    config = {"input_loader": "converted"} if schedule == "hopper" and "nhwc" not in text else {}
    lowered = emulate.build_checked(text, schedule, config).lowered_module
    assert elements in [math.prod(array.shape) for array in lowered.workspace]


def test_conversions_are_left_out_where_both_layouts_are_the_same():
    w = tc.parse("conv2d:2x64x1x1,48x64x1x1,s1,p0,f16")
    kernel = tc.build(w, "mma_sync", arch="sm_90")
    assert len(kernel.kernels) == len(tc.build(w.to_channels_last(), "mma_sync", arch="sm_90").kernels)
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance


TWO_WARPS = {"block_m": 16, "block_n": 32, "block_k": 32, "warps_m": 1, "warps_n": 2, "warps_k": 1, "stages": 2}
PIXELS_OF_MMA_SYNC = (
    ("conv2d:2x24x7x7,16x24x3x3,s2,p1,f16,bias,add,relu", {}),  # 49 pixels: no vector of them is aligned
    ("conv2d:2x32x8x12,40x32x3x3,s1,p1,bf16,add,silu", {"residual_add": "accumulator_init"}),
    ("conv2d:1x64x9x8,40x64x3x3,s1,p1,tf32,bias", {"split_k": 4, "split_k_reduction": "cluster", **TWO_WARPS}),
    ("conv2d:2x64x7x8,24x64x3x3,s1,p1,f16,bias,add", {"split_k": 2, "split_k_reduction": "cluster", **TWO_WARPS}),
    ("conv2d:2x64x7x6,13x64x3x3,s1,p1,f16,bias,add", {"split_k": 2, "split_k_reduction": "workspace"}),
    (
        "conv1d:3x32x40,48x16x3,s1,p1,g2,f16,bias,relu",
        {"tiles_per_block": 2, "warps_k": 1, "warps_m": 2, "block_m": 32, "block_k": 32, "stages": 2},
    ),
    ("conv3d:1x16x4x5x6,24x16x3x3x3,s1,p1,nhwc-nchw,f16,bias", {}),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), PIXELS_OF_MMA_SYNC)
def test_mma_sync_stores_vectors_of_pixels(text, config):
    kernel = emulate.build_checked(text, "mma_sync", config)
    w = tc.parse(text)
    conversions = int(w.input_layout == "nchw")
    launches = len(kernel.kernels) - kernel.executable.num_prepack_kernels
    assert launches == 1 + conversions + (config.get("split_k_reduction") == "workspace")
    assert find_races(kernel) == []


@pytest.mark.slow
def test_staged_pixels_lie_in_distinct_banks():
    for dtype in ("f16", "tf32"):
        for block_m in (16, 32, 48, 64, 96):
            config = {"block_m": block_m, "warps_m": 1, "warps_n": 2, "warps_k": 1, "split_k": 1, "block_n": 32}
            config |= {"block_k": 32, "stages": 2}
            kernel = tc.build(f"conv2d:1x64x16x24,32x64x1x1,s1,p0,{dtype}", "mma_sync", arch="sm_90", config=config)
            stores = [access for access in count_shared_accesses(kernel) if access.kind == "store"]
            assert {access.nbytes for access in stores} >= {get_itemsize(kernel.workload.storage)}
            assert all(access.num_conflicts == 0 for access in stores if access.nbytes < 16)  # others copy operands


SPLIT_WORKLOADS = (
    ("conv2d:2x64x7x7,40x64x3x3,s1,p1,f16,bias,add,relu", {"split_k": 3}),
    ("conv2d:1x64x14x14,13x64x3x3,s1,p1,tf32,bias,silu", {"split_k": 8, "block_n": 32}),  # odd channels
    ("conv2d:2x64x9x8,24x32x3x3,s2,p1,g2,bf16,add", {"split_k": 2, "block_n": 48}),
    ("conv2d:1x96x8x12,72x96x3x3,s1,p1,nhwc-nchw,f16,bias", {"split_k": 5, "warpgroups": 2, "wgmma_m_tiles": 2}),
    ("conv2d:3x128x8x8,40x128x1x1,s1,p0,f16,add", {"split_k": 2}),
    ("conv1d:2x32x37,11x32x5,s1,p2,bf16,bias", {"warpgroups": 2}),
)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "config"), SPLIT_WORKLOADS)
def test_clusters_store_the_pixels_of_split_sums(text, config):
    """Pushes and loads of partial sums access each bank once, and no launch converts the output."""
    kernel = emulate.build_checked(text, "hopper", SMALL_TILES | config)
    assert find_races(kernel) == []
    assert all(access.num_conflicts == 0 for access in count_shared_accesses(kernel))
    w = tc.parse(text)
    converts_input = w.input_layout == "nchw" and max(w.kernel) > 1
    assert len(kernel.kernels) - kernel.executable.num_prepack_kernels == 1 + converts_input


@pytest.mark.gpu
@pytest.mark.parametrize("text", CHANNELS_FIRST.read_text().split())
def test_promising_schedules_compute_channels_first_and_mixed_layouts(text, gpu):
    assert verify_promising(text, gpu) == []
