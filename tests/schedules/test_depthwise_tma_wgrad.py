"""`depthwise_tma` for gradients of weights: tiles of dY and X that TMA copies ahead of the threads that multiply."""

import emulate
import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError

SMALL = {
    **{"vector": 2, "channels": 16, "images": 1, "rows": 4, "columns": 8, "strip": 4},
    **{"taps_y": 3, "stages": 2, "waves": 1, "whole_rows": 0, "parts_in_cluster": 0},
}
WHOLE_ROWS = {**SMALL, "whole_rows": 1}
IN_CLUSTER = {**SMALL, "parts_in_cluster": 1}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d_wgrad:2x16x9x17,16x1x3x3,s1,p1,g16,f16,nhwc", SMALL),  # tiles overhang all axes
        ("conv2d_wgrad:2x24x9x17,24x1x3x3,s2,p1,g24,bf16,nhwc,add", {**IN_CLUSTER, "channels": 24}),
        (
            "conv2d_wgrad:5x16x7x7,16x1x5x5,s1,p2,g16,f16,nhwc",  # whole images, whose padding is known
            {**IN_CLUSTER, "images": 2, "rows": 7, "columns": 7, "strip": 7, "taps_y": 5},
        ),
        (
            "conv2d_wgrad:3x24x8x9,24x1x5x4,s1,p2x1,d2x1,g24,f16,nhwc,out-f32",  # threads divide the filter's rows
            {**SMALL, "vector": 4, "channels": 24, "columns": 10, "strip": 5},
        ),
        ("conv2d_wgrad:2x40x9x8,40x1x4x2,s1x3,p1x0,g40,bf16,nhwc", {**SMALL, "channels": 24, "taps_y": 2, "strip": 1}),
        (
            "conv2d_wgrad:3x24x9x18,24x1x3x5,s1,p1x2,g24,f16,nhwc",  # strips overhang rows
            {**WHOLE_ROWS, "channels": 24, "columns": 20, "strip": 5},
        ),
        (
            "conv2d_wgrad:2x40x12x16,40x1x3x3,s2,p1,g40,bf16,nhwc",
            {**WHOLE_ROWS, "channels": 40, "strip": 2, "parts_in_cluster": 1},
        ),
        (
            "conv2d_wgrad:2x24x8x16,24x1x5x5,s1,p2,d1x2,g24,f16,nhwc,add",
            {**WHOLE_ROWS, "channels": 24, "columns": 16, "taps_y": 5, "rows": 2, "stages": 3},
        ),
        ("conv2d_wgrad:1x12x9x9,12x1x3x3,s1,p1,g12,nhwc", None),
        ("conv2d_wgrad:2x8x5x6,8x1x3x3,s1,p1,g8,tf32,nhwc", None),
        ("conv1d_wgrad:2x16x45,16x1x5,s2,p2,g16,bf16,nhwc", None),
        ("conv2d_wgrad:2x64x14x14,64x1x3x3,s1,p1,g64,f16,nhwc", None),
    ],
)
def test_tiles_are_copied_ahead(text, config):
    kernel = emulate.build_checked(text, "depthwise_tma", config)
    space = registry.find_schedule(kernel.workload, "depthwise_tma").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[0].launch
    assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)
    if kernel.config["parts_in_cluster"]:
        assert 1 < launch.cluster[1] == launch.grid[1] <= 8


def test_filters_that_reach_over_images_have_no_gradient():
    w = tc.parse("conv2d_wgrad:17x8x1x16,8x1x3x3,s1,p2x3x4x3,d3,g8,f16,nhwc")
    config = {**IN_CLUSTER, "channels": 8, "rows": 1, "columns": 16, "stages": 1}  # more tiles than stages
    kernel = tc.build(w, "depthwise_tma", arch="sm_90", config=config)
    assert not np.any(emulate.run(kernel.lowered_module, w.inputs(seed=0)))


@pytest.mark.parametrize(
    "text",
    [
        "conv2d_wgrad:1x12x16x16,12x1x3x3,s1,p1,g12,f16,nhwc",  # pixels of 24 bytes
        "conv2d_wgrad:1x16x16x16,32x1x3x3,s1,p1,g16,f16,nhwc",
        "conv2d_wgrad:1x16x64x64,16x1x31x31,s1,p15,g16,f16,nhwc",
    ],
)
def test_other_layers_are_refused(text):
    with pytest.raises(ScheduleError, match="depthwise layers"):
        tc.build(text, "depthwise_tma", arch="sm_90")
