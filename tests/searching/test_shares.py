"""A network's time is shared out by what its layers cost."""

from types import SimpleNamespace

import pytest

import tvmconv as tc
from tvmconv.search.time_budget import MIN_TASK_SECONDS, allocate_seconds
from tvmconv.target import LAUNCH_SECONDS, UNKNOWN_TARGET, Target

LARGE, SMALL = tc.parse("conv2d:1x256x56x56,256x256x3x3,p1"), tc.parse("conv2d:1x8x7x7,8x8x1x1")
TARGET = Target("a GPU", "sm_90", 100, 60e12, 4e12)
GPU, UNKNOWN = SimpleNamespace(target=TARGET), SimpleNamespace(target=None)


def test_time_of_a_layer_is_that_of_its_operations_or_a_launch():
    assert TARGET.roofline_seconds(LARGE) == pytest.approx(LARGE.flops / 60e12 + LAUNCH_SECONDS)
    assert LAUNCH_SECONDS < TARGET.roofline_seconds(SMALL) < 1.01 * LAUNCH_SECONDS
    assert UNKNOWN_TARGET.roofline_seconds(LARGE) > UNKNOWN_TARGET.roofline_seconds(SMALL)


@pytest.mark.parametrize("device", [GPU, UNKNOWN])
def test_layers_that_cost_more_get_more_and_all_together_get_all(device):
    counts = {LARGE: 1, SMALL: 1}
    first = allocate_seconds(100.0, [LARGE, SMALL], counts, device)
    assert first > 10 * allocate_seconds(100.0 - first, [SMALL], counts, device) > 0
    assert allocate_seconds(100.0 - first, [SMALL], counts, device) == pytest.approx(100.0 - first)


def test_a_layer_that_is_there_often_costs_more():
    once, often = (allocate_seconds(100.0, [SMALL, LARGE], {SMALL: n}, GPU) for n in (1, 50))
    assert often > once >= MIN_TASK_SECONDS


def test_where_time_is_short_half_of_it_is_shared_equally():
    assert allocate_seconds(1.0, [SMALL, LARGE], {}, GPU) >= 0.25
