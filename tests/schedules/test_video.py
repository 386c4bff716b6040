"""Cached frames, upsampled inputs, and tensors whose offsets need 64 bits."""

import emulate
import pytest

import tvmconv as tc
from tvmconv.builtin import tir_builder
from tvmconv.errors import ScheduleError
from tvmconv.workloads import conv_geometry

CACHED = "conv3d:1x16x2x9x10,32x16x2x3x3,s1,p0x1x1,c1,bf16,nhwc,bias,add,silu"
UPSAMPLED = "conv2d:2x32x5x4,24x32x3x3,s1,p1,up2,bf16,nhwc,bias,silu"
TILE = {"split_k": 1, "warpgroups": 1, "block_n": 16, "stages": 3}
LARGE = "conv3d:1x96x81x720x1280,96x96x3x3x3,s1,p2x1x1x0x1x1,bf16,nhwc,bias"


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "text",
    [
        "conv3d:2x6x3x9x7,10x6x3x3x3,s1,p0x1x1,c2",
        "conv3d:2x6x3x5x6,10x6x3x3x3,s2x1x1,p1x1x1x0x1x1,d1x2x1,c1,up2,bf16,nhwc,bias,add,silu",
        "conv1d:2x6x19,10x6x3,s2,p1,up3,bias",
    ],
)
@pytest.mark.parametrize("schedule", ["default", "implicit_gemm"])
def test_schedules_that_follow_the_declaration_read_the_input(text, schedule):
    assert tc.build(text, schedule, device="opencl:0").verify().ok


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        (CACHED, "hopper", TILE),
        ("conv3d:2x32x3x4x5,32x16x2x3x3,s2x1x2,p1x1x1x0x1x1,d1x2x1,c1,g2,f16,nhwc", "hopper", None),
        ("conv3d:1x16x2x3x64,3x16x3x3x3,s1,p1x1x1x0x1x1,c1,f16,nhwc", "hopper", {"taps_per_copy": 3, "split_k": 1}),
        ("conv3d:2x16x3x6x5,24x16x3x3x3,s1,p0x1x1,c2,bf16,nhwc,bias,add,silu", "mma_sync", None),
        ("conv3d:2x6x3x6x5,10x6x3x3x3,s1,p1x1x1x0x1x1,c1,up2x3x2,f16,nhwc", "mma_sync", None),
        ("conv3d:2x16x2x5x20,4x16x3x3x3,s1,p0x1x1,c2,bf16,nhwc,bias,add,silu", "kn2row_hopper", {"lines": 6}),
        ("conv2d:1x16x9x70,3x16x3x2,s1,p1x1x1x0,d2x1,f16,nhwc,bias", "kn2row_hopper", None),
        (UPSAMPLED, "upsample_mma_sync", None),
        (UPSAMPLED, "upsample_hopper", None),
        ("conv2d:1x32x4x3,32x16x2x5,s1,p0x1x1x2,d2x1,g2,up1x3,tf32,nhwc,add", "upsample_hopper", None),
        ("conv3d:1x16x2x4x3,16x16x3x3x3,s1,p2x1x1x0x1x1,up2,f16,nhwc,bias", "upsample_hopper", None),
    ],
)
def test_tensor_core_kernels_read_the_input(text, schedule, config):
    emulate.build_checked(text, schedule, config)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("conv3d:2x8x3x6x5,16x8x3x3x3,s1,p0x1x1,c2,bf16,nhwc,bias,add", "mma_sync"),
        ("conv2d:2x32x5x4,24x32x3x3,s1,p1,up2,f16,nhwc,add", "upsample_hopper"),
    ],
)
def test_kernels_with_64_bit_offsets_are_correct(text, schedule, monkeypatch):
    narrow = tc.build(text, schedule, arch="sm_90").source
    monkeypatch.setattr(tir_builder, "MAX_INT32_ELEMENTS", 100)
    wide = emulate.build_checked(text, schedule).source
    assert wide.count("int64_t") > narrow.count("int64_t")


def test_declared_64_bit_indices_become_those_that_suffice(monkeypatch):
    text, sources = "conv3d:1x4x3x5x6,6x4x3x3x3,s1,p1,c1", []
    for is_large in (False, True):
        monkeypatch.setattr(conv_geometry.ConvGeometry, "has_large_tensors", is_large)
        sources.append(tc.build(text, "default", arch="sm_90").source)
    assert sources[0] == sources[1]


@pytest.mark.parametrize("schedule", ["default", "mma_sync", "hopper"])
def test_offsets_of_a_video_have_64_bits(schedule):
    """720p of 81 frames, which TMA addresses by coordinates."""
    kernel = tc.build(LARGE, schedule, arch="sm_90")
    has_offsets = "(int64_t)88473600" in kernel.source
    assert has_offsets == (schedule != "hopper")


@pytest.mark.parametrize(
    ("text", "schedule", "expected"),
    [
        (LARGE, "stem", "stem does not support tensors of more than 2"),
        (CACHED, "grouped_nhwc", "grouped_nhwc does not support cached frames"),
        (CACHED.replace("nhwc", "nchw"), "hopper", "arrays with cached frames"),
        (UPSAMPLED, "hopper", "hopper does not support an upsampled input"),
        (UPSAMPLED.replace("s1", "s2"), "upsample_hopper", "strides are 1"),
        (CACHED, "kn2row_hopper", "filters × taps of a plane fit one wgmma"),
        ("conv2d:1x64x61x70,16x64x3x3,s1,p2,d2,f16,nhwc,add", "kn2row_hopper", "a window of some number of lines"),
        (LARGE.replace("bf16", "i8"), "mma_sync", "have 16 or 32 bits"),
        (LARGE.replace("bf16", "e4m3"), "mma_sync_fp8", "mma_sync_fp8 does not support tensors of more than 2"),
        (LARGE.replace("bf16", "e4m3"), "hopper", "have 16 or 32 bits"),
    ],
)
def test_schedules_that_cannot_read_the_input_say_so(text, schedule, expected):
    with pytest.raises(ScheduleError, match=expected):
        tc.build(text, schedule, arch="sm_90")
