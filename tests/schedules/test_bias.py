"""Sums that begin with their bias."""

import re

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry

SCHEDULES = ["direct", "implicit_gemm"]
LOAD = re.compile(r"\bbias_ptr\[")

WORKLOADS = [
    "conv2d:1x16x8x8,24x16x3x3,s1,p1,bias,relu",
    "conv2d:2x8x9x11,12x8x3x3,s2,p1,nhwc,bias,add,silu",
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2,bf16,bias",
    "conv2d:1x8x9x13,8x1x3x3,s1,p1,g8,bias",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1,bias",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1,relu,bias",
    "conv2d:1x16x5x6,12x16x3x3,s1,p1,i8,nhwc,bias,relu,quantize",
]


def parts(text, schedule, config=None):
    """How often each part of a kernel, from one barrier to the next, loads a bias."""
    source = tc.build(tc.parse(text), schedule, config=config, device="sm_90").source
    return [len(LOAD.findall(part)) for part in source.split("__syncthreads();")]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bias_is_loaded_before_the_operands_and_never_again(schedule):
    before, *others = parts("conv2d:1x16x14x14,32x16x3x3,s1,p1,bias,relu", schedule)
    assert before > 0
    assert others == [0] * len(others) != []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_bias_behind_another_operation_is_loaded_at_the_end(schedule):
    *others, last = parts("conv2d:1x16x14x14,32x16x3x3,s1,p1,relu,bias", schedule)
    assert last > 0
    assert others == [0] * len(others) != []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_thread_loads_a_channel_s_bias_once_for_all_pixels(schedule):
    config = {"tile_f": (-1, 1, 4, 1), "auto_unroll_max_step": 0}
    assert sum(parts("conv2d:1x16x16x16,8x16x3x3,s1,p1,bias", schedule, config)) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", WORKLOADS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_config_begins_with_the_right_bias(schedule, text, opencl):
    """Slices, of which one begins with it; tiles that overhang; groups; layouts."""
    w = tc.parse(text)
    space = registry.find_schedule(w, schedule).space(w, opencl.limits)
    configs = [space.config_from_point(point) for point in space.sample_legal(50, np.random.default_rng(len(text)))]
    sliced = [config for config in configs if config.get("sliced_k", 1) > 1]
    for config in configs[:1] + sliced[:1]:
        assert tc.build(w, schedule, config=config, device=opencl).verify().ok
