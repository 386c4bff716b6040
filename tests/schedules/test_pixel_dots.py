"""`pixel_dots` computes 1×1 layers of few filters, executed without a GPU."""

import emulate
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.errors import ScheduleError


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("conv2d:2x16x4x70,1x16x1x1,s1,p0,f16,nhwc", {"lane_pixels": 4}),  # two lanes of a pixel
        ("conv2d:1x8x9x9,2x8x1x1,s1,p0,bf16,nhwc,bias,relu", {"lane_pixels": 2, "warps": 2}),
        ("conv2d:3x24x7x7,4x24x1x1,s1,p0,f16,nhwc,bias,silu,add", {"lane_pixels": 1}),  # a lane without channels
        ("conv2d:1x320x5x5,1x320x1x1,s1,p0,f16,nhwc", {"lane_pixels": 8}),  # lanes have two vectors, or one
        ("conv1d:2x16x99,4x16x1,s1,p0,nhwc,bias", {"lane_pixels": 8}),
        ("conv3d:1x8x3x5x7,1x8x1x1x1,s1,p0,tf32,nhwc", {}),
        ("conv2d:5x16x40x41,1x16x1x1,s1,p0,f16,nhwc", {"lane_pixels": 2, "warps": 2, "max_ctas": 132}),  # several tiles
    ],
)
def test_lanes_share_pixels_of_few_filters(text, config):
    kernel = emulate.build_checked(text, "pixel_dots", config)
    space = registry.find_schedule(kernel.workload, "pixel_dots").space(kernel.workload)
    used = space.compute_usage(space.point_from_config(kernel.config)[None])
    assert used.threads[0] == kernel.launch.threads_per_block


@pytest.mark.parametrize(
    "options",
    [",2x24x3x3,s1,p1,f16,nhwc", ",2x24x1x1,s2,p0,f16,nhwc", ",3x24x1x1,s1,p0,f16,nhwc", ",4x12x1x1,s1,p0,g2,f16,nhwc"],
)
def test_other_convolutions_are_refused(options):
    with pytest.raises(ScheduleError, match="filters of one tap without a stride"):
        tc.build(f"conv2d:1x24x8x8{options}", "pixel_dots", arch="sm_80")


def test_layers_of_many_pixels_are_searched():
    for pixels, is_searched in {"32x16x4x8400": True, "1x16x4x8": False}.items():
        w = tc.parse(f"conv2d:{pixels},1x16x1x1,s1,p0,f16,nhwc")
        names = [each.name for each in registry.schedules_to_tune(w, "cuda", "sm_90")]
        assert ("pixel_dots" in names) == is_searched
