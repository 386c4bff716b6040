"""Operands of 8 bits on tensor cores, executed without a GPU: kernels of `hopper`, `mma_sync` and `mma_sync_fp8`."""

import re

import numpy as np
import pytest
from cubins import needs_nvrtc, space_of
from emulate import error, run
from small_tiles import SMALL, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import tile_config

import tvmconv as tc
from tvmconv.errors import ScheduleError
from tvmconv.registry import find_schedule
from tvmconv.workloads.quantization import MAX_ACCUMULATION_ERROR, bound_accumulation_error

WARP_TILE = {
    **{"block_m": 32, "block_n": 32, "block_k": 64, "warps_m": 1, "warps_n": 2, "warps_k": 1, "stages": 3},
    **{"split_k": 1, "split_k_reduction": "workspace", "tiles_per_block": 1},
}


def check(text, schedule, config, arch="sm_90"):
    w = tc.parse(text)
    with few_multiprocessors():
        kernel = tc.build(w, schedule, arch=arch, config=config)
    assert error(kernel.lowered_module, w) <= w.tolerance, (text, config)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x32x9x8,34x32x2x3,s1,p1x1x0x1,i8,nhwc", {}),
        ("conv2d:2x32x9x8,32x32x2x3,s1,p1x1x0x1,i8,nhwc,scale,bias,add,relu,quantize", {"block_n": 32}),
        ("conv2d:1x32x9x8,32x32x2x3,s1,p0,i8,nhwc,scale,bias,relu,quantize,zero_point", {"block_n": 32}),
        ("conv2d:2x128x7x9,32x128x2x3,s1,p1,i8,nhwc,scale,out-f16", {"split_k": 3, "block_k_bytes": 128}),
        ("conv2d:1x32x9x8,34x32x2x3,s2,p1,e4m3,nhwc,tensor_scale,quantize", {"block_n": 32}),
        ("conv2d:1x32x9x8,32x32x2x3,s1,p1,e5m2,nhwc,scale,bias,add,silu,quantize", {"block_n": 32}),
        ("conv1d:1x128x100,48x128x3,s1,p1,e4m3,nhwc,out-f32", {"block_n": 48, "promotion_interval": 256}),
        (
            "conv3d:1x64x3x5x6,32x32x2x2x1,s1,p0,g2,e5m2,nhwc,scale",
            {"block_k_bytes": 32, "kernel_schedule": "pingpong"},
        ),
    ],
)
def test_hopper_multiplies_operands_of_8_bits(text, config):
    if "kernel_schedule" in config:  # which is a knob of large outputs only
        config = {name: value for name, value in config.items() if name != "kernel_schedule"}
    check(text, "hopper", {**SMALL, **config})


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x9x8,48x64x1x1,s1,p0,i8,nhwc,scale,bias,add,relu,quantize", {"block_n": 32}),
        ("conv2d:2x64x9x8,64x64x1x1,s1,p0,e4m3,nhwc,scale,bias,add,relu,quantize", {"block_n": 64}),
        ("conv2d:2x80x9x8,64x80x1x1,s1,p0,i8,nhwc,scale,bias,add,quantize", {"block_n": 64}),  # channels beyond K
        ("conv2d:1x64x9x8,64x32x2x3,s1,p1,g2,i8,nhwc,add,tensor_scale,quantize", {"block_n": 32, "block_k_bytes": 32}),
        ("conv2d:1x64x9x8,64x64x2x3,s1,p1,e5m2,nhwc,scale,bias,add,silu,quantize", {"block_n": 64}),
    ],
)
def test_hopper_stores_words_of_four_results(text, config):
    w = tc.parse(text)
    with few_multiprocessors():
        kernel = tc.build(w, "hopper", arch="sm_90", config={**SMALL, "block_k_bytes": 64, **config})
    source = kernel.source.rpartition("__global__")[2]
    assert "stmatrix" in source
    assert "st_shared_b16" not in source
    assert error(kernel.lowered_module, w) <= w.tolerance


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "schedule", "config"),
    [
        (
            "conv2d:1x32x9x8,32x32x2x3,s1,p1,weight-e5m2,e4m3,nhwc,scale,bias,relu,quantize",
            "hopper",
            {**SMALL, "block_n": 32},
        ),
        ("conv2d:1x32x9x8,34x32x2x3,s2,p1,out-f16,weight-e4m3,e5m2,nhwc,scale", "hopper", SMALL),
        ("conv2d:1x32x7x8,18x32x2x3,s1,p1,weight-e5m2,e4m3,nhwc", "mma_sync_fp8", WARP_TILE),
        ("conv2d:2x32x9x8,32x32x3x3,s1,p1,weight-e5m2,e4m3,nhwc,scale", "window_hopper", {}),
    ],
)
def test_activations_and_weights_have_different_types(text, schedule, config):
    w = tc.parse(text)
    x, k, *_ = w.inputs(seed=0)
    assert (x.dtype.name, k.dtype.name) == w.argument_dtypes[:2] == w.operand_dtypes
    assert x.dtype != k.dtype
    check(text, schedule, config)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "config",
    [
        {"block_k_bytes": 64, "taps_per_copy": 3, "warpgroups": 2},
        {"block_k_bytes": 64, "taps_per_copy": 3, "warpgroups": 2, "kernel_schedule": "pingpong"},
        {"block_k_bytes": 256, "split_k": 2},  # an unknown number of K tiles
    ],
)
def test_hopper_promotes_several_times_in_a_long_k_tile(config):
    w = tc.parse("conv2d:1x288x9x64,32x288x1x3,s1,p0x1,e4m3,nhwc,scale,out-f32")
    with few_multiprocessors():
        kernel = tc.build(
            w, "hopper", arch="sm_90", config={**SMALL, "taps_per_copy": 1, "promotion_interval": 128, **config}
        )
        tile = tile_config.HopperTileConfig.of_workload(kernel.config, w)
    assert int(tile.promotions_per_k_tile(1)) == 2
    assert int(tile.promoted_products(1)) <= 128
    assert error(kernel.lowered_module, w) <= w.tolerance


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:1x1280x9x8,34x1280x1x1,s1,p0,e4m3,nhwc,out-f32", {}),  # ten K tiles in two iterations
        ("conv2d:2x128x9x8,32x128x2x3,s1,p1,e4m3,nhwc,scale,bias,relu,quantize", {"warpgroups": 2}),
        ("conv1d:1x128x90,32x128x1,s1,p0,e5m2,nhwc", {}),  # one K tile
        ("conv2d:1x64x9x64,32x64x1x3,s1,p0x1,e4m3,nhwc,scale", {"block_k_bytes": 64, "taps_per_copy": 3}),
        (
            "conv2d:1x128x9x64,32x128x3x3,s1,p1,e4m3,nhwc,scale",
            {"block_k_bytes": 64, "taps_per_copy": 3, "promotion_interval": 192},
        ),
        ("conv1d:1x1152x60,32x1152x1,s1,p0,e4m3,nhwc,out-f32", {"block_k_bytes": 256, "split_k": 2}),
    ],
)
def test_two_sets_of_accumulators_are_promoted_in_turn(text, config):
    two_sets = {"block_n": 32, "block_k_bytes": 128, "promotion_interval": 192, "promotion_buffers": 2}
    check(text, "hopper", {**SMALL, **two_sets, **config})


@needs_nvrtc
def test_wgmmas_of_one_set_run_while_the_other_is_promoted():
    """ptxas would wait for each wgmma if one was in flight across iterations of a loop."""
    w = tc.parse("conv2d:1x1280x9x8,32x1280x1x1,s1,p0,e4m3,nhwc,out-f32")
    config = {**SMALL, "block_n": 32, "block_k_bytes": 128, "promotion_buffers": 2}
    waits = re.findall(r"DEPBAR\.LE gsb0, (0x\d)", tc.build(w, "hopper", arch="sm_90", config=config).sass)
    assert waits == ["0x1", "0x1", "0x1", "0x0", "0x1", "0x0"]  # of four K tiles in a loop, and two


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:1x640x9x8,34x640x1x1,s1,p0,e4m3,nhwc,out-f32", {}),  # intervals that end within a K tile
        ("conv2d:2x128x9x8,32x128x2x3,s1,p1,e4m3,nhwc,scale,bias,relu,quantize", {"warpgroups": 3}),
        ("conv1d:1x64x90,32x64x1,s1,p0,e5m2,nhwc", {"block_k_bytes": 64}),  # one K tile
        ("conv2d:1x96x9x9,32x96x3x3,s2,p1,e4m3,nhwc,scale", {"block_k_bytes": 32, "stages": 8}),
        ("conv2d:1x128x9x64,32x128x3x3,s1,p1,e4m3,nhwc,scale", {"block_k_bytes": 64, "taps_per_copy": 3}),
        ("conv1d:1x1152x60,32x1152x1,s1,p0,e4m3,nhwc,out-f32", {"block_k_bytes": 256, "promotion_interval": 128}),
        ("conv2d:1x256x9x16,32x256x3x3,s1,p1,e4m3,nhwc,scale", {"cluster_m": 2, "wgmma_m_tiles": 2}),
        (
            "conv2d:1x256x33x32,32x256x1x1,s1,p0,e4m3,nhwc,scale",
            {"kernel_schedule": "cooperative", "raster_order": "n", "decomposition": "split_last_wave"},
        ),
    ],
)
def test_warpgroups_of_a_tile_promote_in_turn(text, config):
    stages = {"block_n": 32, "block_k_bytes": 128, "warpgroups": 2, "stages": 5}
    check(text, "hopper", {**SMALL, **stages, "promotion_interval": 192, "promotion_order": "alternating", **config})


@needs_nvrtc
def test_wgmmas_of_an_interval_are_in_flight_across_k_tiles():
    w = tc.parse("conv2d:1x384x9x8,32x384x1x1,s1,p0,e4m3,nhwc,out-f32")
    config = {**SMALL, "block_n": 32, "block_k_bytes": 128, "warpgroups": 2, "promotion_order": "alternating"}
    sass = tc.build(w, "hopper", arch="sm_90", config={**config, "stages": 5}).sass
    waits = re.findall(r"QGMMA|DEPBAR\.LE gsb0, 0x0", sass)
    groups = [len(group.split()) for group in " ".join(waits).split("DEPBAR.LE gsb0, 0x0")]
    assert {*groups} == {0, 3, 6}  # one warpgroup starts and ends with half an interval; nothing follows the last wait
    assert groups.count(3) == 2


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "arch", "config"),
    [
        ("conv2d:2x34x9x8,30x34x2x3,s1,p1x1x0x1,i8,nhwc,scale,bias,add,relu,quantize,zero_point", "sm_80", {}),
        ("conv2d:2x32x7x8,17x32x2x3,s1,p1,i8,nhwc", "sm_80", {}),
        (
            "conv1d:2x64x40,32x64x3,s1,p1,i8,nhwc,bias,scale,out-f16",
            "sm_90",
            {"split_k": 2, "split_k_reduction": "cluster"},
        ),
        ("conv2d:2x20x9x8,32x20x2x3,s1,p1,e4m3,nhwc,scale,quantize", "sm_89", {"warps_k": 2, "block_k": 128}),
        ("conv1d:1x128x80,48x64x3,s1,p1,g2,e5m2,nhwc,add,silu", "sm_89", {"tiles_per_block": 2}),
    ],
)
def test_mma_sync_multiplies_operands_of_8_bits(text, arch, config):
    check(text, "mma_sync" if ",i8," in f"{text}," else "mma_sync_fp8", {**WARP_TILE, **config}, arch)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "tile"), [("hopper", {**SMALL, "block_k_bytes": 64}), ("mma_sync_fp8", WARP_TILE)]
)
def test_promotion_keeps_sums_of_positive_numbers_within_the_bound(schedule, tile):
    """The emulator truncates addends as tensor cores do; without promotion the error grows with the sum."""
    w = tc.parse("conv1d:1x2048x64,16x2048x1,s1,p0,e4m3,nhwc,out-f32")
    x, k = (np.abs(array.astype(np.float32)).astype(array.dtype) for array in w.inputs(0))
    expected, errors = w.reference(x, k), {}
    for interval in (128, 192, 1024, 0):
        with few_multiprocessors():
            kernel = tc.build(w, schedule, arch="sm_90", config={**tile, "promotion_interval": interval})
        found = run(kernel.lowered_module, [x, k]).astype(np.float64)
        errors[interval] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert errors[interval] <= bound_accumulation_error(interval or 2048)
        assert kernel.config["promotion_interval"] == interval
    assert errors[192] <= MAX_ACCUMULATION_ERROR < errors[0]
    assert errors[128] < errors[192] < errors[1024] < errors[0]


def test_searches_and_defaults_promote_within_the_bound():
    for name, schedule_name in (("e4m3", "hopper"), ("e5m2", "mma_sync_fp8")):
        w = tc.parse(f"conv2d:8x256x40x40,256x256x3x3,s1,p1,{name},nhwc")
        schedule = find_schedule(w, schedule_name)
        space = space_of(w, schedule_name)
        assert space.default["promotion_interval"] == 192
        for config in schedule.list_starting_configs(w):
            assert config["promotion_interval"] == 192
        for interval, is_searched in ((192, True), (128, False), (256, False), (0, False)):
            point = space.point_from_config({**space.default, "promotion_interval": interval})
            assert space.is_legal(point[None])[0] == is_searched
            assert schedule.apply(w, {"promotion_interval": interval})[1].config["promotion_interval"] == interval


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "schedule", "is_promoted"),
    [
        ("conv1d:1x192x64,32x192x1,s1,p0,e4m3,nhwc,out-f32", "hopper", False),
        ("conv1d:1x64x64,32x64x3,s1,p0,e5m2,nhwc,out-f32", "mma_sync_fp8", False),
        ("conv2d:2x64x8x8,32x64x2x1,s1,p0,e4m3,nhwc,out-f32", "window_hopper", False),
        ("conv1d:1x224x64,32x224x1,s1,p0,e4m3,nhwc,out-f32", "hopper", True),
        # Nine taps of 16 channels are 144 products, of as many instructions as 288.
        ("conv2d:2x16x8x8,32x16x3x3,s1,p0,e4m3,nhwc,out-f32", "hopper", True),
    ],
)
def test_sums_that_are_short_enough_are_not_promoted(text, schedule, is_promoted):
    w, few_registers = tc.parse(text), {"block_n": 32} if schedule == "hopper" else {}
    x, k = (np.abs(array.astype(np.float32)).astype(array.dtype) for array in w.inputs(0))
    expected, definition = w.reference(x, k), find_schedule(w, schedule)
    with few_multiprocessors():
        kernel = tc.build(w, schedule, arch="sm_90", config={**SMALL, **few_registers} if few_registers else None)
        intervals = {config["promotion_interval"] for config in definition.list_starting_configs(w)}
    assert kernel.config["promotion_interval"] == (192 if is_promoted else 0)
    assert intervals <= {kernel.config["promotion_interval"]}
    found = run(kernel.lowered_module, [x, k]).astype(np.float64)
    assert np.linalg.norm(found - expected) <= MAX_ACCUMULATION_ERROR * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["i8", "e4m3"])
def test_hopper_is_searched_for_rows_of_one_vector(dtype):
    space = space_of(tc.parse(f"conv2d:2x16x9x9,32x16x3x3,s1,p1,{dtype},nhwc"), "hopper")
    assert len(space.sample_legal(1, np.random.default_rng(0)))


def test_searches_of_small_layers_start_with_several_estimates():
    """The cost model knows no operands of 8 bits."""
    for options in ("e4m3", "i8"):
        w = tc.parse(f"conv2d:1x96x7x7,60x96x3x3,s1,p1,{options},nhwc")
        space, configs = space_of(w, "hopper"), find_schedule(w, "hopper").list_starting_configs(w)
        known = [{name: value for name, value in config.items() if name in space.knobs} for config in configs]
        points = [space.point_from_config({**space.default, **config}) for config in known]
        assert len({tuple(point) for point in points}) >= 4
        assert space.is_legal(np.array(points)).all()


@pytest.mark.parametrize(
    ("text", "schedule", "arch", "message"),
    [
        ("conv2d:1x64x8x8,64x64x3x3,s1,p1,e4m3,nhwc", "mma_sync_fp8", "sm_80", "needs sm_89 or later"),
        ("conv2d:1x3x8x8,64x3x3x3,s1,p1,i8,nhwc", "mma_sync", "sm_80", "an even number of channels of 8 bits"),
        ("conv2d:1x64x8x8,64x64x3x3,s1,p1,e4m3", "hopper", "sm_90", "layout nhwc for operands of 8 bits"),
        ("conv2d:1x24x8x8,64x24x3x3,s1,p1,i8,nhwc", "hopper", "sm_90", "channels of a group fill 16-byte chunks"),
    ],
)
def test_unsupported_workloads_of_8_bits_are_refused(text, schedule, arch, message):
    with pytest.raises(ScheduleError, match=message):
        tc.build(text, schedule, arch=arch)
