"""Predictions beside the best schedule without tuning, on layers that the model was not taught."""

import math

import pytest
from stopwatch import Stopwatch

import tvmconv as tc
from tvmconv import workloads
from tvmconv.benchmarks import prediction_safety
from tvmconv.cost_model.model import cost_model_for

SMALL = "conv2d:1x8x14x14,16x8x1x1,s1,p0"


def test_the_layers_are_sixty_that_the_model_was_not_taught():
    layers = [layer.workload for layer in workloads.suite(str(prediction_safety.LAYERS))]
    assert len(set(layers)) == len(layers) >= 60
    assert cost_model_for("sm_90").count_training_layers(layers) == 0


@pytest.fixture(scope="module")
def built():
    return prediction_safety.build(SMALL, "sm_90")


@pytest.mark.sample(1)
@pytest.mark.parametrize("factor", [2, 0.5])
def test_what_is_built_is_no_slower_than_the_best_default(built, factor):
    device = Stopwatch(factor, tc.parse(SMALL).reference)
    outcome = prediction_safety.measure(SMALL, built, device)
    assert not outcome.failure
    assert ("predicted" in outcome.chosen) == (factor > 1)
    assert outcome.ratio == pytest.approx(0.5 if factor > 1 else 1.0)


def test_a_wrong_result_is_a_failure(built):
    device = Stopwatch(2, lambda *inputs: 0 * tc.parse(SMALL).reference(*inputs))
    outcome = prediction_safety.measure(SMALL, built, device)
    assert "computes a wrong result" in outcome.failure
    assert math.isnan(outcome.ratio)


def test_without_a_model_of_the_device_one_line_says_so(bench, capsys):
    assert bench(["--device", "opencl:0"]) == 2
    assert "there is no cost model for opencl:0" in capsys.readouterr().err
