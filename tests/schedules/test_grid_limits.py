"""Grids keep to 65,535 blocks along y and z, whatever the sizes of a workload."""

import pytest

import tvmconv as tc
from tvmconv.target import MAX_BLOCKS_YZ

LARGE_GRIDS = (  # each with more than 65,535 of something that a schedule binds to an axis of its own
    "conv2d:70000x2x4x4,4x2x3x3,s1,p1",
    "conv2d:1x2x600000x2,4x2x3x3,s1,p1",
    "conv2d:1x1x4x4,2200000x1x3x3,s1,p1",
    "conv2d:1x70000x4x4,70000x1x3x3,s1,p1,g70000",
    "conv2d:128x512x4x4,512x1x3x3,s1,p1,g512",
    "conv2d:70000x8x4x4,8x1x3x3,s1,p1,g8,f16,nhwc",
    "conv2d:70000x64x4x4,64x64x3x3,s1,p1,f16,nhwc",
    "conv2d:70000x16x4x4,16x4x3x3,s1,p1,g4,nhwc",
    "conv2d:1x3x8x8,9000000x3x3x3,s2,p1,f16,nhwc",
    "conv1d:70000x4x16,4x1x3,s1,p1,g4",
    "conv3d:1x4x70000x4x4,4x1x3x3x3,s1,p1,g4",
    "filter2d:600000x4x1,5x5",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", LARGE_GRIDS)
def test_grids_keep_to_65535_blocks_along_y_and_z(text):
    w = tc.parse(text)
    for schedule in tc.schedules(w):
        grids = [step.launch.grid for step in tc.build(w, schedule, arch="sm_90").kernels]
        assert max(max(y, z) for _, y, z in grids) <= MAX_BLOCKS_YZ, (schedule.name, grids)


FOLDED = (
    ("tiling", "conv2d:70000x1x2x2,1x1x1x1,s1,p0", {}),
    ("depthwise", "conv2d:33000x2x2x3,2x1x3x3,s1,p1,g2", {"operand_scope": "shared", "tile_f": (-1, 1, 1, 1)}),
    ("depthwise", "conv2d:33000x2x2x3,2x1x3x3,s1,p1,g2", {"operand_scope": "registers", "tile_f": (-1, 1, 1, 1)}),
    (
        "winograd_fused",
        "conv2d:1x1x2x2,530000x1x3x3,s1,p1",
        {"output_tile": 2, "local_y": 1, "threads_y": 4, "local_x": 1, "threads_x": 1},
    ),
    ("halo_strided", "filter2d:70000x2x1,3x3", {"threads_y": 1, "threads_x": 2}),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "text", "config"), FOLDED)
def test_a_grid_beyond_65535_folds_into_one_axis(schedule, text, config):
    kernel = tc.build(tc.parse(text), schedule, config=config, device="opencl:0")
    x, y, z = kernel.kernels[-1].launch.grid
    assert x > MAX_BLOCKS_YZ
    assert (y, z) == (1, 1)
    assert kernel.verify().ok
