"""`hopper` with filters that a CTA loads once, and with wide boxes of its output, executed without a GPU."""

import pytest
from cubins import space_of
from emulate import error
from small_tiles import SMALL, few_multiprocessors
from tvmconv.builtin.conv.tensor_cores.hopper import tile_config

import tvmconv as tc
from tvmconv.errors import KnobError
from tvmconv.registry import find_schedule
from tvmconv.workloads.dtypes import get_itemsize

RESIDENT = {"kernel_schedule": "cooperative", "raster_order": "n", "decomposition": "data_parallel"}
RESIDENT |= {"filters": "resident"}
PINGPONG = {"kernel_schedule": "pingpong", "warpgroups": 2}


def check(text, config, multiprocessors=4):
    w = tc.parse(text)
    with few_multiprocessors(multiprocessors):
        kernel = tc.build(w, "hopper", arch="sm_90", config={**SMALL, **RESIDENT, **config})
        tile = tile_config.HopperTileConfig.of_workload(kernel.config, w)
    assert error(kernel.lowered_module, w) <= w.tolerance, (text, config)
    return kernel, tile


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x30x30,40x64x1x1,s1,p0,f16,nhwc,bias,relu", {"block_n": 16, "stages": 5}),  # three tiles along N
        ("conv2d:2x72x30x30,48x72x1x1,s1,p0,f16,nhwc", {**PINGPONG, "block_n": 48}),  # a K tile beyond the channels
        ("conv2d:2x96x65x63,64x96x1x1,s2,p0,bf16,nhwc,add,silu", {"block_n": 32, "block_k_bytes": 128, "stages": 2}),
        ("conv2d:2x32x24x24,32x32x3x3,s1,p1,f16,nhwc", {"block_n": 32, "warpgroups": 2}),
        ("conv2d:2x32x24x64,32x32x3x3,s1,p1,f16,nhwc", {**PINGPONG, "block_n": 16, "taps_per_copy": 3}),
        ("conv1d:2x40x700,24x40x3,s1,p1,tf32,nhwc", {"block_n": 32, "block_k_bytes": 32}),
        ("conv2d:2x320x20x20,64x320x1x1,s1,p0,i8,nhwc,scale,bias,relu,quantize", {**PINGPONG, "block_n": 64}),
        ("conv2d:2x320x20x20,64x320x1x1,s1,p0,e4m3,nhwc,scale,quantize", {**PINGPONG, "block_n": 32}),
        ("conv2d:2x320x20x20,64x320x1x1,s1,p0,e4m3,nhwc,scale", {"block_k_bytes": 128, "promotion_buffers": 2}),
        (
            "conv2d:2x640x17x16,64x640x1x1,s1,p0,e4m3,nhwc,scale",
            {"warpgroups": 2, "stages": 8, "promotion_order": "alternating"},
        ),
    ],
)
def test_filters_stay_in_shared_memory_for_all_tiles(text, config):
    kernel, tile = check(text, config)
    w = kernel.workload
    assert int(tile.num_ctas(w)) % int(tile.num_tiles_n(tile_config.ImplicitGemmShape.from_workload(w))) == 0


def test_ctas_of_all_channels_are_equally_many():
    """Of seven multiprocessors, two have no CTA: each of five tiles of channels has one."""
    _, tile = check("conv2d:2x32x24x24,80x32x1x1,s1,p0,f16,nhwc", {"block_n": 16}, multiprocessors=7)
    w = tc.parse("conv2d:2x32x24x24,80x32x1x1,s1,p0,f16,nhwc")
    with few_multiprocessors(7):
        assert int(tile.num_ctas(w)) == 5


def test_resident_filters_leave_out_copies_of_them():
    w = tc.parse("conv2d:32x64x56x56,256x64x1x1,s1,p0,f16,nhwc")
    streamed, resident = (
        tc.build(
            w,
            "hopper",
            arch="sm_90",
            config={**SMALL, **RESIDENT, "block_n": 128, "filters": filters},
        )
        for filters in ("streamed", "resident")
    )
    tiles = [tile_config.HopperTileConfig.of_workload(kernel.config, w) for kernel in (streamed, resident)]
    assert int(tiles[0].stage_bytes()) == (64 + 128) * 64
    assert int(tiles[1].stage_bytes()) == 64 * 64
    assert int(tiles[1].resident_bytes()) == 128 * 128


def test_a_search_starts_with_resident_filters_that_fit():
    w = tc.parse("conv2d:8x384x80x80,128x384x1x1,s1,p0,f16,nhwc")
    schedule, space = find_schedule(w, "hopper"), space_of(w, "hopper")
    configs = [config for config in schedule.list_starting_configs(w) if config.get("filters") == "resident"]
    assert configs
    for config in configs:
        knobs = {name: value for name, value in config.items() if name in space.default}
        assert space.is_legal(space.point_from_config({**space.default, **knobs})[None])[0]
    large = tc.parse("conv2d:8x1024x80x80,128x1024x3x3,s1,p1,f16,nhwc")
    assert not any(c.get("filters") == "resident" for c in find_schedule(large, "hopper").list_starting_configs(large))


@pytest.mark.parametrize(
    "config",
    [
        {"raster_order": "m"},
        {"cluster_m": 2},
        {"decomposition": "narrow_last_wave", "block_n": 64},
        {"block_n": 256, "block_k_bytes": 128},  # 512 KiB
    ],
)
def test_resident_filters_are_refused_where_tiles_have_other_channels(config):
    w = tc.parse("conv2d:32x1024x56x56,256x1024x1x1,s1,p0,f16,nhwc")
    with pytest.raises(KnobError):
        tc.build(w, "hopper", arch="sm_90", config={**SMALL, **RESIDENT, **config})


WIDE = {"filters": "streamed", "output_boxes": "wide"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("text", "config", "row_bytes"),
    [
        ("conv2d:2x64x30x30,80x64x1x1,s1,p0,f16,nhwc,bias,relu", {"block_n": 80}, 160),
        ("conv2d:1x64x33x30,72x64x1x1,s1,p0,f16,nhwc", {"block_n": 80, "filters": "resident"}, 160),
        ("conv2d:2x32x24x24,112x32x3x3,s1,p1,bf16,nhwc,silu", {**PINGPONG, "block_n": 112}, 224),
        ("conv1d:2x40x700,48x40x3,s1,p1,tf32,nhwc", {"block_n": 48, "block_k_bytes": 32}, 96),
        ("conv2d:2x64x30x30,320x64x1x1,s1,p0,i8,nhwc,scale,bias,quantize", {**PINGPONG, "block_n": 160}, 160),
        ("conv2d:1x64x33x30,96x64x1x1,s1,p0,e4m3,nhwc,scale,quantize", {"block_n": 96}, 96),
        ("conv2d:1x64x33x30,320x64x1x1,s1,p0,e4m3,nhwc,scale,out-f16", {"block_n": 160, "wgmma_m_tiles": 1}, 160),
    ],
)
def test_wide_boxes_of_the_output_are_not_swizzled(text, config, row_bytes):
    kernel, tile = check(text, {**WIDE, **config})
    itemsize = get_itemsize(kernel.workload.argument_dtypes[-1])
    assert int(tile.epilogue_row_bytes(itemsize)) == row_bytes > 32


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x30x30,128x64x1x1,s1,p0,f16,nhwc", {"block_n": 128}),  # a swizzled box is as wide
        ("conv2d:2x64x30x30,80x64x1x1,s1,p0,f16,nhwc,add", {"block_n": 80}),
        ("conv2d:2x64x30x30,80x64x1x1,s1,p0,i8,nhwc,scale,quantize", {"block_n": 80}),  # no multiple of 32 bytes
    ],
)
def test_wide_boxes_are_refused_where_they_are_no_wider(text, config):
    with few_multiprocessors(4), pytest.raises(KnobError, match=r"wide boxes|at least 32 bytes"):
        tc.build(text, "hopper", arch="sm_90", config={**SMALL, **RESIDENT, **WIDE, **config})
