"""Depthwise and grouped gradients: configs are right and deterministic, read vectors, and do not spill."""

import functools

import emulate
import numpy as np
import pytest
from cubins import check_spills, needs_nvrtc

import tvmconv as tc
from tvmconv import registry
from tvmconv.compiler.sass import count_instructions
from tvmconv.errors import ScheduleError

WORKLOADS = [
    "conv2d_dgrad:2x8x9x7,8x1x3x3,s1,p1,g8,nhwc,add",
    "conv2d_dgrad:1x12x10x11,12x1x5x4,s2x3,p2x1,d1x2,g12,bf16,nhwc",
    "conv2d_dgrad:1x4x9x9,4x1x1x1,s2,p0,g4,nhwc",  # rows and columns without a tap
    "conv2d_dgrad:1x4x9x9,4x1x3x3,s2,p3,d2,g4,nhwc",  # padding beyond the window, residues of rows
    "conv2d_dgrad:1x4x14x14,4x1x13x13,s1,p6,g4,nhwc",
    "conv2d_dgrad:1x8x9x9,4x2x3x3,s2,p1,g4,nhwc",  # two channels of dX for one of dY
    "conv1d_transpose:2x8x13,8x1x5,s4,p2,op1,g8,nhwc",
    "conv2d_transpose:2x6x5x6,6x1x4x4,s2,p1,g6,bias,relu,nhwc",
    "conv3d_dgrad:1x4x5x6x7,4x1x3x3x3,s2x1x2,p1,g4,nhwc",
    "conv2d_wgrad:2x8x9x7,8x1x3x3,s2,p1,g8,nhwc,add",
    "conv2d_wgrad:1x12x10x11,12x1x5x4,s2x3,p2x1,d1x2,g12,bf16,nhwc",
    "conv2d_wgrad:1x4x14x14,4x1x13x13,s1,p6,g4,nhwc",
    "conv2d_wgrad:3x6x8x9,12x1x3x3,s1,p1,g6,nhwc",  # two filters for each channel
    "conv2d_wgrad:2x67x8x9,67x1x3x3,s1,p1,g67,nhwc",
    "conv1d_wgrad:2x8x40,8x1x9,s3,p2,g8,nhwc",
    "conv3d_wgrad:1x4x5x6x7,4x1x3x3x3,s2x1x2,p1,g4,nhwc",
    "conv3d_wgrad:1x4x1x6x7,4x1x1x3x3,p1,g4,nhwc",
    "conv2d_wgrad:2x20x5x1,20x1x2x4,s3,p3,d2,g20,nhwc",  # no tap meets an element of X
    "conv2d_dgrad:2x8x9x7,12x2x3x3,s1,p1,g4,nhwc",
    "conv2d_dgrad:1x12x10x11,24x4x5x4,s2x3,p2x1,d1x2,g3,bf16,nhwc",
    "conv2d_transpose:2x6x5x6,6x4x4x4,s2,p1,g3,bias,relu,nhwc",
    "conv3d_dgrad:1x4x5x6x7,8x2x3x3x3,s2x1x2,p1,g2,nhwc",
    "conv2d_dgrad:2x8x9x7,24x1x3x3,s2,p1,g8,nhwc",  # one channel of dX for three of dY
    "conv2d_wgrad:2x8x8x9,12x2x3x3,s1,p1,g4,nhwc",
    "conv2d_wgrad:3x16x8x9,16x4x3x3,s2,p1,g4,bf16,nhwc",
    "conv2d_dgrad:1x6x10x11,6x1x5x4,s2x3,p2x1,d1x2,g6,bf16,add,drelu",
    "conv2d_wgrad:3x6x9x11,12x1x3x3,s2,p1x0x0x2,g6,add",
    "conv1d_transpose:2x8x13,8x1x5,s4,p2,op1,g8,bias",
]
NUM_CONFIGS = 1
LAYERS = [
    "conv2d_dgrad:32x96x112x112,96x1x3x3,s2,p1,g96,f16,nhwc",
    "conv2d_dgrad:16x128x28x28,128x1x31x31,s1,p15,g128,f16,nhwc",
    "conv2d_wgrad:32x96x56x56,96x1x7x7,s1,p3,g96,f16,nhwc",
    "conv2d_wgrad:32x240x28x28,240x1x5x5,s2,p2,g240,nhwc",
    "conv2d_dgrad:32x72x112x112,72x24x3x3,s2,p1,g3,bf16,nhwc",
    "conv2d_wgrad:32x256x56x56,256x8x3x3,s1,p1,g32,f16,nhwc",
]


def find(w):
    names = [s.name for s in tc.schedules(w)]
    return next(name for name in ("depthwise_nhwc", "grouped_nhwc", "depthwise") if name in names)


@functools.cache
def space_of(w):
    return registry.find_schedule(w, find(w)).space(w)


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", WORKLOADS)
def test_defaults_and_random_configs_are_right(text):
    """What `usage` says of the threads and CTAs of a config is so."""
    w = tc.parse(text)
    space, problem = space_of(w), tc.Problem(w, seed=0)
    points = space.sample_legal(NUM_CONFIGS, np.random.default_rng(1))
    for point in (space.point_from_config(space.default), *points):
        config = space.config_from_point(point)
        kernel = tc.build(w, find(w), device="opencl:0", config=config)
        assert kernel.verify(problem).ok, config
        used, (first, *_) = space.compute_usage(point[None]), kernel.kernels
        assert (used.threads[0], used.blocks[0]) == (first.launch.threads_per_block, first.launch.num_blocks), config


@pytest.mark.sample(4)
@pytest.mark.parametrize("scope", ["filter", "row", "input_row"])
@pytest.mark.parametrize("text", [WORKLOADS[0], "conv2d_dgrad:2x8x9x7,8x1x4x3,s2x3,p1,g8,nhwc", WORKLOADS[8]])
def test_every_unrolling_computes_the_same(text, scope):
    config = {"unroll_scope": scope, "weight_scope": "shared", "tile_y": (-1, 2, 1), "tile_x": (-1, 1, 2)}
    assert tc.build(text, "depthwise_nhwc", device="opencl:0", config=config).verify().ok


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d_wgrad:2x8x6x5,8x1x3x3,s1,p1,g8,f16,nhwc", {"threads_pixels": 4, "parts": 3, "pixels_x": 2}),
        ("conv2d_wgrad:2x8x6x5,8x4x3x3,s2,p1,g2,f16,nhwc", {"threads_pixels": 2, "parts": 4, "pixels_x": 1}),
        ("conv2d_wgrad:4x4x6x5,4x1x3x3,s1,p1,g4,nhwc", {"threads_pixels": 1, "parts": 66, "pixels_x": 1}),
        (
            "conv2d_wgrad:3x4x8x9,4x1x3x2,s2x3,p2x1,d1x2,g4,bf16,nhwc",
            {"prefetch_tile": 1, "parts": 2, "threads_pixels": 2, "pixels_y": 2, "pixels_x": 2},
        ),
        (
            "conv2d_wgrad:2x8x7x5,8x4x3x3,s2,p1,g2,f16,nhwc",
            {"prefetch_tile": 1, "parts": 2, "threads_pixels": 2, "pixels_x": 1},
        ),
    ],
)
def test_sums_over_threads_and_parts_do_not_race(text, config):
    w = tc.parse(text)
    kernel = tc.build(w, find(w), arch="sm_90", config=config)
    assert len(kernel.kernels) == 2
    assert "atomic" not in kernel.source
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance


TENSOR_CORES = [
    "conv2d_wgrad:2x16x7x9,16x4x3x3,s2,p1,g4,f16,nhwc",
    "conv2d_wgrad:2x48x5x6,48x24x3x3,s1,p1,g2,bf16,nhwc,add",
    "conv2d_wgrad:3x32x6x7,48x16x2x3,s2x1,p1x0,d1x2,g2,f16,nhwc",
    "conv1d_wgrad:2x32x70,64x16x5,s1,p2,g2,f16,nhwc",
    "conv2d_dgrad:2x16x7x9,16x4x3x3,s2,p1,g4,f16,nhwc",
    "conv2d_dgrad:2x48x5x6,48x24x3x3,s1,p1,g2,bf16,nhwc",
    "conv2d_dgrad:3x32x6x7,48x16x2x3,s2x1,p1x0,d1x2,g2,f16,nhwc",
    "conv1d_transpose:2x32x70,32x16x5,s2,p2,g2,f16,nhwc",
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", TENSOR_CORES)
def test_tensor_cores_compute_grouped_gradients(text):
    w = tc.parse(text)
    space = registry.find_schedule(w, "grouped_mma_sync").space(w)
    for point in (space.point_from_config(space.default), *space.sample_legal(2, np.random.default_rng(1))):
        kernel = tc.build(w, "grouped_mma_sync", arch="sm_90", config=space.config_from_point(point))
        assert emulate.error(kernel.lowered_module, w) <= w.tolerance, kernel.config
        used, launch = space.compute_usage(point[None]), kernel.kernels[0].launch
        assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)


EIGHT_OCTETS = {"octets": 8, "strips": 2, "strip_rows": 8, "mma_columns": 8, "warps_taps": 1, "warps_pixels": 2}
DIAGONALS = [
    (
        "conv2d_wgrad:2x16x6x19,16x1x3x5,s1,p1x2,g16,f16,nhwc,add",
        {"taps_y": 2, "warps_taps": 2, "octets": 2, "pixels_x": 16, "warps_pixels": 2},
    ),
    (
        "conv2d_wgrad:2x40x10x11,40x1x5x4,s2x3,p2x1,d1x2,g40,bf16,nhwc,out-f32",
        {"octets": 4, "strip_rows": 4, "mma_columns": 8},
    ),
    ("conv3d_wgrad:1x8x3x3x21,8x1x3x1x13,s2x1x1,p1x0x6,g8,f16,nhwc", {"octets": 1, "pixels_x": 32, "stages": 3}),
    ("conv2d_wgrad:3x72x7x7,72x1x7x7,s1,p3,g72,f16,nhwc", EIGHT_OCTETS),
    (  # the last column has one tap for each warp
        "conv2d_wgrad:2x16x13x14,16x1x4x3,s1x2,d2,g16,bf16,nhwc",
        {"octets": 1, "taps_y": 1, "warps_taps": 4, "pixels_x": 8, "mma_columns": 8, "warps_pixels": 1},
    ),
    (  # columns of dY behind the image, below which there is no window
        "conv2d_wgrad:2x16x9x20,16x1x5x7,s1,p2x3,d2x1,g16,f16,nhwc",
        {"octets": 2, "strip_rows": 8, "taps_y": 3, "warps_taps": 2, "pixels_x": 32, "warps_pixels": 2},
    ),
    (
        "conv2d_wgrad:2x72x14x14,72x1x3x3,s1,p1,g72,bf16,nhwc",
        {"octets": 9, "strip_rows": 14, "mma_columns": 16, "pixels_x": 16, "warps_taps": 1, "warps_pixels": 1},
    ),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "config"), DIAGONALS)
def test_diagonals_are_depthwise_gradients(text, config):
    kernel = emulate.build_checked(text, "depthwise_diagonal", config)
    space = registry.find_schedule(kernel.workload, "depthwise_diagonal").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[0].launch
    assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)


def test_diagonals_are_searched_for_large_images_only():
    large, small, narrow = (
        tc.parse(f"conv2d_wgrad:32x{c}x{n}x{n},{c}x1x7x7,s1,p3,g{c},f16,nhwc")
        for c, n in ((96, 56), (768, 7), (100, 56))
    )
    names = [[s.name for s in registry.schedules_to_tune(w, "cuda", "sm_90")] for w in (large, small, narrow)]
    assert ["depthwise_diagonal" in each for each in names] == [True, False, False]


def test_persistent_ctas_compute_several_tiles():
    w = tc.parse("conv2d_dgrad:40x16x4x4,16x8x3x3,p1,g2,f16,nhwc")
    config = {"max_ctas": 132, "pixels_y": 1, "units": 1, "warps_pixels": 1}
    kernel = tc.build(w, "grouped_mma_sync", arch="sm_90", config=config)
    assert kernel.launch.num_blocks < 160
    assert emulate.error(kernel.lowered_module, w) <= w.tolerance


TENSOR_CORE_LAYERS = [
    "conv2d_wgrad:32x432x28x28,432x24x3x3,p1,g18,f16,nhwc",
    "conv2d_dgrad:32x216x56x56,216x24x3x3,s2,p1,g9,f16,nhwc",
    "conv2d_dgrad:32x128x56x56,128x4x3x3,p1,g32,bf16,nhwc",
]


@pytest.mark.sample(2)
@needs_nvrtc
@pytest.mark.parametrize("text", TENSOR_CORE_LAYERS)
def test_defaults_on_tensor_cores_do_not_spill(text):
    check_spills(tc.parse(text), "grouped_mma_sync", "sm_90")


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize("text", LAYERS)
def test_defaults_of_layers_may_be_searched_and_do_not_spill(text):
    w = tc.parse(text)
    space = space_of(w)
    assert space.is_legal(space.point_from_config(space.default)[None])[0]
    check_spills(w, find(w), "sm_90")


@needs_nvrtc
def test_a_strided_dgrad_multiplies_no_zeros():
    """A strip of 4 × 4 pixels has 9 of 36 products per four pixels; 3 × 3 vectors of dY are loaded."""
    config = {"vector": 8, "threads_c": 12, "tile_y": (-1, 4, 2), "tile_x": (-1, 4, 2), "unroll_scope": "filter"}
    kernel = tc.build(LAYERS[0], "depthwise_nhwc", arch="sm_90", config=config)
    counts = count_instructions(kernel.format_ir_level("sass"))
    assert counts["FFMA"] == 4 * 9 * 8
    assert counts["LDG.E.128"] == 9
    assert counts["STG.E.128"] == 16


@needs_nvrtc
def test_a_wgrad_loads_each_vector_of_a_tile_once():
    """A tile of 2 × 4 pixels: 8 vectors of dY and 4 × 6 vectors of X for 3 × 3 taps."""
    config = {"vector": 4, "taps_y": 3, "taps_x": 3, "pixels_y": 2, "pixels_x": 4, "threads_pixels": 1, "parts": 1}
    config["prefetch_tile"] = 0
    kernel = tc.build("conv2d_wgrad:2x64x28x28,64x1x3x3,p1,g64,f16,nhwc", "depthwise_nhwc", arch="sm_90", config=config)
    counts = count_instructions(kernel.format_ir_level("sass"))
    assert counts["LDG.E.64"] == 8 + 24
    assert counts["FFMA"] == 8 * 9 * 4


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("conv2d_dgrad:1x8x8x8,8x1x3x3,s1,p1,g8", "depthwise_nhwc", "with layout nhwc; this workload has nchw"),
        ("conv2d_dgrad:1x8x16x16,8x1x7x7,s5,p3,g8,nhwc", "depthwise_nhwc", "with strides of at most 4"),
        ("conv2d_dgrad:1x8x8x8,8x8x3x3,s1,p1,nhwc", "depthwise_nhwc", "each group is one channel of dY"),
        ("conv2d_wgrad:1x8x8x8,8x8x3x3,s1,p1,nhwc", "grouped_nhwc", "there are groups"),
    ],
)
def test_other_gradients_are_refused_in_one_line(text, name, message):
    with pytest.raises(ScheduleError, match=message):
        tc.build(tc.parse(text), name, arch="sm_90")


CLUSTER = {
    **{"vector": 2, "threads_c": 4, "threads_taps": 1, "threads_pixels": 8, "taps_y": 3, "taps_x": 3},
    **{"pixels_y": 2, "pixels_x": 4, "prefetch_tile": 0, "parts": 4},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d_wgrad:4x24x9x10,24x1x3x3,s1,p1,g24,f16,nhwc", CLUSTER),
        (
            "conv2d_wgrad:4x24x9x10,24x1x5x4,s2,p1,g24,bf16,nhwc,add",
            {**CLUSTER, "threads_taps": 5, "taps_y": 1, "taps_x": 4, "parts": 3, "threads_c": 3, "prefetch_tile": 1},
        ),
        ("conv2d_wgrad:5x12x7x7,12x1x7x7,s1,p3,d1,g12,tf32,nhwc", {**CLUSTER, "taps_y": 2, "taps_x": 7, "parts": 7}),
        ("conv2d_wgrad:3x16x9x9,16x1x1x3,s1,p0,g16,f16,nhwc", {**CLUSTER, "threads_c": 1, "taps_y": 1, "parts": 8}),
        ("conv2d_wgrad:1x16x14x8,16x1x3x3,s2x3,p3x2,d1x2,g16,tf32,nhwc,add", None),  # CTAs without sums to add up
        ("conv1d_wgrad:8x16x70,16x1x9,s1,p4,g16,f16,nhwc,out-f32", None),
        ("conv3d_wgrad:2x16x4x5x6,16x1x3x3x3,s1x2x1,p1,g16,f16,nhwc", None),
    ],
)
def test_ctas_of_a_cluster_add_their_sums(text, config):
    kernel = emulate.build_checked(text, "depthwise_cluster", config)
    space = registry.find_schedule(kernel.workload, "depthwise_cluster").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.launch
    assert 1 < launch.cluster[1] == launch.grid[1] <= 8
    assert (used.threads[0], used.blocks[0]) == (launch.threads_per_block, launch.num_blocks)
    assert used.dynamic_shared_bytes[0] == kernel.dynamic_shared_bytes
