"""What logs say is to be built for a workload, the best first."""

import pytest

import tvmconv as tc
from tvmconv.devices import Arch
from tvmconv.logs.candidates import iterate_candidates
from tvmconv.logs.record import Record

BARE = tc.parse("conv2d:1x4x8x8,8x4x3x3,p1")
W = tc.parse(f"{BARE},bias,relu")
H200, ARCH = "NVIDIA H200", Arch("sm_90")


@pytest.fixture
def write(log):
    def write_log(*records):
        for record in records:
            tc.Log(log).append(record)
        return log

    return write_log


def record(seconds, workload=W, schedule="tiling", tile_c=(-1, 1, 2)):
    return Record(workload, schedule, {"tile_c": tile_c}, H200, "cuda -arch=sm_90", times=(seconds,))


def found(log, workload=W):
    return [
        (each.schedule.name, each.config.get("tile_c"), each.config_source)
        for each in iterate_candidates(log, workload, ARCH)
    ]


def test_records_of_the_epilogue_come_before_bare_ones(write):
    log = write(record(1e-6, BARE, tile_c=(-1, 1, 4)), record(3e-6), record(2e-6, tile_c=(-1, 2, 2)))
    assert found(log)[:3] == [
        ("tiling", (-1, 2, 2), f"tuned on {H200}"),
        ("tiling", (-1, 1, 2), f"tuned on {H200}"),
        ("tiling", (-1, 1, 4), f"tuned without the epilogue on {H200}"),
    ]


def test_records_of_another_epilogue_serve_nobody(write):
    assert not [origin for _, _, origin in found(write(record(1e-6)), BARE) if origin.startswith("tuned")]


def test_a_default_follows_the_first_prediction(write):
    """Records of schedules that the package no longer has are left out."""
    log = write(record(1e-6, schedule="forgotten"))
    first, default, *others = iterate_candidates(log, W, ARCH)
    assert first.config_source == "predicted"
    assert default.config_source == "default"
    assert default.config == default.schedule.space(W, ARCH.limits).default
    assert {each.config_source for each in others} == {"predicted"}
    (only,) = iterate_candidates(log, W, Arch("sm_80"))  # of which nothing was learnt
    assert only.config_source == "default"


def test_a_gradient_has_the_configs_with_which_a_search_starts():
    wgrad = tc.parse("conv2d_wgrad:8x512x7x7,512x512x3x3,s1,p1,f16,nhwc")
    default, *others = iterate_candidates([], wgrad, ARCH)
    assert default.config_source == "default"
    assert {each.config_source for each in others} == {"estimated"}
    assert any(each.config != default.config for each in others)
