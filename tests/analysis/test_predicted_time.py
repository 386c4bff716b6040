"""Predicted times beside measured ones: on what scripts/bound_agreement.py counted of kernels that were measured."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.kernel_work import KernelWork, count_kernel_work
from tvmconv.analysis.memory.footprint import count_dram_bytes
from tvmconv.analysis.predicted_time import estimate_schedule_seconds, predict_kernel_time, predict_time
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.target import LAUNCH_SECONDS, Target

H200 = Path(__file__).parents[2] / "tuning_logs/nvidia-h200"
RECORDED = {file.stem.removeprefix("bounds-"): json.loads(file.read_text()) for file in H200.glob("bounds-*.json")}
LAYERS = sorted((name, text) for name, found in RECORDED.items() for text in found["points"])
FITTED = [("direct", text) for text in RECORDED["direct"]["points"] if text not in RECORDED["direct"]["held_out"]]
MACHINE = Target(**RECORDED["direct"]["machine"])
WORK = KernelWork(264, 2, 1000, 4000, 3000, 100, 0, 500, 0, 100, 200, 200, 0)


def beside(name, text):
    own = RECORDED[name]["points"][text]
    predicted = [predict_time([KernelWork(**step) for step in each["steps"]], MACHINE).seconds for each in own]
    return np.array([each["measured"] for each in own]), np.array(predicted)


# Drafts that a search thought best: a layer's differ by less than the prediction is wrong by.
DRAFTS = [(name, text) for name, text in LAYERS if name == "mma_sync"]


@pytest.mark.parametrize(("name", "text"), [layer for layer in LAYERS if layer not in DRAFTS])
def test_the_order_of_a_layers_configs_is_told_by_their_code(name, text):
    from scipy.stats import spearmanr  # half a second, which whoever collects tests does without

    measured, predicted = beside(name, text)
    assert spearmanr(measured, predicted).statistic >= 0.8


@pytest.mark.parametrize(("name", "text"), FITTED + DRAFTS)
def test_the_tenth_predicted_fastest_has_a_kernel_near_the_best(name, text):
    measured, predicted = beside(name, text)
    first = np.argsort(predicted)[: round(len(predicted) / 10)]
    assert measured[first].min() <= 1.1 * measured.min()


@pytest.mark.parametrize(("name", "text"), LAYERS)
def test_no_kernel_took_less_than_its_least_time(name, text):
    assert all(each["least"] < each["measured"] for each in RECORDED[name]["points"][text])


def test_more_work_takes_longer_and_more_room_does_not():
    before = predict_time([WORK], MACHINE).seconds
    for name in ("alone", "issued", "floats", "integers", "matrices", "wavefronts", "spilled", "l2_sectors"):
        assert predict_time([replace(WORK, **{name: getattr(WORK, name) * 2 + 100})], MACHINE).seconds > before
    assert predict_time([replace(WORK, resident=1)], MACHINE).seconds > before
    assert predict_time([replace(WORK, blocks=265)], MACHINE).seconds > before  # one multiprocessor has a third


def test_a_kernel_that_is_built_has_a_time_with_its_parts():
    kernel = tc.build(tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1"), "conflict_free", arch="sm_90")
    time = predict_kernel_time(kernel, MACHINE)
    assert 5e-6 < time.seconds < 5e-4
    assert {"issue", "latency", "L2"} <= {part.name for part in time.components}


@pytest.mark.parametrize(
    ("text", "schedule"),
    [("filter1d:67108864,k5", "register"), ("filter2d:8192x8192x1,5x5", "basic"), ("filter1d:67108864,k5", "caching")],
)
def test_bytes_from_memory_are_those_that_ncu_counted(text, schedule):
    """Where the arrays exceed L2; the counters are those of scripts/counters.py on an H200."""
    file = H200 / f"{text.partition(':')[0]}-counters.json"
    counted = {each["schedule"]: each["metrics"] for each in json.loads(file.read_text())["kernels"]}[schedule]
    kernel = tc.build(tc.parse(text), schedule, arch="sm_90")
    assert count_dram_bytes(kernel) == pytest.approx(counted["dram_read_bytes"] + counted["dram_write_bytes"], rel=0.1)


def test_what_fits_l2_comes_from_memory_once():
    workload = tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1")
    kernel = tc.build(workload, "conflict_free", arch="sm_90")
    assert count_dram_bytes(kernel) == pytest.approx(workload.min_bytes, rel=0.01)


def test_what_prepares_a_weight_once_is_in_no_time():
    kernel = tc.build(tc.parse("conv2d:1x32x12x12,32x32x3x3,s1,p1"), "winograd", arch="sm_90")
    assert len(kernel.kernels) == 4
    assert len(count_kernel_work(kernel)) == 3
    assert {bound.unit: bound.amount for bound in compute_unit_times(kernel, MACHINE)}["launch"] == "3"
    assert predict_kernel_time(kernel, MACHINE).launch_seconds == pytest.approx(3 * LAUNCH_SECONDS)


def test_an_estimate_that_is_no_time_is_told_as_none():
    w = tc.parse("conv2d:1x96x112x112,96x1x3x3,s2,p1,g96,f16,nhwc")
    kernel = tc.build(w, "depthwise_nhwc", arch="sm_90")
    assert kernel.schedule.space(w, kernel.device.limits).usage_from_columns is not None
    assert estimate_schedule_seconds(kernel) is None
    assert estimate_schedule_seconds(tc.build(w, "default", arch="sm_90")) is None
