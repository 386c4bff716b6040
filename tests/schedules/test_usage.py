"""What a schedule says that a config uses is what its kernel uses."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from points import all_divide, covering

import tvmconv as tc
from tvmconv import registry
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.devices import find_device
from tvmconv.target import get_block_limits

ARCH = "sm_90"
VARIED = (
    "conv2d:1x64x28x28,64x64x3x3,s1,p1",
    "conv2d:2x32x13x17,48x32x3x3,s2,p1",
    "conv2d:1x16x24x24,24x16x3x5,s1x2,p1x2x0x1,d2x1",
    "conv2d:4x16x14x14,16x16x3x3,s1,p1",
    "conv2d:1x64x7x7,128x64x1x1,s1,p0",
    "conv2d:1x64x1x1,40x64x1x1,s1,p0",
    "conv2d:1x13x17x19,11x13x3x3,s1,p1",
    "conv2d:2x8x9x13,12x4x3x5,s2x1,p1x2x0x1,d1x2,g2",
    "conv2d:1x32x14x14,32x1x3x3,s1,p1,g32",
    "conv2d:2x6x11x11,6x1x3x3,s2,p1,g6",
    "conv2d:1x64x28x28,64x64x3x3,s1,p1,f16",  # of half the bytes; with slices, sums of twice as many meet in them
    "conv2d:1x64x7x7,128x64x1x1,s1,p0,bf16,nhwc,bias,relu",
    "conv2d:2x32x13x17,48x32x3x3,s2,p1,f16,nhwc,bias,add,silu",
    "conv2d:1x32x14x14,32x1x3x3,s1,p1,g32,bf16,nhwc",
    "conv2d:3x12x10x14,24x4x2x4,s1x3,p0x1x2x3,g3,f16,nhwc,bias",
    "conv1d:2x64x100,32x64x5,s1,p2,f16",
    "conv3d:1x16x4x7x7,32x16x3x3x3,s1,p1,nhwc",
)
ON_TENSOR_CORES = (
    "conv2d:2x64x13x17,48x64x3x3,s2,p1,f16,nhwc,bias,relu",
    "conv2d:2x64x13x17,48x64x3x3,s2,p1,bf16",
    "conv2d:1x512x7x7,512x512x3x3,s1,p1,tf32,nhwc,relu,add",  # few tiles of long sums, which blocks share
    "conv2d:3x12x10x14,24x4x2x4,s1x3,p0x1x2x3,g3,f16,nhwc,bias",
    "conv1d:2x64x100,32x64x5,s1,p2,tf32",
    "conv2d:2x3x13x17,11x3x3x3,s1,p1,f16,nhwc,bias,add,relu",
    "conv2d:9x3x21x35,16x3x3x3,s1x2,p1,bf16,relu",  # enough tiles for several of each block
    "conv2d:2x32x9x11,48x32x3x3,s1,p1,up2,f16,nhwc,bias,relu",
    "conv2d:2x32x19x70,3x32x3x3,s1,p1,bf16,nhwc,bias",
    "conv2d:1x32x9x18,24x32x3x3,s1,p1,f16,nhwc,bias,relu",
    "conv2d:2x16x18x20,16x16x3x3,s2,p1,f16,nhwc,bias,silu",
    "conv2d:2x48x13x15,48x1x3x3,s1,p1,g48,f16,nhwc,bias",
    "conv2d:3x24x9x7,2x24x1x1,s1,p0,bf16,nhwc,bias",
    "conv2d:2x16x10x12,16x1x3x3,s1,p1,g16,f16",
    "conv2d_dgrad:2x24x9x11,48x8x3x3,s2,p1,g3,f16,nhwc",
    "conv2d_dgrad:2x24x9x11,40x24x1x1,s1,p0,f16,nhwc",
    "conv2d_wgrad:2x32x9x11,48x16x3x3,s2,p1,g2,f16,nhwc",
    "conv2d_wgrad:2x16x9x11,16x1x5x5,s2,p2,g16,f16,nhwc",
    "conv2d_wgrad:2x32x9x11,48x16x3x3,s2,p1,g2,nhwc",
    "conv2d_dgrad:2x24x9x11,48x8x3x3,s2,p1,g3,nhwc",
    "conv2d_wgrad:2x32x9x11,32x1x3x3,s1,p1,g32,f16,nhwc",
    "conv2d:2x64x13x17,48x64x3x3,s2,p1,e4m3,nhwc,scale,add,relu",
)


def pairs(texts, *, opencl):
    """Each workload with each schedule that says what it uses: those for OpenCL too, or those for CUDA alone."""
    schedules = [(text, s) for text in texts for s in tc.schedules(tc.parse(text)) if s.usage]
    return [(text, s.name) for text, s in schedules if ("opencl" in s.device_kinds) == opencl]


def choices(text, name):
    """The workload, and what a schedule meets in it: dtype, layout, groups, strides, dilation and a batch, or none."""
    w = tc.parse(text)
    met = {"groups": w.groups > 1, "stride": max(w.stride) > 1, "dilation": max(w.dilation) > 1, "batch": w.N > 1}
    return {text, *((name, choice) for choice in (w.dtype, w.layout, *met.items()))}


def in_turn(pairs):
    """Every other workload of each schedule that has many, and those with which it meets what it would not else."""
    own = {name: [text for text, other in pairs if other == name] for _, name in pairs}
    turns = {
        (text, name)
        for number, (name, texts) in enumerate(own.items())
        for text in (texts[number % 2 :: 2] if len(texts) > 5 else texts)
    }
    met = set().union(*(choices(*pair) for pair in turns))
    for pair in pairs:
        if not choices(*pair) <= met:
            met |= choices(*pair)
            turns.add(pair)
    return [pair for pair in pairs if pair in turns]


ALL_PAIRS = [*pairs(VARIED, opencl=True), *pairs(ON_TENSOR_CORES, opencl=False)]
PAIRS = in_turn(ALL_PAIRS)


def multiplies(lowered):
    """The step that the usage is of: the first with shared memory, which transforms and sums of parts have none of."""
    return next((step for step in lowered.kernels if step.shared_bytes + step.dynamic_shared_bytes), lowered.kernels[0])


@functools.cache
def chosen(text, name):
    """The space of a schedule, and legal configs."""
    workload = tc.parse(text)
    space = registry.find_schedule(workload, name).space(workload, get_block_limits(ARCH))
    return space, covering(space, 1, seed=2)


SOME = [pytest.param(pair, marks=[pytest.mark.slow] if number % 2 else []) for number, pair in enumerate(PAIRS)]


def apply_without_conversion(schedule, text, config):
    """A schedule without the launches that convert a layout, which kernels that read it need not."""
    workload = tc.parse(text)
    loader = config.get("input_loader")
    if schedule.name in ("hopper", "mma_sync", "winograd_hopper") and loader in (None, "converted", "tma"):
        stores_pixels = workload.output_layout == "nchw" and schedule.name != "winograd_hopper"
        workload = dataclasses.replace(workload, layout="nhwc-nchw" if stores_pixels else "nhwc")
        config = {knob: value for knob, value in config.items() if knob not in ("input_loader", "producer_warpgroups")}
    return schedule.apply(workload, config)[0]


@pytest.fixture(scope="module", params=SOME, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def configs(request):
    """Legal configs with what they say that they use and their kernels: (space, [(config, usage, lowered)]).

    Launches that convert a layout do not count.
    """
    text, name = request.param
    schedule = registry.find_schedule(tc.parse(text), name)
    space, configs = chosen(text, name)
    columns = space.compute_usage(np.stack([space.point_from_config(config) for config in configs])).to_columns()
    target = find_device(ARCH).make_target()
    kernels = [
        multiplies(lower_module(apply_without_conversion(schedule, text, config).mod, target)) for config in configs
    ]
    used = [{name: values[i] for name, values in columns.items()} for i in range(len(configs))]
    return space, list(zip(configs, used, kernels, strict=True))


@pytest.mark.sample(3)
def test_usage_is_that_of_the_lowered_kernel(configs):
    """Static shared memory is what TVM allocates where no tile overhangs."""
    space, kernels = configs
    for config, used, kernel in kernels:
        assert used["threads"] == kernel.launch.threads_per_block, config
        assert used["blocks"] == math.prod(kernel.launch.grid), config
        assert used.get("dynamic_shared_bytes", 0) == kernel.dynamic_shared_bytes, config
        assert used.get("cluster", 1) == math.prod(kernel.launch.cluster), config
        assert used["shared_bytes"] == kernel.shared_bytes or not all_divide(space, config), config


def test_configs_above_are_of_every_schedule_and_have_clusters():
    """Without this, the tests above could pass with few kernels, and no cluster among them."""
    met, every = (set().union(*(choices(*pair) for pair in pairs)) for pairs in (PAIRS, ALL_PAIRS))
    assert met == every
    assert {name for _, name in PAIRS} == {s.name for s in tc.schedules() if s.usage and s.operator.startswith("conv")}
    space, configs = chosen(ON_TENSOR_CORES[2], "mma_sync")
    assert (space.compute_usage(np.stack([space.point_from_config(config) for config in configs])).cluster > 1).any()
