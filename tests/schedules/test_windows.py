"""`window_hopper`: filters that stay in shared memory, and windows of pixels that all of their taps read."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError
from tvmconv.target import get_block_limits

LAYER = "conv2d:32x32x160x160,32x32x3x3,s1,p1,f16,nhwc"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        (
            "conv2d:1x32x9x18,24x32x3x3,s1,p1,f16,nhwc,bias,relu",  # tiles overhang both axes
            {"lines": 8, "columns": 16, "warpgroups": 1, "stages": 2},
        ),
        (
            "conv2d:3x16x19x20,24x16x3x3,s1,p1,bf16,nhwc",  # a warpgroup has a line of patches
            {"lines": 16, "columns": 16, "warpgroups": 2, "stages": 2},
        ),
        (
            "conv2d:1x64x10x40,16x64x3x3,s1,p1,f16,nhwc",  # two warpgroups share a line of patches
            {"lines": 16, "columns": 32, "warpgroups": 4, "stages": 1},
        ),
        ("conv2d:2x16x18x20,16x16x3x3,s2,p1,f16,nhwc,bias,silu", None),  # four planes
        (
            "conv2d:2x16x9x20,40x16x3x3,s1,p1,f16,nhwc,bias,silu,add",  # more subtiles than stages
            {"lines": 8, "columns": 16, "warpgroups": 2, "stages": 2},
        ),
        ("conv2d:1x96x9x9,32x96x3x2,s1,p1x0x2x1,d2,f16,nhwc", None),  # three blocks of channels
        ("conv2d:1x32x12x12,16x32x5x5,s2x1,p2,tf32,nhwc", None),
        ("conv2d:1x16x8x8,16x16x1x5,s1,p0x2,f16,nhwc", None),
        ("conv2d:1x16x12x8,16x16x3x3,s2,p0,d2,f16,nhwc", None),  # all taps in one plane
        (
            "conv3d:2x32x3x9x18,24x32x3x3x3,s1,p1,f16,nhwc,bias,relu",  # a window for each of three slices
            {"lines": 8, "columns": 16, "warpgroups": 1, "stages": 2},
        ),
        ("conv3d:1x64x3x8x10,16x64x3x2x3,s2x1x1,p1x0x1,d1x2x1,bf16,nhwc,add", None),
        ("conv3d:1x16x4x10x9,16x16x2x1x1,s1,p0,f16,nhwc,silu", None),
        ("conv2d:1x64x9x18,24x64x3x3,s1,p1,out-f16,i8,nhwc,scale", None),  # columns of a wgmma in 16
        ("conv2d:1x32x9x18,40x32x3x3,s1,p1,i8,nhwc", None),  # sums are stored
        ("conv2d:1x64x12x12,48x64x3x3,s1,p1,e4m3,nhwc,scale,bias,silu,add,quantize", None),  # words of four results
        ("conv2d:1x128x9x10,64x128x3x3,s1,p1,i8,nhwc,scale,relu,add,quantize", None),
        ("conv2d:2x64x12x14,48x64x3x3,s2,p1,out-f16,e4m3,nhwc,scale", None),
        ("conv3d:1x32x4x9x10,32x32x3x3x3,s1,p1,out-f16,e4m3,nhwc,scale", None),
    ],
)
def test_all_taps_read_a_window(text, config):
    emulate.build_checked(text, "window_hopper", config)


@pytest.mark.parametrize(
    "options",
    [
        ",128x128x3x3,s1,p1,f16,nhwc",  # filters of 288 KiB
        ",32x128x3x3,s3,p1,f16,nhwc",
        ",32x128x1x1,s1,p0,f16,nhwc",
        ",36x128x3x3,s1,p1,f16,nhwc",  # outputs that TMA cannot store
    ],
)
def test_other_convolutions_are_refused(options):
    with pytest.raises(ScheduleError, match="images of one group"):
        tc.build(f"conv2d:1x128x16x16{options}", "window_hopper", arch="sm_90")


def test_sums_of_8_bit_floats_are_promoted_every_192_products():
    text = "conv2d:32x64x56x56,64x64x3x3,s1,p1,out-f16,e4m3,nhwc,scale"
    kernel = tc.build(text, "window_hopper", arch="sm_90")
    assert kernel.config["promotion_interval"] == 192
    assert kernel.source.count("wgmma_wait_group_wait_group_sync_aligned_0();") == 3  # of nine taps of 64 channels


def test_strides_divide_images():
    with pytest.raises(ScheduleError, match="strides up to 2 that divide the image"):
        tc.build("conv2d:1x32x17x16,32x32x3x3,s2,p1,f16,nhwc", "window_hopper", arch="sm_90")


def test_volumes_have_strides_of_one_along_height_and_width():
    with pytest.raises(ScheduleError, match="in volumes of 1 along height and width"):
        tc.build("conv3d:1x32x8x16x16,32x32x3x3x3,s2,p1,f16,nhwc", "window_hopper", arch="sm_90")


def test_layers_with_few_channels_and_many_pixels_are_searched():
    layers = {LAYER: True, LAYER.replace("32x32x3x3", "32x32x1x1").replace("p1", "p0"): False}
    layers["conv2d:1x32x40x40,32x32x3x3,s1,p1,f16,nhwc"] = False
    layers["conv2d:32x96x160x160,32x96x3x3,s1,p1,f16,nhwc"] = False
    for text, is_searched in layers.items():
        names = [each.name for each in registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")]
        assert ("window_hopper" in names) == is_searched, text


def test_windows_are_read_once_where_im2col_reads_pixels_nine_times():
    """The default's windows, whole swizzle atoms included, have less than twice the pixels of their tiles."""
    w = tc.parse(LAYER)
    schedule = registry.find_schedule(w, "window_hopper")
    config = schedule.space(w, get_block_limits("sm_90")).default
    pitch = -(-(config["columns"] + 2) // 8) * 8
    assert (config["lines"] + 2) * pitch < 2 * config["lines"] * config["columns"]
