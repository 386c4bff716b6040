"""The naive schedule is compared with where a launch of it is short."""

from dataclasses import replace

import pytest

from tvmconv import naive_cost, registry
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.experiments.preparation import select_schedules
from tvmconv.workloads import parse

LARGE = parse("conv3d:1x192x9x240x416,192x192x3x3x3,s1,p1,f16,nhwc")
SMALL = parse("conv2d:1x64x56x56,64x64x3x3,s1,p1")


@pytest.fixture
def h100():
    return CudaDevice("cuda:0", "an H100", "sm_90", 80 << 30, 132, 1024, 49152, 66.9e12, 3.35e12, 50 << 20, 0)


def test_the_naive_time_is_estimated_from_the_flop(h100):
    assert 4 < naive_cost.estimate_seconds(LARGE, h100) < 9
    assert naive_cost.estimate_seconds(SMALL, h100) == pytest.approx(1e-3, rel=0.5)
    assert naive_cost.estimate_seconds(LARGE, replace(h100, peak_flops=None)) == LARGE.flops / naive_cost.FALLBACK_FLOPS


@pytest.mark.parametrize(
    ("workload", "names", "expected"),
    [
        (SMALL, ["direct"], ["default", "direct"]),
        (LARGE, ["hopper"], ["hopper"]),
        (LARGE, ["hopper", "default"], ["default", "hopper"]),
        (LARGE, ["default"], ["default"]),
    ],
)
def test_a_naive_schedule_of_seconds_runs_only_by_name(h100, workload, names, expected):
    assert [schedule.name for schedule in select_schedules(workload, names, h100)] == expected


def test_what_is_left_out_is_told_with_its_seconds(h100):
    reference = registry.get_baseline_schedule(LARGE)
    assert naive_cost.describe_omission(reference, [LARGE], h100) == "default left out: about 5 s a launch"
    several = naive_cost.describe_omission(reference, [LARGE, LARGE], h100)
    assert several == "default left out for 2 workloads: up to about 5 s a launch"
