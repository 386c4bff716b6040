"""Inputs and references that are there before they are asked for."""

import threading

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import WorkloadError
from tvmconv.measure.reference_data import ProblemPrefetcher

SMALL, OTHER = tc.parse("conv2d:1x4x6x6,8x4x3x3,p1"), tc.parse("conv2d:1x4x5x5,8x4x3x3,p1")


def test_what_was_announced_is_computed_and_for_one_alone():
    problems = ProblemPrefetcher()
    problems.prefetch(SMALL)
    problems.prefetch(SMALL)
    first, second = problems.get(SMALL), problems.get(SMALL)
    assert "reference" in vars(first)
    assert "reference" not in vars(second)
    assert first.seed != second.seed
    np.testing.assert_array_equal(first.reference, SMALL.reference(*SMALL.inputs(first.seed)))


def test_a_sample_is_prepared_where_it_is_asked_for():
    large = tc.parse("conv2d:1x4x64x64,8x4x3x3,p1")
    problems = ProblemPrefetcher()
    problems.prefetch(large, "sample")
    full, sampled = problems.get(large, "full"), problems.get(large, "sample")
    assert "expected_output" in vars(sampled)
    assert (full.is_sampled, sampled.is_sampled) == (False, True)
    assert "reference" not in vars(sampled)


def test_what_cannot_be_prepared_is_told_to_whoever_asks(monkeypatch):
    problems = ProblemPrefetcher()
    monkeypatch.setattr("os.sysconf", lambda name: 1)  # a machine of one byte
    problems.prefetch(SMALL)
    with pytest.raises(WorkloadError, match="this machine has"):
        problems.get(SMALL)


def test_a_problem_is_not_waited_for_while_another_is_computed(monkeypatch):
    release = threading.Event()

    class Slow(tc.Problem):
        @property
        def expected_output(self):
            release.wait(30.0)

    monkeypatch.setattr("tvmconv.measure.reference_data.Problem", Slow)
    problems = ProblemPrefetcher()
    problems.prefetch(SMALL)
    problems.prefetch(OTHER)
    assert problems.get(OTHER).workload == OTHER
    assert not release.is_set()
    release.set()
