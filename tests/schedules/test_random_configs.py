"""Kernels of random workloads and configs compute what they should, executed without a GPU.

Each seed draws a workload of tensor cores, from forward layers to gradients, and for each of its schedules the default
and a random config. `pytest -m slow tests/schedules/test_random_configs.py` tries many more seeds.
"""

import random

import emulate
import numpy as np
import pytest

import tvmconv as tc
from tvmconv.devices import Arch

NUM_SEEDS, NUM_QUICK_SEEDS = 150, 4
ARCHS = (Arch("sm_90"), Arch("sm_90"), Arch("sm_80"))
SCHEDULES = {
    "depthwise_cluster",
    "depthwise_diagonal",
    "depthwise_mma_sync",
    "depthwise_nchw",
    "depthwise_nhwc",
    "depthwise_planes",
    "depthwise_tma",
    "grouped_mma_sync",
    "grouped_nchw",
    "grouped_nhwc",
    "halo_mma_sync",
    "hopper",
    "mma_sync",
    "pointwise_mma_sync",
    "stem",
    "winograd_hopper",
}
FORWARD, TRANSPOSED = "", "_transpose"
OPERATORS = (FORWARD, FORWARD, FORWARD, "_dgrad", "_wgrad", TRANSPOSED)
EPILOGUES = ("", "", ",bias", ",bias,relu", ",bias,add,silu")


def draw_channels(rng, kind):
    """Input channels, output channels and groups."""
    if kind == "grouped":
        groups = rng.choice([2, 3])
        return groups * rng.choice([4, 8, 16, 24]), groups * rng.choice([8, 16, 24]), groups
    if kind == "depthwise":
        channels = rng.choice([16, 24, 40])
        return channels, channels, channels
    inputs = {"first": [1, 2, 3, 4], "narrow": [8, 16, 24]}.get(kind, [16, 24, 32, 40, 64, 72])
    return rng.choice(inputs), rng.choice([8, 16, 24, 40] if kind == "narrow" else [16, 24, 32, 48, 64, 72]), 1


def draw_text(rng):
    """The text of a workload, which may be malformed."""
    ndim, operator = (
        rng.choice([1, 2, 2, 2, 3]),
        rng.choice([FORWARD, FORWARD, FORWARD, "_dgrad", "_wgrad", TRANSPOSED]),
    )
    kind = rng.choice(["dense", "dense", "first", "narrow", "grouped", "depthwise", "1x1"])
    inputs, outputs, groups = draw_channels(rng, kind)
    sizes = [[2, 3, 4], [5, 6, 7], [7, 8, 9]] if ndim == 3 else [[5, 7, 8, 9, 11, 12, 14, 16]] * ndim
    image = [rng.choice([1, 2, 3]), inputs, *map(rng.choice, sizes)]
    kernel = [1 if kind == "1x1" else rng.choice([1, 3, 3, 2, 5]) for _ in range(ndim)]
    weight = [inputs, outputs // groups] if operator == TRANSPOSED else [outputs, inputs // groups]
    layouts = [",nhwc", ",nhwc", ""] if "grad" in operator else [",nhwc", ",nhwc", "", ",nchw-nhwc", ",nhwc-nchw"]
    dtype, layout = rng.choice(["f16", "f16", "bf16", "tf32"]), rng.choice(layouts)
    epilogue = "" if "grad" in operator else rng.choice(EPILOGUES)
    if operator == FORWARD and layout == ",nhwc" and rng.random() < 0.15:
        epilogue = ",stats"
    stride, padding, dilation = rng.choice([1, 1, 2]), rng.choice([0, 1, kernel[-1] // 2]), rng.choice([1, 1, 1, 2])
    shapes = ",".join("x".join(map(str, shape)) for shape in (image, [*weight, *kernel]))
    options = f"s{stride},p{padding},d{dilation},g{groups},{dtype}{layout}{epilogue}"
    return f"conv{ndim}d{operator}:{shapes},{options}"


def draw_workload(rng):
    """A workload whose output is not all zeros."""
    while True:
        try:
            workload = tc.parse(draw_text(rng))
        except tc.WorkloadError:
            continue
        if np.any(workload.reference(*workload.inputs(seed=0))):
            return workload


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_QUICK_SEEDS)) for seed in range(NUM_SEEDS)],
)
def test_random_configs_compute_random_workloads(seed):
    rng = random.Random(seed)
    workload, arch = draw_workload(rng), rng.choice(ARCHS)
    for schedule in tc.schedules(workload):
        if schedule.name in SCHEDULES and schedule.can_run_on("cuda", arch.arch):
            space = schedule.space(workload, arch.limits)
            points = space.sample_legal(1, np.random.default_rng(rng.randrange(2**32)))
            for config in ({}, *map(space.config_from_point, points)):
                kernel = tc.build(workload, schedule, arch=arch.arch, config=config)
                error = emulate.error(kernel.lowered_module, workload)
                assert error <= workload.tolerance, (workload.text, schedule.name, config, arch.arch)
