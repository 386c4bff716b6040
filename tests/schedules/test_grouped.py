"""Grouped convolutions of few channels per group on tensor cores, executed without a GPU."""

import pytest
from emulate import build_checked

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.errors import ScheduleError
from tvmconv.registry import schedules, schedules_to_tune

NAME = "grouped_mma_sync"
CASES = {
    "one group per unit": ("conv2d:2x72x9x11,72x24x3x3,s1,p1,g3,f16,nhwc", {}),
    "more filters than channels": ("conv2d:2x48x9x11,96x12x3x3,s2,p1,g4,bf16,nhwc,bias,relu", {}),
    "strides and dilations": (
        "conv2d:1x64x13x10,32x16x3x2,s2x1,p0x1,d1x2,g4,f16,nhwc,bias,prelu",
        {"pixels_y": 2, "warps_pixels": 2},
    ),
    "signal": ("conv1d:2x64x37,64x16x5,s3,p2,g4,f16,nhwc,silu", {}),
    "two groups per unit": ("conv2d:2x32x8x9,32x4x3x3,s1,p1,g8,f16,nhwc", {"units": 2}),
    "channels first": ("conv2d:1x48x9x11,48x24x3x3,s1,p1,g2,f16,bias", {}),
    "planes": ("conv3d:1x48x3x5x6,48x24x1x3x3,s1,p0x1x1,g2,f16,nhwc", {}),
    "several tiles per CTA": ("conv2d:3x48x20x18,48x24x3x3,s1,p1,g2,f16,nhwc", {"pixels_x": 16, "max_ctas": 132}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), CASES.values(), ids=CASES)
def test_results_are_those_of_the_reference(text, config):
    build_checked(text, NAME, config)


def test_warps_share_the_window_without_races():
    assert find_races(tc.build("conv2d:2x48x9x11,48x24x3x3,s1,p1,g2,f16,nhwc", NAME, arch="sm_80")) == []


def test_it_is_tried_before_the_schedule_of_large_groups():
    names = [s.name for s in schedules_to_tune(tc.parse("conv2d:8x216x28x28,216x24x3x3,s1,p1,g9,f16,nhwc"), "cuda")]
    assert names[:2] == [NAME, "mma_sync"]


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:2x64x9x9,64x64x3x3,s1,p1,f16,nhwc",  # one group
        "conv2d:2x64x9x9,64x1x3x3,s1,p1,g64,f16,nhwc",  # depthwise
        "conv2d:2x48x9x9,48x24x3x3,s1,p1,g2,f16,nhwc,add",
        "conv3d:1x48x3x5x6,48x24x3x3x3,s1,p1,g2,f16,nhwc",
        "conv2d:2x256x9x9,256x128x3x3,s1,p1,g2,f16,nhwc",
    ],
)
def test_other_convolutions_are_left_to_other_schedules(text):
    assert NAME not in [s.name for s in schedules(text)]
    with pytest.raises(ScheduleError, match="groups are units of at most 64 channels"):
        tc.build(text, NAME, arch="sm_90")
