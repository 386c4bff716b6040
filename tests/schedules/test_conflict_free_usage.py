"""What `usage` says of conflict_free's configs is so."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import devices, library


@pytest.mark.parametrize(
    "text",
    [
        "conv2d:1x128x40x40,128x128x3x3,s1,p1",
        "conv2d:2x10x9x9,12x5x3x3,g2",
        "conv2d:1x40x3x3,70x40x3x3",  # one output pixel
        "conv1d:3x6x20,10x6x5,s2",
    ],
)
def test_usage_is_what_the_kernel_takes(text):
    w, arch = tc.parse(text), devices.find("sm_90")
    space = library.find(w, "conflict_free").space(w, arch.limits)
    points = space.sample(3, np.random.default_rng(0))
    used = space.usage(points)
    for place, point in enumerate(points):
        (step,) = tc.build(w, "conflict_free", arch="sm_90", config=space.config(point)).program.steps
        took = step.launch.threads, step.shared_bytes, step.launch.blocks
        assert took == (used.threads[place], used.shared_bytes[place], used.blocks[place])


def test_what_does_not_fit_is_not_proposed():
    w, arch = tc.parse("conv2d:1x128x40x40,128x128x3x3,s1,p1"), devices.find("sm_90")
    space = library.find(w, "conflict_free").space(w, arch.limits)
    used = space.usage(space.listed)
    assert used.threads.max() <= arch.limits.max_threads
    assert used.shared_bytes.max() <= arch.limits.shared_bytes
