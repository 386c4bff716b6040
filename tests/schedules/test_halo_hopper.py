"""`halo_hopper`: channels-last halo rows that TMA copies and all taps of a filter read, emulated with race checks."""

from unittest import mock

import emulate
import numpy as np
import pytest
from cubins import check_spills, needs_nvrtc
from tvmconv.builtin.conv.tensor_cores.hopper import halo_pixel_config
from tvmconv.builtin.conv.tensor_cores.hopper.halo_pixel_config import HaloPixelConfig

import tvmconv as tc
from tvmconv import registry, schedule_definition
from tvmconv.analysis.races import find_races
from tvmconv.errors import KnobError, ScheduleError

SMALL = {
    "rows": "pixels",
    "warpgroups": 1,
    "wgmma_m_tiles": 1,
    "block_n": 32,
    "block_k_bytes": 64,
    "halo_stages": 2,
    "stages": 2,
    "cluster_size": 1,
}
FILTER_ROWS = {"rows": "filters", "block_n": 48}
LAYER = "conv2d:32x128x40x40,128x128x3x3,s1,p1,f16,nhwc"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x9x18,24x64x3x3,s1,p1,f16,nhwc,bias,relu", {"warpgroups": 2}),  # filters overhang
        ("conv2d:3x32x7x7,40x32x3x3,s1,p1,bf16,nhwc,add", {"wgmma_m_tiles": 2, "halo_stages": 3}),
        ("conv2d:1x96x10x20,64x96x3x3,s1,p1,f16,nhwc,bias,silu,add", {"block_k_bytes": 128, "block_n": 64}),
        ("conv2d:2x16x18x20,16x16x3x3,s2,p1,f16,nhwc", {"block_k_bytes": 32, "block_n": 16}),  # four planes
        ("conv2d:2x64x17x15,48x64x3x3,s2,p1,f16,nhwc,bias", {"block_n": 48}),  # strides that do not divide the image
        ("conv2d:1x40x9x9,32x40x3x2,s1,p1x0x2x1,d2,f16,nhwc", {}),  # fewer channels than blocks have
        ("conv2d:1x32x12x12,16x32x5x5,s2x1,p2,tf32,nhwc", {"block_k_bytes": 128, "block_n": 16}),
        ("conv2d:2x32x9x9,32x32x3x3,s1,p1,f16,nhwc", {"halo_stages": 1}),
        ("conv2d:1x32x8x8,16x32x1x5,s1,p0x2,f16,nhwc", {"block_n": 16}),
        ("conv2d:1x32x12x8,16x32x3x3,s1,p0,d2,f16,nhwc", {"block_n": 16}),
        ("conv1d:2x32x37,32x32x5,s1,p2,bf16,nhwc,bias", {}),
        ("conv3d:1x32x4x5x6,24x32x3x3x3,s1,p1,f16,nhwc", {"stages": 3}),
        ("conv2d:4x32x8x8,64x32x3x3,s1,p1,f16,nhwc,bias", {"cluster_size": 2, "stages": 3}),  # an odd number of tiles
        ("conv2d:2x64x10x10,32x64x3x3,s1,p1,f16,nhwc", {"cluster_size": 2, "warpgroups": 2}),
        ("conv2d:2x64x9x18,24x64x3x3,s1,p1,f16,nhwc,bias,relu", FILTER_ROWS),  # filters overhang
        ("conv2d:2x32x7x7,136x32x3x3,s1,p1,bf16,nhwc,bias,silu,add", FILTER_ROWS | {"warpgroups": 2, "block_n": 80}),
        ("conv2d:1x96x17x15,128x96x3x3,s2,p1,f16,nhwc", FILTER_ROWS | {"wgmma_m_tiles": 2, "block_n": 112}),
        ("conv2d:5x64x8x8,64x64x3x3,s1,p1,f16,nhwc,add", FILTER_ROWS | {"cluster_size": 2, "stages": 3}),
    ],
)
def test_all_taps_read_halo_rows(text, config):
    kernel = emulate.build_checked(text, "halo_hopper", SMALL | config)
    assert find_races(kernel) == []


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x64x11x12,40x64x3x3,s1,p1,f16,nhwc,bias", {}),  # one block of channels, an odd number of stages used
        ("conv2d:2x48x9x9,32x48x3x3,s1,p1,bf16,nhwc,add", {"stages": 4, "halo_stages": 3, "warpgroups": 2}),
        ("conv2d:3x32x8x9,64x32x3x3,s2,p1,f16,nhwc", {"cluster_size": 2, "stages": 3}),
        ("conv2d:2x64x11x12,136x64x3x3,s1,p1,f16,nhwc,bias", FILTER_ROWS),
    ],
)
def test_persistent_ctas_multiply_several_tiles(text, config):
    caches = (
        schedule_definition._declare_knobs,
        schedule_definition._make_space,
        HaloPixelConfig.select_default,
    )
    try:
        with mock.patch.object(halo_pixel_config, "MAX_ACTIVE_CTAS", np.array([0, 2, 2])):
            for cache in caches:
                cache.cache_clear()
            with mock.patch.object(halo_pixel_config, "count_ctas_per_sm", return_value=1):
                kernel = emulate.build_checked(text, "halo_hopper", SMALL | config)
        assert kernel.launch.grid[0] == 2
        assert find_races(kernel) == []
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize(
    "options",
    [
        ",128x128x1x1,s1,p0,f16,nhwc",  # one tap
        ",128x64x3x3,s1,p1,g2,f16,nhwc",
        ",36x128x3x3,s1,p1,f16,nhwc",  # outputs that are no vectors
        ",64x128x3x3,s1,p1,i8,nhwc",
    ],
)
def test_other_convolutions_are_refused(options):
    with pytest.raises(ScheduleError, match=r"one group with|in float16, bfloat16, tf32"):
        tc.build(f"conv2d:1x128x16x16{options}", "halo_hopper", arch="sm_90")


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x128x512x512,128x128x3x3,s1,p1,f16,nhwc",
        "conv2d:1x32x2x2,32x32x3x3,s1,p1x1x0x129,f16,nhwc",  # the bounding box of TMA is too wide
    ],
)
def test_lines_that_do_not_fit_are_refused(text):
    with pytest.raises(ScheduleError, match="fit in shared memory"):
        tc.build(text, "halo_hopper", arch="sm_90")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"halo_stages": 1}, "one stage of halo rows only for one block"),  # a CTA waits for itself
        ({"warpgroups": 3, "block_n": 224}, "registers of all threads fit"),  # ptxas: "Insufficient registers"
    ],
)
def test_configs_that_cannot_run_are_refused(config, message):
    with pytest.raises(KnobError, match=message):
        tc.build("conv2d:1x64x16x16,256x64x3x3,s1,p1,f16,nhwc", "halo_hopper", arch="sm_90", config=SMALL | config)


@pytest.mark.parametrize("channels", [8, 40, 48, 64])  # 48 fill neither a row of 64 bytes nor one of 128
def test_layers_of_any_channels_have_starting_configs(channels):
    w = tc.parse(f"conv2d:32x{channels}x20x20,64x{channels}x3x3,s1,p1,f16,nhwc")
    assert registry.find_schedule(w, "halo_hopper").list_starting_configs(w)


@needs_nvrtc
def test_defaults_compile_without_spills():
    check_spills(tc.parse(f"{LAYER},bias,silu,add"), "halo_hopper", "sm_90")


def test_defaults_of_long_lines_have_two_stages():
    config = HaloPixelConfig.select_default(tc.parse("conv2d:1x256x470x470,128x256x3x3,s1,p1,f16,nhwc"))
    assert config.halo_stages == 2


def test_layers_with_many_pixels_are_searched():
    layers = {LAYER: True, LAYER.replace("3x3,s1,p1", "1x1,s1,p0"): False}
    layers["conv2d:32x32x40x40,128x32x3x3,s1,p1,f16,nhwc"] = False
    layers["conv2d:1x128x14x14,128x128x3x3,s1,p1,f16,nhwc"] = False
    for text, is_searched in layers.items():
        names = [each.name for each in registry.schedules_to_tune(tc.parse(text), "cuda", "sm_90")]
        assert ("halo_hopper" in names) == is_searched, text
