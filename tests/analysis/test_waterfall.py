"""The knob waterfall: from the default config to another, each knob once."""

import math

import pytest

import tvmconv as tc
from tvmconv.analysis.block_accesses import count_block_accesses
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.analysis.waterfall import compute_waterfall
from tvmconv.target import Target

H200 = Target("NVIDIA H200", "sm_90", 132, 66.9e12, 4.8e12)
WORKLOAD = tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1")
CONFIG = {"tile_f": (-1, 1, 8, 2), "tile_x": (-1, 1, 1, 4), "sliced_k": 4}  # four slices alone take too much memory


@pytest.fixture(scope="module")
def best():
    return tc.build(WORKLOAD, "direct", arch="sm_90", config=CONFIG)


@pytest.fixture(scope="module")
def way(best):
    """With the time of the best known, and of no other."""
    known = {tuple(sorted(best.config.items())): 1e-5}
    return compute_waterfall(best, H200, lambda config: known.get(tuple(sorted(config.items()))))


def test_the_accesses_are_those_of_the_machine_code(best, way):
    (step,) = best.timed_kernels
    asks, blocks = count_block_accesses(best, step), math.prod(step.launch.grid)
    assert way[-1].wavefronts == sum(each.wavefronts for each in asks.shared_accesses) * blocks
    assert way[-1].sectors == sum(each.sectors for each in asks.global_accesses) * blocks


def test_each_knob_that_differs_changes_once(way):
    assert sorted(name for fall in way for name, _ in fall.knobs) == sorted(CONFIG)


def test_it_begins_at_the_default_and_ends_at_the_best(best, way):
    default = tc.build(WORKLOAD, "direct", arch="sm_90")
    assert way[0].seconds == compute_unit_times(default, H200)[0].seconds
    assert way[-1].seconds == compute_unit_times(best, H200)[0].seconds


def test_the_knob_that_lowers_the_least_time_most_comes_first(way):
    alone = [
        compute_unit_times(tc.build(WORKLOAD, "direct", arch="sm_90", config={name: CONFIG[name]}), H200)[0].seconds
        for name in ("tile_f", "tile_x")
    ]
    assert way[1].seconds == min(alone)


def test_a_knob_waits_for_those_without_which_it_makes_no_kernel(way):
    assert "sliced_k" not in {name for name, _ in way[1].knobs}
