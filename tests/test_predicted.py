"""Predicted kernels are checked: by the analysis of their code, and on a device by a short timing."""

from stopwatch import Stopwatch

import tvmconv as tc
from tvmconv import library
from tvmconv.devices import Timing, find
from tvmconv.experiments.results import Row
from tvmconv.experiments.run import PREDICTED, UNTUNED, Prepared, with_untuned
from tvmconv.kernel import build_on
from tvmconv.knowledge.choose import promising
from tvmconv.knowledge.model import known_for
from tvmconv.predicted import is_plausible
from tvmconv.untuned import analysed_seconds, untuned_schedules

REPLKNET = tc.parse("conv2d:1x32x28x28,32x1x31x31,s1,p15,g32")  # a layer of RepLKNet-31B with fewer channels
ORDINARY = tc.parse("conv2d:1x256x14x14,64x256x1x1,s1,p0")  # much like layers that the model was taught
SMALL = tc.parse("conv2d:1x8x14x14,16x8x1x1,s1,p0")


def test_a_config_that_spills_its_window_is_implausible():
    """Its threads keep windows of 34 x 31 inputs, which no registers hold: measured were 1,068 µs of some 15."""
    known, place = known_for("sm_90"), find("sm_90")
    first = promising(REPLKNET, place)[0]
    kernel = build_on(REPLKNET, library.find(REPLKNET, first.schedule), place, first.config)
    assert first.config["stage"] == "registers"
    assert not is_plausible(kernel, first, known.machine)


def test_far_from_what_was_taught_the_analysis_decides():
    kernel = tc.build(REPLKNET, arch="sm_90")
    assert kernel.config.get("stage") != "registers"
    assert analysed_seconds(kernel, known_for("sm_90").machine) < 20e-6


def test_on_a_device_a_prediction_is_timed_beside_the_defaults():
    """The prediction is loaded first: it is built where it is the fastest, and else what is."""
    predicted, untuned = (tc.build(SMALL, device=Stopwatch(factor)) for factor in (2, 0.5))
    assert predicted.prediction
    assert untuned.prediction is None
    schedules = [schedule.name for schedule in untuned_schedules(SMALL, untuned.device)]
    assert untuned.device.count == 1 + len(schedules)
    assert untuned.schedule.name == schedules[-1]
    assert untuned.config == untuned.schedule.space(SMALL, untuned.device.limits).default


def test_without_a_check_nothing_is_timed():
    device = Stopwatch(0.5)
    assert tc.build(ORDINARY, device=device, check=False).prediction
    assert device.count == 0


def row(name, microseconds, **more):
    return Row(name, verified=True, timing=Timing((microseconds * 1e-6,), "made up", False), **more)


def test_the_untuned_row_is_the_fastest_default():
    rows = [row("default", 90), row("direct", 49.5), row("conflict_free", 22.7), row(PREDICTED, 9, schedule="winograd")]
    of_defaults = with_untuned(rows, frozenset({"default", "direct", "conflict_free"}))
    assert [each.name for each in of_defaults] == [*(each.name for each in rows), UNTUNED]
    assert (of_defaults[-1].schedule, of_defaults[-1].timing) == ("conflict_free", rows[2].timing)
    changed = with_untuned([*rows, row(UNTUNED, 40, schedule="implicit_gemm")], frozenset({"default"}))
    assert (changed[-1].name, changed[-1].schedule) == (UNTUNED, "implicit_gemm")
    assert [each.name for each in changed].count(UNTUNED) == 1


def test_the_untuned_row_needs_a_default_of_its_own():
    place = find("sm_90")
    assert Prepared(SMALL, device=place, predicted=True).chosen_by_others == [PREDICTED]
    assert Prepared(SMALL, ["default"], device=place, predicted=True).chosen_by_others == [PREDICTED, UNTUNED]
