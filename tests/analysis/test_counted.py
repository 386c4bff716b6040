"""Counts of whole launches, beside those that Nsight Compute took on an H200 (tuning_logs/nvidia-h200)."""

import json
import math
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.memory.coalescing import global_accesses
from tvmconv.analysis.nsight.counted import counted, sampled

COUNTERS = sorted((Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200").glob("filter*-counters.json"))
MEASURED = [row for file in COUNTERS for row in json.loads(file.read_text())["kernels"]]
QUICK = [row for row in MEASURED if row["schedule"] != "register"]  # whose text is long


@pytest.mark.parametrize("row", QUICK, ids=[f"{row['workload'].partition(':')[0]}-{row['schedule']}" for row in QUICK])
def test_sectors_and_requests_are_those_that_a_gpu_counted(row):
    kernel = tc.build(tc.parse(row["workload"]), row["schedule"], arch="sm_90")
    for name, count in counted(kernel, kernel.steps[0]).counts.items():
        if name.startswith("global"):
            assert count == pytest.approx(row["metrics"][name], rel=0.01), name


def test_the_blocks_of_a_small_grid_are_all_counted():
    assert sorted(sampled((2, 3, 2), 64)) == [(x, y, z) for x in range(2) for y in range(3) for z in range(2)]


@pytest.mark.parametrize("grid", [(1000, 1, 1), (7, 99, 3), (1, 56, 64)])
def test_the_blocks_of_a_large_grid_are_spread_over_it(grid):
    found = sampled(grid, 64)
    assert len(found) == 64
    for axis, extent in enumerate(grid):
        places = [block[axis] for block in found]
        assert sum(places) / len(places) == pytest.approx((extent - 1) / 2, abs=0.12 * extent)


def test_blocks_at_the_border_do_less_than_the_one_in_the_middle():
    kernel = tc.build(tc.parse("conv2d:1x4x30x30,8x4x3x3,s1,p1"), "tiling", arch="sm_90")
    (step,) = kernel.steps
    middle = sum(access.sectors for access in global_accesses(kernel, step) if access.kind == "load")
    assert counted(kernel, step).counts["global_load_sectors"] < middle * math.prod(step.launch.grid)
