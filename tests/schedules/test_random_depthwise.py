"""Depthwise kernels by TMA compute random workloads with random configs, executed without a GPU.

Images may be smaller than the reach of a filter, and padding may hold whole rows. Configs are drawn from all that are
allowed, not only from those that are worth a search. `pytest -m slow` tries many more seeds.
"""

import random

import emulate
import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.races import find_races
from tvmconv.space import Knobs
from tvmconv.target import get_block_limits

NUM_SEEDS, NUM_QUICK_SEEDS = 100, 3
SCHEDULES = ("depthwise_tma", "depthwise_planes", "depthwise_cluster", "depthwise_diagonal")
KINDS = (("conv2d", "nhwc"), ("conv2d", "nchw"), ("conv2d_dgrad", "nhwc"), ("conv2d_wgrad", "nhwc"))
EPILOGUES = {"conv2d": ("", ",bias,silu", ",bias,add"), "conv2d_dgrad": ("", ",add"), "conv2d_wgrad": ("", ",out-f32")}


def draw_text(rng):
    """The text of a workload, which may be malformed."""
    operator, layout = rng.choice(KINDS)
    dtype = rng.choice(["f16", "f16", "bf16", "tf32"])
    channels, max_size = rng.choice([8, 16, 24]), rng.choice([3, 9, 17])
    size, kernel = ([rng.randint(1, largest) for _ in range(2)] for largest in (max_size, 5))
    stride, dilation = ([rng.choice([1, 1, 2, 3]) for _ in range(2)] for _ in range(2))
    reach = [(taps - 1) * distance for taps, distance in zip(kernel, dilation, strict=True)]
    padding = [rng.choice([extent // 2, rng.randint(0, extent + 1)]) for extent in (*reach, *reach)]
    image, weight, s, p, d = ("x".join(map(str, numbers)) for numbers in (size, kernel, stride, padding, dilation))
    text = f"{operator}:{rng.randint(1, 4)}x{channels}x{image},{channels}x1x{weight},s{s},p{p},d{d},g{channels}"
    return f"{text},{dtype},{layout}{rng.choice(EPILOGUES[operator])}"


def draw_workload(rng):
    """A workload for one of the schedules, whose result is not all zeros."""
    while True:
        try:
            w = tc.parse(draw_text(rng))
        except tc.WorkloadError:
            continue
        schedules = [schedule for schedule in tc.schedules(w) if schedule.name in SCHEDULES]
        if schedules and np.any(w.reference(*w.inputs(seed=0))):
            return w, schedules


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= NUM_QUICK_SEEDS)) for seed in range(NUM_SEEDS)],
)
def test_random_configs_compute_random_depthwise_workloads(seed, monkeypatch):
    monkeypatch.setattr(Knobs, "prune", lambda self, description, predicate: None)
    rng = random.Random(seed)
    w, schedules = draw_workload(rng)
    for schedule in schedules:
        space = schedule.space(w, get_block_limits("sm_90"))
        for point in space.sample_legal(2, np.random.default_rng(rng.randrange(2**32))):
            kernel = tc.build(w, schedule, arch="sm_90", config=space.config_from_point(point))
            assert emulate.error(kernel.lowered_module, w) <= w.tolerance, (w.text, schedule.name, kernel.config)
            assert find_races(kernel) == [], (w.text, schedule.name, kernel.config)
