"""Searches that measure what their tuner proposes, and what their logs have."""

import numpy as np
from instant import made_up

import tvmconv as tc
from tvmconv import registry
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import Log, read_records

WORKLOAD = tc.parse("conv2d:1x4x8x8,4x4x1x1")
OTHER = tc.parse("conv2d:1x4x6x6,4x4x1x1")
IMAGE = tc.parse("conv2d:1x16x14x14,32x16x3x3,p1")
TINY = tc.parse("conv2d:1x1x2x2,1x1x1x1")  # whose space is so small that a test can exhaust it


def search(log, workload=WORKLOAD, schedule="tiling", tuner="random", **options):
    """A search that measures nothing but the configs that its tuner proposes."""
    defaults = {"log": log, "device": "opencl:0", "workers": 1, "measure_baseline": False, "remeasure_best": False}
    return tc.tune(workload, schedule, tuner, **{**defaults, **options})


def records_of(log):
    """All records of a log, which has nothing else."""
    bad = InvalidLines()
    records = list(read_records(log, bad))
    assert bad.count == 0
    return records


def trials_of(log):
    """The records of a log that are no last timings."""
    return [record for record in records_of(log) if not record.final]


def finals_of(log):
    """The last timings in a log."""
    return [record for record in records_of(log) if record.final]


def once(records):
    """Whether no config was measured twice."""
    return len({record.identity for record in records}) == len(records)


def some(n, seed, device, **fields):
    """Made-up records of `n` random configs."""
    space = registry.find_schedule(WORKLOAD, "tiling").space(WORKLOAD)
    points = space.sample_legal(n, np.random.default_rng(seed))
    return [made_up(WORKLOAD, "tiling", space.config_from_point(point), device.name, **fields) for point in points]


def append(log, records):
    for record in records:
        Log(log).append(record)
