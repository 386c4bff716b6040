"""`filter_rows_hopper`: the kernel of `hopper` with filters as rows of the product and pixels as columns."""

import emulate
import pytest

import tvmconv as tc
from tvmconv.errors import ScheduleError

SMALL = {
    **{"warpgroups": 1, "wgmma_m_tiles": 1, "block_n": 32, "block_k_bytes": 64, "stages": 3, "split_k": 1},
    **{"cluster_m": 1, "cluster_n": 1, "kernel_schedule": "cooperative", "raster_order": "n"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:1x32x9x16,72x32x3x3,s1,p1,f16,nhwc,bias,relu", {}),  # filters and channels overhang
        ("conv2d:2x32x16x16,64x32x1x1,s1,p0,f16,nhwc,bias,silu,add", {"warpgroups": 2, "stages": 2}),
        ("conv2d:2x16x17x13,136x16x3x3,s2,p1,f16,nhwc,bias", {"block_k_bytes": 32, "block_n": 80}),  # pixels overhang
        (
            "conv2d:2x64x16x20,200x64x3x1,s1,p1x0,bf16,nhwc,bias,silu",
            {"wgmma_m_tiles": 2, "block_n": 64, "cluster_m": 2},
        ),
        ("conv2d:2x64x16x20,64x64x3x1,s1,p1x0,f16,nhwc,add", {"block_n": 80, "cluster_n": 2, "block_k_bytes": 128}),
        (
            "conv2d:2x16x72x60,40x16x1x1,s1,p0,f16,nhwc,bias,add,relu",  # 270 tiles
            {"warpgroups": 2, "kernel_schedule": "pingpong", "block_k_bytes": 32},
        ),
        (
            "conv2d:1x16x10x9,136x16x1x3,s1,p0x1,f16,nhwc,bias",
            {"warpgroups": 3, "kernel_schedule": "cooperative_setmaxnreg", "block_k_bytes": 32, "stages": 2},
        ),
        ("conv3d:1x16x3x8x10,24x16x3x3x3,s1,p1,f16,nhwc,bias", {"block_k_bytes": 32}),
        ("conv1d:2x16x80,24x16x3,s1,p1,d2,f16,nhwc,relu", {"block_k_bytes": 32}),
        ("conv2d:4x64x8x8,320x64x1x1,s1,p0,f16,nhwc,bias", {"raster_order": "m"}),
        ("conv2d:1x32x3x256,72x32x3x3,s1,p1,f16,nhwc,bias", {"taps_per_copy": 3, "block_n": 256}),  # two copies
        (
            "conv2d:2x32x5x80,136x32x1x5,s1,p0x4,d2,bf16,nhwc,add",
            {"taps_per_copy": 5, "block_n": 80, "warpgroups": 2, "cluster_n": 2, "stages": 2},
        ),
    ],
)
def test_results_are_transposed(text, config):
    emulate.build_checked(text, "filter_rows_hopper", {**SMALL, **config})


@pytest.mark.parametrize(
    "options",
    [
        ",36x32x3x3,s1,p1,f16,nhwc",  # outputs that TMA cannot store
        ",32x16x3x3,s1,p1,g2,f16,nhwc",
    ],
)
def test_other_convolutions_are_refused(options):
    with pytest.raises(ScheduleError, match="filters and channels are multiples of 8"):
        tc.build(f"conv2d:1x32x16x16{options}", "filter_rows_hopper", arch="sm_90")


def test_64_filters_have_wide_tiles_of_pixels():
    kernel = tc.build("conv2d:32x128x80x80,64x128x3x3,s1,p1,f16,nhwc", "filter_rows_hopper", arch="sm_90")
    assert kernel.config["kernel_schedule"] == "pingpong"
    assert kernel.config["block_n"] >= 192
