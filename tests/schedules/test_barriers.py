"""No schedule lets threads race for shared memory, even where a tile is so small that TVM's rule for barriers fails.

A thread that stages a single element stores it under the very index under which it loads one: then the index decides
whether TVM puts a barrier between the two (tvmconv.compiler.barriers).
"""

import functools

import pytest
from nasty import VARIED

import tvmconv as tc
from tvmconv import registry
from tvmconv.compiler.barriers import find_missing_barriers
from tvmconv.space import SplitKnob

# One row of threads stages what both read; with the channels' threads outermost, its barriers were missing.
SHARED_ROW = tc.parse("conv2d:3x1x19x43,2x1x4x1,s3,p0,d3x1")
ONE_EACH = {
    "tile_f": (-1, 1, 2, 1),
    "tile_p": (-1, 1, 30, 1),
    "tile_rc": (-1, 1),
    "tile_ry": (-1, 1),
    "tile_rx": (-1, 1),
}
PIPELINES = ("none", "registers", "async2", "async3", "async4")
FETCHES = ("contiguous", "coalesced")

SMALL = (
    "conv2d:3x1x19x43,2x1x4x1,s3,p0,d3x1",
    "conv2d:2x6x11x11,12x1x3x3,s2,p1,g6",
    *VARIED,
)
CASES = [  # every third of the schedules of each workload
    (text, schedule.name)
    for number, text in enumerate(SMALL)
    for schedule in tc.schedules(tc.parse(text))[number % 3 :: 3]
]


@functools.cache
def shared_row():
    return tc.Problem(SHARED_ROW)


@pytest.mark.sample(7)
@pytest.mark.parametrize("place", ["opencl:0", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fetch", FETCHES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_threads_that_share_a_staged_row_read_it_in_time(pipeline, fetch, place):
    config = {**ONE_EACH, "pipeline": pipeline, "copy_order": fetch}
    kernel = tc.build(SHARED_ROW, "implicit_gemm", device=place, config=config)
    assert kernel.verify(shared_row()).error <= 1e-5


def single_elements(workload, schedule):
    """A config of few threads, which have one output each and stage one tap at a time."""
    config = {}
    for name, knob in registry.find_schedule(workload, schedule).space(workload).knobs.items():
        if isinstance(knob, SplitKnob) and name != "tile_b":  # winograd's, which is all blocks
            threads = 1 if name.startswith("tile_r") else min(knob.extent, 6)
            config[name] = (-1, *[1] * (knob.num_factors - 3), threads, 1) if knob.num_factors > 2 else (-1, 1)
    return config


@pytest.mark.sample(8)
@pytest.mark.parametrize(("text", "schedule"), CASES)
def test_no_schedule_lets_threads_race(text, schedule):
    workload = tc.parse(text)
    kernel = tc.build(workload, schedule, arch="sm_75", config=single_elements(workload, schedule))
    assert find_missing_barriers(kernel.lowered) == []
