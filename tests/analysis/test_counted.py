"""Counts of whole launches, beside those that Nsight Compute took on an H200 (tuning_logs/nvidia-h200)."""

import json
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.nsight.predicted_counters import predict_counters

COUNTERS = sorted((Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200").glob("filter*-counters.json"))
MEASURED = [row for file in COUNTERS for row in json.loads(file.read_text())["kernels"]]
ROWS = [row for row in MEASURED if row["schedule"] != "register"]  # whose text is long
QUICK = ("halo_blocks", "halo_strided", "shuffle")


def name(row):
    return f"{row['workload'].partition(':')[0]}-{row['schedule']}"


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=name(row), marks=[] if row["schedule"] in QUICK else pytest.mark.slow) for row in ROWS],
)
def test_sectors_and_requests_are_those_that_a_gpu_counted(row):
    kernel = tc.build(tc.parse(row["workload"]), row["schedule"], arch="sm_90")
    for name, count in predict_counters(kernel, kernel.kernels[0]).counts.items():
        if name.startswith("global"):
            assert count == pytest.approx(row["metrics"][name], rel=0.01), name
