"""`pointwise_mma_sync` computes gradients of narrow 1×1 layers, executed without a GPU."""

import emulate
import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError

GRADIENTS = [
    ("conv2d_dgrad:2x24x9x7,72x24x1x1,s1,p0,f16,nhwc", {"pixel_octets": 4}),
    ("conv2d_dgrad:2x40x9x7,240x40x1x1,s1,p0,bf16,nhwc", {"pixel_octets": 2, "warps": 2}),
    ("conv2d_dgrad:3x96x8x8,24x96x1x1,s1,p0,f16,nhwc,add,drelu", {"warps": 4}),
    ("conv2d_dgrad:3x18x9x8,36x18x1x1,s1,p0,tf32,nhwc", {}),
    ("conv1d_transpose:3x72x70,72x30x1,s1,p0,tf32,bias,relu", {"pixel_octets": 2}),
    ("conv2d_dgrad:2x24x9x11,40x24x1x1,s1,p0,f16,nhwc", {"pixel_octets": 3, "warps": 2}),
    ("conv3d_dgrad:2x32x2x3x9,32x32x1x1x1,s1,p0,bf16,nhwc", {"pixel_octets": 8}),  # octets without a pixel
    ("conv3d_dgrad:3x10x2x4x5,8x10x1x1x1,s1,p0,f16", {}),
    ("conv2d_dgrad:2x72x9x11,216x72x1x1,s1,p0,f16,nhwc", {"pixel_octets": 2, "warps": 4, "stages": 3}),
    ("conv2d_dgrad:2x40x19x11,24x40x1x1,s1,p0,bf16,nhwc,add", {"pixel_octets": 1, "warps": 2, "stages": 2}),
    ("conv2d_transpose:3x64x20x31,64x24x1x1,s1,p0,f16,nhwc,bias,relu", {"pixel_octets": 6, "warps": 4, "stages": 4}),
]

WEIGHT_GRADIENTS = [
    ("conv2d_wgrad:2x24x9x7,72x24x1x1,s1,p0,f16,nhwc", {"blocks_m": 3, "blocks_n": 2, "warps_k": 4}),
    ("conv2d_wgrad:2x72x9x7,72x72x1x1,s1,p0,bf16,nhwc", {"warps_m": 2, "warps_n": 2, "warps_k": 2, "block_k": 32}),
    ("conv2d_wgrad:3x40x8x8,240x40x1x1,s1,p0,f16,nhwc,add", {"warps_m": 5, "block_k": 16}),
    ("conv2d_wgrad:3x40x8x8,240x40x1x1,s1,p0,f16,nhwc", {"blocks_m": 4, "blocks_n": 3, "warps_m": 2, "parts": 16}),
    ("conv1d_wgrad:3x16x70,96x16x1,s1,p0,bf16,out-f32", {"warps_m": 2, "warps_k": 8, "block_k": 128, "stages": 2}),
    ("conv3d_wgrad:2x8x3x4x5,8x8x1x1x1,s1,p0,f16,nhwc,out-f32", {"warps_k": 4, "block_k": 64}),
    ("conv2d_wgrad:5x56x20x21,40x56x1x1,s1,p0,f16,nhwc", {"warps_m": 3, "warps_n": 3, "parts": 16}),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), GRADIENTS)
def test_pixels_in_registers_or_stages_compute_gradients(text, config):
    kernel = emulate.build_checked(text, "pointwise_mma_sync", {"stages": 0} | config)
    space = registry.find_schedule(kernel.workload, "pointwise_mma_sync").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[-1].launch
    assert (used.threads[0], used.dynamic_shared_bytes[0]) == (launch.threads_per_block, kernel.dynamic_shared_bytes)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), WEIGHT_GRADIENTS)
def test_sums_in_registers_compute_gradients_of_weights(text, config):
    divisions = dict.fromkeys(("blocks_m", "blocks_n", "warps_m", "warps_n", "warps_k"), 1) | {"block_k": 64}
    kernel = emulate.build_checked(text, "pointwise_mma_sync", divisions | {"stages": 3} | config)
    space = registry.find_schedule(kernel.workload, "pointwise_mma_sync").space(kernel.workload)
    used = space.compute_usage(space.point_from_config(kernel.config)[None])
    launches = [(step.launch.threads_per_block, step.launch.num_blocks) for step in kernel.kernels]
    assert (used.threads[0], used.blocks[0]) in launches


def test_wgrads_of_few_pixels_have_configs_to_search():
    w = tc.parse("conv1d_wgrad:4x40x49,72x40x1,s1,p0,bf16,nhwc,add")
    space = registry.find_schedule(w, "pointwise_mma_sync").space(w)
    assert space.is_legal(space.project(space.default)[None])[0]


@pytest.mark.parametrize("stages", [0, 2])
def test_warps_compute_several_tiles(stages):
    config = {"pixel_octets": 1, "warps": 2, "max_ctas": 132, "stages": stages}
    kernel = emulate.build_checked("conv2d_dgrad:5x24x20x21,40x24x1x1,s1,p0,f16,nhwc", "pointwise_mma_sync", config)
    assert kernel.launch.num_blocks == 132  # of 263 tiles, and two warps each


@pytest.mark.parametrize("stages", [0, 2])
def test_infinite_gradients_stay_in_their_pixels(stages):
    w = tc.parse("conv2d_dgrad:1x16x4x6,24x16x1x1,s1,p0,f16,nhwc")
    dy, weight = w.inputs(seed=0)
    dy[0, 1, 2] = np.inf
    kernel = tc.build(w, "pointwise_mma_sync", arch="sm_90", config={"stages": stages})
    result = emulate.run(kernel.lowered_module, (dy, weight))
    assert np.argwhere(~np.isfinite(result).all(axis=-1)).tolist() == [[0, 1, 2]]


def test_wide_or_strided_layers_are_computed_by_others():
    narrow, others = ["24x56x56,72x24x1x1,s1", "96x56x56,96x96x1x1,s1"], ["512x14x14,1024x512x1x1,s1"]
    texts = [*narrow, *others, "24x56x56,72x24x3x3,s1", "24x56x56,72x24x1x1,s2"]
    workloads = [tc.parse(f"conv2d_dgrad:32x{text},p0,f16,nhwc") for text in texts]
    names = [[schedule.name for schedule in registry.schedules_to_tune(w, "cuda", "sm_90")] for w in workloads]
    assert ["pointwise_mma_sync" in each for each in names] == [True, True, False, False, False]
    with pytest.raises(ScheduleError, match="pointwise_mma_sync"):
        tc.build(workloads[3], "pointwise_mma_sync", arch="sm_90")
