"""`depthwise_planes`: gradients of weights, channels first, of whole planes in shared memory."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError

SMALL = {"channels": 1, "images": 2, "rows": 4, "strip": 4, "stages": 2, "waves": 1}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d_wgrad:3x8x8x16,8x1x3x3,s1,p1,g8,f16", SMALL),
        (
            "conv2d_wgrad:5x16x7x7,16x1x5x5,s1,p2,g16,bf16,add",  # odd planes, of which TMA copies eight at a time
            {**SMALL, "channels": 8, "rows": 7, "strip": 7, "images": 4},
        ),
        ("conv2d_wgrad:3x8x13x12,8x1x5x4,s2x1,p2x1,g8,f16,out-f32", None),
        ("conv2d_wgrad:3x4x9x12,4x1x3x3,s1,p1,d2,g4", None),
        ("conv2d_wgrad:2x8x16x12,8x1x3x3,s2,p1,g8,f16", {**SMALL, "strip": 3, "channels": 4}),
        ("conv1d_wgrad:2x16x48,16x1x5,s1,p2,g16,bf16", None),
    ],
)
def test_planes_are_copied_ahead(text, config):
    kernel = emulate.build_checked(text, "depthwise_planes", config)
    space = registry.find_schedule(kernel.workload, "depthwise_planes").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[0].launch
    assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)


@pytest.mark.parametrize(
    "text",
    [
        "conv2d_wgrad:1x4x7x7,4x1x3x3,s1,p1,g4,f16",  # planes of four channels have 392 bytes
        "conv2d_wgrad:1x16x16x16,32x1x3x3,s1,p1,g16,f16",
        "conv2d_wgrad:1x16x64x64,16x1x31x31,s1,p15,g16,f16",
    ],
)
def test_other_layers_are_refused(text):
    with pytest.raises(ScheduleError, match="depthwise layers"):
        tc.build(text, "depthwise_planes", arch="sm_90")
