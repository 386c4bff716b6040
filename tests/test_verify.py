"""What is verified on inputs that tell something of the kernel, however few outputs there are."""

import secrets

import numpy as np
import pytest
from scipy.special import erf

import tvmconv as tc

FEW = "conv2d:1x3x5x5,4x3x5x5,s1,p0,bf16,nhwc"  # four outputs
ALL_NEGATIVE = 75  # a seed that draws four negative sums


def stored(w, inputs):
    """What a right kernel stores: an epilogue in float32 of sums in float32."""
    y = tc.parse(FEW).reference(*inputs).astype(np.float32)
    half = np.float32(0.5)
    return np.maximum(y, 0) if w.epilogue == ("relu",) else y * half * (1 + erf(y * np.sqrt(half)))


@pytest.fixture
def unlucky(monkeypatch):
    """The first draw is one that tells nothing."""
    draws = iter([ALL_NEGATIVE, *range(1000, 2000)])
    monkeypatch.setattr(secrets, "randbits", lambda bits: next(draws))


def test_inputs_whose_outputs_are_all_zero_prove_nothing():
    gelu, relu = (tc.Problem(tc.parse(f"{FEW},{name}"), ALL_NEGATIVE) for name in ("gelu", "relu"))
    assert not gelu.check(stored(gelu.workload, gelu.inputs)).ok
    assert relu.check(np.zeros(relu.workload.output_shape)).ok


@pytest.mark.usefixtures("unlucky")
@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_other_inputs_are_drawn_then(name):
    problem = tc.Problem(tc.parse(f"{FEW},{name}"))
    assert problem.check(stored(problem.workload, problem.inputs)).ok
    assert not problem.check(np.zeros(problem.workload.output_shape)).ok


@pytest.mark.usefixtures("unlucky")
def test_given_seeds_and_seeds_of_many_outputs_are_kept():
    assert tc.Problem(tc.parse(FEW), 5).seed == 5
    assert tc.Problem(tc.parse("conv2d:1x8x8x8,8x8x1x1,s1,p0")).seed == ALL_NEGATIVE
