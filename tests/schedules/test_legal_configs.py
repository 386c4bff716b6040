"""Whether a config is legal does not depend on the configs that are checked with it."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.target import get_block_limits

ARCH = "sm_90"
MAX_POINTS = 40  # of each schedule, around its default config
WORKLOADS = [
    "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16",
    "conv2d:4x64x56x56,64x64x3x3,s2,p1,f16,nhwc",
    "conv2d:4x64x57x57,64x64x3x3,s1,p1,bf16,nhwc-nchw",
    "conv2d:4x64x56x56,64x64x1x1,tf32",
    "conv2d:4x64x56x56,64x1x3x3,s1,p1,g64,f16",
    "conv2d:4x64x56x56,64x16x3x3,s1,p1,g4,f16,nhwc",
    "conv2d:4x3x224x224,64x3x7x7,s2,p3,f16",
    "conv2d_dgrad:4x64x56x56,64x64x3x3,s2,p1,f16,nhwc",
    "conv2d_wgrad:4x64x56x56,64x64x3x3,s1,p1,tf32,nhwc",
    "conv2d_transpose:4x64x28x28,64x32x4x4,s2,p1,f16,nhwc",
    "conv2d:1x64x28x28,64x64x3x3,s1,p1,up2,f16,nhwc",
    "conv3d:1x64x4x28x28,64x64x3x3x3,s1,p0x1x1,c2,bf16,nhwc",
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", WORKLOADS)
def test_configs_are_as_legal_together_as_alone(text):
    w = tc.parse(text)
    for schedule in registry.schedules_to_tune(w, "cuda", ARCH):
        space = schedule.space(w, get_block_limits(ARCH))
        default = space.point_from_config(space.default)
        points = np.concatenate([default[None], space.list_neighbors(default)])[:MAX_POINTS]
        alone = [bool(space.is_legal(point[None])[0]) for point in points]
        assert space.is_legal(points).tolist() == alone, schedule.name
        assert all(alone[1:]), schedule.name  # the neighbors were checked together
