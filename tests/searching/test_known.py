"""What other workloads in logs found fast: that of the nearest first, and of nothing that is too unlike."""

import dataclasses
import math

import pytest

import tvmconv as tc
from tvmconv.cost_model.similarity import workload_distance
from tvmconv.logs.log import Log
from tvmconv.logs.packaged import packaged_logs
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.search.setup import find_nearest_workload_configs

W = "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc"
ALIKE = {
    "another size": "conv2d:1x64x28x28,64x64x3x3,s1,p1,f16,nhwc",
    "another batch": "conv2d:8x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "more channels": "conv2d:1x256x56x56,256x256x3x3,s1,p1,f16,nhwc",
    "another filter": "conv2d:1x64x56x56,64x64x5x5,s1,p2,f16,nhwc",
    "a stride": "conv2d:1x64x56x56,64x64x3x3,s2,p1,f16,nhwc",
    "an epilogue": "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc,bias,relu",
    "the other type of 16 bits": "conv2d:1x64x56x56,64x64x3x3,s1,p1,bf16,nhwc",
}
UNLIKE = {
    "another type": "conv2d:1x64x56x56,64x64x3x3,s1,p1,nhwc",
    "another layout": "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16",
    "groups": "conv2d:1x64x56x56,64x32x3x3,s1,p1,g2,f16,nhwc",
    "another operator": "conv1d:1x64x3136,64x64x9,s1,p4,f16,nhwc",
    "no convolution": "filter2d:56x56x1,3x3",
}


def record(text, seconds=1e-5, schedule="hopper", number=0, **fields):
    config = {"number": number}
    return Record(tc.parse(text), schedule, config, "a GPU", "cuda -arch=sm_90", times=(seconds,), **fields)


@pytest.fixture
def found(log):
    """The numbers of the configs that a log gives for a workload."""

    def numbers(*records, workload=W, schedules=("hopper",), kind="cuda", count=4):
        for each in records:
            Log(log).append(each)
        proposed = find_nearest_workload_configs([log], tc.parse(workload), schedules, kind, count)
        return [(name, config["number"]) for name, config in proposed]

    return numbers


@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE)
def test_what_is_alike_counts(found, text):
    assert found(record(text)) == [("hopper", 0)]
    assert math.isfinite(workload_distance(tc.parse(W), tc.parse(text)))


@pytest.mark.parametrize("text", UNLIKE.values(), ids=UNLIKE)
def test_what_is_unlike_never_does(found, text):
    assert found(record(text)) == []
    assert workload_distance(tc.parse(W), tc.parse(text)) == math.inf


def test_other_kinds_of_devices_never_count(found):
    elsewhere = dataclasses.replace(record(ALIKE["another size"]), target="opencl")
    assert found(elsewhere) == []
    assert found(kind="opencl") == [("hopper", 0)]
    assert found(dataclasses.replace(elsewhere, target="", device="?")) == []


def test_nearest_comes_first_and_of_it_the_fastest_config_alone(found):
    far, near = "conv2d:1x16x7x7,16x16x3x3,s1,p1,f16,nhwc", ALIKE["another size"]
    records = record(far, 1e-7, number=1), record(near, 3e-5, number=2), record(near, 2e-5, number=3)
    assert found(*records) == [("hopper", 3), ("hopper", 1)]


def test_nearest_of_all_schedules_come_before_all_second(found):
    near, far = ALIKE["another size"], "conv2d:1x16x7x7,16x16x3x3,s1,p1,f16,nhwc"
    records = [record(text, schedule=name) for text in (far, near) for name in ("hopper", "mma_sync")]
    numbered = [dataclasses.replace(each, config={"number": number}) for number, each in enumerate(records)]
    assert found(*numbered, schedules=("mma_sync", "hopper")) == [
        ("mma_sync", 3), ("hopper", 2), ("mma_sync", 1), ("hopper", 0)
    ]  # fmt: skip


def test_what_failed_or_was_wrong_does_not_count(found):
    near = ALIKE["another size"]
    failed = dataclasses.replace(record(near), times=(), error=ErrorKind.RUNTIME)
    wrong = dataclasses.replace(record(near, number=1), times=(), error=ErrorKind.WRONG_ANSWER)
    assert found(failed, wrong, record(near, number=1)) == []


def test_the_last_timings_count_as_for_a_build(found):
    near = ALIKE["another size"]
    trials = record(near, 1e-6, number=1), record(near, 2e-6, number=2)
    assert found(*trials, record(near, 5e-6, number=2, final=True), record(near, 6e-6, number=1, final=True)) == [
        ("hopper", 2)
    ]


def test_distance_is_symmetric_and_ignores_the_epilogue():
    for text in ALIKE.values():
        assert workload_distance(tc.parse(W), tc.parse(text)) == pytest.approx(
            workload_distance(tc.parse(text), tc.parse(W))
        )
    assert workload_distance(tc.parse(W), tc.parse(ALIKE["an epilogue"])) == 0
    assert workload_distance(tc.parse(W), tc.parse(ALIKE["another size"])) > 0


def test_the_shipped_logs_know_a_layer_like_those_of_resnet():
    w = tc.parse("conv2d:1x96x56x56,96x96x3x3,s1,p1,f16,nhwc")
    assert {
        name for name, _ in find_nearest_workload_configs(packaged_logs(), w, ["hopper", "mma_sync"], "cuda", 2)
    } & {"hopper", "mma_sync"}
