"""`pointwise_mma_sync` computes narrow 1×1 layers, executed without a GPU."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x24x9x7,72x24x1x1,s1,p0,f16,nhwc,bias,relu", {"pixel_octets": 4}),
        ("conv2d:2x240x9x7,40x240x1x1,s1,p0,bf16,nhwc,bias", {"pixel_octets": 2, "warps": 2}),
        ("conv2d:3x8x8x8,26x8x1x1,s1,p0,f16,nhwc,bias,silu,add", {}),  # vectors of two channels
        ("conv2d:3x36x9x8,18x36x1x1,s1,p0,tf32,nhwc,bias", {}),
        ("conv1d:3x72x70,30x72x1,s1,p0,f16,nhwc", {"pixel_octets": 5}),
        ("conv1d:3x40x70,30x40x1,s1,p0,f16,nhwc,bias,add", {"pixel_octets": 2, "warps": 2, "stages": 2}),
        ("conv3d:1x16x2x3x9,88x16x1x1x1,s1,p0,bf16,nhwc", {"warps": 4}),
        ("conv2d:5x40x20x21,24x40x1x1,s1,p0,f16,nhwc", {"pixel_octets": 1, "warps": 2}),  # warps compute several tiles
    ],
)
def test_pixels_in_registers_compute_narrow_layers(text, config):
    kernel = emulate.build_checked(text, "pointwise_mma_sync", config)
    space = registry.find_schedule(kernel.workload, "pointwise_mma_sync").space(kernel.workload)
    used, launch = space.compute_usage(space.point_from_config(kernel.config)[None]), kernel.kernels[-1].launch
    assert (used.threads[0], used.dynamic_shared_bytes[0]) == (launch.threads_per_block, kernel.dynamic_shared_bytes)


@pytest.mark.parametrize(
    "options",
    [
        ",16x24x3x3,s1,p1,f16,nhwc",
        ",16x24x1x1,s2,p0,f16,nhwc",
        ",15x24x1x1,s1,p0,f16,nhwc",
        ",16x12x1x1,s1,p0,g2,f16,nhwc",
    ],
)
def test_other_convolutions_are_refused(options):
    with pytest.raises(ScheduleError, match="filters of one tap without a stride"):
        tc.build(f"conv2d:1x24x8x8{options}", "pointwise_mma_sync", arch="sm_80")


def test_narrow_layers_of_many_pixels_are_searched():
    layers = {"8x24x56x56,72x24": True, "1x24x56x56,72x24": False, "8x256x56x56,128x256": False}
    for shape, is_searched in layers.items():
        w = tc.parse(f"conv2d:{shape}x1x1,s1,p0,f16,nhwc")
        names = [each.name for each in registry.schedules_to_tune(w, "cuda", "sm_90")]
        assert ("pointwise_mma_sync" in names) == is_searched
