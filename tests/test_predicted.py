"""Predicted kernels are checked: by the analysis of their code, and on a device by a short timing."""

import pytest
from stopwatch import Stopwatch

import tvmconv as tc
from tvmconv import registry
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import Timing, find_device
from tvmconv.experiments.preparation import PreparedExperiment
from tvmconv.experiments.results import PREDICTED, UNTUNED, ResultRow
from tvmconv.experiments.run import add_untuned_row
from tvmconv.kernel import build_for_device
from tvmconv.predicted_kernel import (
    build_fastest_default,
    default_candidate_schedules,
    estimate_kernel_seconds,
    is_plausible,
)

REPLKNET = tc.parse("conv2d:1x32x28x28,32x1x31x31,s1,p15,g32")  # a layer of RepLKNet-31B with fewer channels
ORDINARY = tc.parse("conv2d:1x256x14x14,64x256x1x1,s1,p0")  # much like layers that the model was taught
SMALL = tc.parse("conv2d:1x8x14x14,16x8x1x1,s1,p0")


def test_a_config_that_spills_its_window_is_implausible():
    """Its threads keep windows of 34 x 31 inputs, which no registers hold: measured were 1,068 µs of some 15."""
    known, place = cost_model_for("sm_90"), find_device("sm_90")
    first = recommend_configs(REPLKNET, place)[0]
    kernel = build_for_device(REPLKNET, registry.find_schedule(REPLKNET, first.schedule), place, first.config)
    assert first.config["operand_scope"] == "registers"
    assert not is_plausible(kernel, first, known.device_spec)


@pytest.mark.slow
def test_far_from_what_was_taught_the_analysis_decides():
    kernel = tc.build(REPLKNET, arch="sm_90")
    assert kernel.config.get("operand_scope") != "registers"
    assert estimate_kernel_seconds(kernel, cost_model_for("sm_90").device_spec) < 20e-6


def test_built_kernel_with_default_config_is_not_built_again(monkeypatch):
    place, built_again = find_device("sm_90"), []
    schedule = registry.schedules_to_tune(ORDINARY, place.kind, place.arch)[0]
    default = build_for_device(ORDINARY, schedule, place, None)
    other = build_for_device(ORDINARY, schedule, place, {"auto_unroll_max_step": 1500})

    def build(workload, device, schedules):
        built_again.extend(each.name for each in schedules)
        return []

    monkeypatch.setattr("tvmconv.predicted_kernel.build_default_kernels", build)
    assert build_fastest_default(ORDINARY, place, default) is default
    assert schedule.name not in built_again
    build_fastest_default(ORDINARY, place, other)
    assert schedule.name in built_again


def test_on_a_device_a_prediction_is_timed_beside_the_defaults():
    """The prediction is loaded first: it is built where it is the fastest, and else what is."""
    predicted, untuned = (tc.build(SMALL, device=Stopwatch(factor)) for factor in (2, 0.5))
    assert predicted.prediction
    assert untuned.prediction is None
    schedules = [schedule.name for schedule in default_candidate_schedules(SMALL, untuned.device)]
    assert untuned.device.count == 1 + len(schedules)
    assert untuned.schedule.name == schedules[-1]
    assert untuned.config == untuned.schedule.space(SMALL, untuned.device.limits).default


def test_without_a_check_nothing_is_timed():
    device = Stopwatch(0.5)
    assert tc.build(ORDINARY, device=device, check=False).prediction
    assert device.count == 0


def row(name, microseconds, **more):
    return ResultRow(name, verified=True, timing=Timing((microseconds * 1e-6,), "made up", False), **more)


def test_the_untuned_row_is_the_fastest_default():
    rows = [row("default", 90), row("direct", 49.5), row("conflict_free", 22.7), row(PREDICTED, 9, schedule="winograd")]
    of_defaults = add_untuned_row(rows, frozenset({"default", "direct", "conflict_free"}))
    assert [each.name for each in of_defaults] == [*(each.name for each in rows), UNTUNED]
    assert (of_defaults[-1].schedule, of_defaults[-1].timing) == ("conflict_free", rows[2].timing)
    changed = add_untuned_row([*rows, row(UNTUNED, 40, schedule="implicit_gemm")], frozenset({"default"}))
    assert (changed[-1].name, changed[-1].schedule) == (UNTUNED, "implicit_gemm")
    assert [each.name for each in changed].count(UNTUNED) == 1


def test_the_untuned_row_needs_a_default_of_its_own():
    place = find_device("sm_90")
    assert PreparedExperiment(SMALL, device=place, predicted=True).automatic_rows == [PREDICTED]
    assert PreparedExperiment(SMALL, ["default"], device=place, predicted=True).automatic_rows == [PREDICTED, UNTUNED]


@pytest.mark.parametrize(
    # As measured on an H200: 41.0 and 50.1 µs, 20.7 and 26.9 µs; filters of one tap have no windows.
    ("text", "fastest"),
    [
        ("conv2d:32x32x160x160,32x32x3x3,s1,p1,f16,nhwc", "window_hopper"),
        ("conv2d:64x24x56x56,144x24x1x1,s1,p0,f16,nhwc", "pointwise_mma_sync"),
        ("conv2d:32x64x56x56,256x64x1x1,s1,p0,f16,nhwc", "hopper"),
    ],
)
def test_a_schedule_without_a_model_is_predicted_by_its_estimate(text, fastest):
    first, *others = recommend_configs(tc.parse(text), find_device("sm_90"))
    assert first.schedule == fastest
    assert "hopper" in [each.schedule for each in [first, *others]]
