"""Tests of predictions in builder processes."""

from __future__ import annotations

import os

import tvmconv
from tvmconv import devices
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.deadline import Deadline
from tvmconv.measure.builder import BUILD_MEMORY_BYTES, BuilderCall, BuilderSetup, call_all
from tvmconv.measure.predictions import recommend_for_all

TEXTS = [f"conv2d:1x{channels}x8x8,{channels}x{channels}x1x1,f16,nhwc" for channels in (64, 128, 192, 256)]


def test_processes_predict_what_one_process_predicts() -> None:
    workloads = [tvmconv.parse(text) for text in TEXTS]
    device = devices.find_device("sm_90")
    expected = {workload: recommend_configs(workload, device) for workload in workloads}
    assert recommend_for_all(workloads, device, num_workers=2) == expected


def test_predictions_of_no_workloads() -> None:
    assert recommend_for_all([], devices.find_device("sm_90")) == {}


def test_workloads_without_time_are_left_out() -> None:
    workloads = [tvmconv.parse(text) for text in TEXTS]
    for num_workers in (1, 2):
        passed = Deadline.after(0)
        assert recommend_for_all(workloads, devices.find_device("sm_90"), num_workers, passed) == {}


def test_call_that_ends_its_process_has_an_error() -> None:
    setup = BuilderSetup(tvmconv.parse(TEXTS[0]), {}, devices.find_device("sm_90"), BUILD_MEMORY_BYTES)
    ended, value = call_all(setup, [BuilderCall(os._exit, (3,)), BuilderCall(len, ("abc",))], 2)
    assert value.value == 3
    assert "builder process" in ended.error
