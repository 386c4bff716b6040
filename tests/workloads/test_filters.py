"""Filters are what scipy computes and the textbook's examples say, and refuse what makes no filter."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from strategies import filters
from worked_examples import WORKED

import tvmconv as tc
from tvmconv.workloads import Filter2d, parse


def by_scipy(workload, x, k):
    """The filter as scipy computes it, in float64."""
    mask = k if x.ndim == k.ndim else k[..., np.newaxis]
    y = ndimage.correlate(x.astype(np.float64), mask.astype(np.float64), mode="constant")
    return np.clip(y, 0, 1) if workload.clamp else y


@given(filters())
@settings(max_examples=50)
def test_reference_equals_scipy(workload):
    x, k = workload.inputs(seed=0)
    np.testing.assert_allclose(workload.reference(x, k), by_scipy(workload, x, k), rtol=1e-12, atol=1e-12)


@given(filters(), st.integers(1, 40))
@settings(max_examples=50)
def test_reference_in_pieces_equals_the_whole(workload, piece):
    x, k = workload.inputs(seed=0)
    whole = workload.reference(x, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmconv.workloads.filters.PIECE_ELEMENTS", piece)
        np.testing.assert_array_equal(workload.reference(x, k), whole)


def test_a_mask_may_be_a_thousand_times_the_image():
    workload = Filter2d(1, 2, 1, 3001, 3001)
    x, k = workload.inputs(seed=0)
    x, k = x.astype(np.float64), k.astype(np.float64)
    ahead = x[0, 0, 0] * k[1500, 1500] + x[0, 1, 0] * k[1500, 1501]
    behind = x[0, 0, 0] * k[1500, 1499] + x[0, 1, 0] * k[1500, 1500]
    np.testing.assert_allclose(workload.reference(x, k).ravel(), [ahead, behind])


@pytest.mark.parametrize(("workload", "inputs", "known"), WORKED)
def test_worked_examples(workload, inputs, known):
    y = workload.reference(*inputs)
    assert {place: y[place] for place in known} == known


@pytest.mark.parametrize(
    ("text", "flops", "floats"),
    [
        ("filter1d:100,k5", 2 * 100 * 5, 2 * 100 + 5),
        ("filter1d:100,k5,clamp", 2 * 100 * 5, 2 * 100 + 5),
        ("filter1d:3,k31", 2 * 3 * 31, 2 * 3 + 5),  # two samples to each side of any, so that five taps meet one
        ("filter2d:10x20x3,3x5", 2 * 600 * 15, 2 * 600 + 15),
        ("filter2d:2x20x1,9x5", 2 * 40 * 45, 2 * 40 + 3 * 5),
    ],
)
def test_flops_and_least_bytes_by_hand(text, flops, floats):
    workload = parse(text)
    assert (workload.flops, workload.min_bytes) == (flops, 4 * floats)
    assert workload.arithmetic_intensity == flops / (4 * floats)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 3.0), "k=3.0: expected 1 integer"),
        ((True, 3), "n=True: expected 1 integer"),
        (("8", 3), "n='8': expected 1 integer"),
        (((8, 8), 3), "n=(8, 8): expected 1 integer"),
        ((-8, 3), "n=-8: expected at least 1"),
        ((8, 10**5000 + 1), "k is out of range: expected at most 2147483647"),
        ((8, 2), "mask '2': expected odd sizes, so that the mask has a center"),
        ((8, 3, "clamp"), "clamp='clamp': expected True or False"),
        ((8, 3, 1), "clamp=1: expected True or False"),
    ],
)
def test_bad_filter_is_refused_with_what_is_accepted(arguments, expected):
    with pytest.raises(tc.WorkloadError) as error:
        tc.Filter1d(*arguments)
    assert expected in str(error.value)
