"""With AutoTVM's knobs alone, blocks and threads are those of AutoTVM's templates."""

import itertools

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.arithmetic import ceil_div

UNROLLING = ("auto_unroll_max_step", "unroll_explicit")
KNOBS = {
    "direct": ("tile_f", "tile_y", "tile_x", "tile_rc", "tile_ry", "tile_rx", *UNROLLING),
    "depthwise": ("tile_f", "tile_y", "tile_x", *UNROLLING),
}
CASES = (
    ("direct", "conv2d:1x64x28x28,64x64x3x3,s1,p1"),
    ("direct", "conv2d:3x16x14x10,24x16x3x1,s2x1,p1x2x0x1,d1x2"),
    ("depthwise", "conv2d:1x32x28x28,32x1x3x3,s1,p1,g32"),
    ("depthwise", "conv2d:3x12x12x20,12x1x3x3,s2x1,p1x0x0x2,g12"),
)


def configs(schedule, workload, n=12):
    """Values of AutoTVM's knobs that are legal with the other knobs at their defaults."""
    space = registry.find_schedule(workload, schedule).space(workload)
    points = space.sample_legal(8 * n, np.random.default_rng(0))
    drawn = [{name: space.config_from_point(point)[name] for name in KNOBS[schedule]} for point in points]
    legal = space.is_legal(np.stack([space.point_from_config(config) for config in drawn]))
    return list(itertools.compress(drawn, legal))[:n]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "text"), CASES)
def test_the_launch_is_that_of_autotvms_template(schedule, text):
    """The formulas: `schedule_direct_cuda` and `schedule_depthwise_conv2d_nchw` of TVM 0.19, python/tvm/topi/cuda/."""
    w = tc.parse(text)
    for config in configs(schedule, w):
        kernel = tc.build(w, schedule, arch="sm_90", config=config)
        f, y, x = (config[tile][1:] for tile in ("tile_f", "tile_y", "tile_x"))
        blocks = [ceil_div(extent, int(np.prod(tile))) for extent, tile in ((w.Q, x), (w.P, y), (w.O, f))]
        assert kernel.launch.grid == (blocks[0], blocks[1], blocks[2] * w.N), config
        assert kernel.launch.block == (x[1], y[1], f[1]), config


@pytest.mark.parametrize(("schedule", "text"), CASES)
def test_the_other_knobs_default_to_autotvms_only_way(schedule, text):
    space = registry.find_schedule(tc.parse(text), schedule).space(tc.parse(text))
    others = {name: value for name, value in space.default.items() if name not in KNOBS[schedule]}
    autotvm = {"sliced_k": 1, "pipeline": "none", "weight_layout": "oihw", "weight_pad": 0, "operand_scope": "shared"}
    assert others.items() <= {**autotvm, "copy_order": "contiguous"}.items()
