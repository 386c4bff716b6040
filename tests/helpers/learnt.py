"""Made-up measurements of a made-up GPU, and what is learnt of them."""

import functools

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv import training as train
from tvmconv.logs.record import Record
from tvmconv.target import Target

MACHINE = Target("Some GPU", "sm_90", 100, 50e12, 2e12)
SHAPES = ((16, 32, 14), (32, 32, 28), (64, 16, 14), (8, 64, 28), (24, 40, 20))
TEXTS = [f"conv2d:1x{c}x{side}x{side},{o}x{c}x1x1,s1,p0" for c, o, side in SHAPES]
NEW = tc.parse("conv2d:1x48x20x20,24x48x1x1")


def seconds(w, space, points):
    """A made-up time: best are blocks of 64 threads, each with four sums."""
    usage = space.compute_usage(points)
    bad = np.abs(np.log2(usage.threads / 64)) + np.abs(np.log2(usage.accumulators / 4))
    return MACHINE.roofline_seconds(w) * 2.0 ** (0.5 + bad)


@functools.cache
def records():
    """Some of each workload, by `direct`."""
    made = []
    for text in TEXTS:
        w = tc.parse(text)
        space = registry.find_schedule(w, "direct").space(w)
        points = space.sample_legal(120, np.random.default_rng(0))
        for point, cost in zip(points, seconds(w, space, points), strict=True):
            config = space.config_from_point(point)
            made.append(Record(w, "direct", config, MACHINE.name, "cuda -arch=sm_90", times=(float(cost),)))
    return made


@functools.cache
def knowledge():
    """The model of these records, with fewer trees than others have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BOOSTING_ROUNDS", 80)
        return train.train(train.collect_samples(records()), MACHINE, "made up")
