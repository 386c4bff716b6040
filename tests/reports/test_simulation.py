import numpy as np
import pytest

from tvmconv.reports.simulation import MOST_PANELS, Comparison, means, panels
from tvmconv.searching.replay import Recorded, Recording
from tvmconv.searching.simulate import Run, Summary

SPACE = Recording([Recorded({"knob": knob}, 1e-3 * knob) for knob in (1, 2)])


def comparison(name, *shares):
    """One tuner's searches: its shares after two trials, for each seed."""
    return Comparison(name, SPACE, [Summary("xgb", [Run(np.array(each), 1.0) for each in shares])])


def test_the_mean_of_spaces_is_taken_seed_by_seed():
    (mean,) = means([comparison("a", (0.2, 0.4), (0.6, 0.8)), comparison("b", (0.4, 0.6), (0.8, 1.0))])
    assert mean.after(1) == pytest.approx([0.3, 0.7])
    assert mean.after(2) == pytest.approx([0.5, 0.9])


def test_a_chart_shows_the_mean_and_the_quartiles_of_each_space():
    shown = panels([comparison("a", (0, 0.2), (0.5, 0.6), (1, 1)), comparison("b", (1, 1))])
    (curve,) = shown["a"]
    assert curve.mean == pytest.approx([0.5, 0.6])
    assert curve.quartiles[:, 0] == pytest.approx([0.25, 0.75])
    assert list(shown) == ["a", "b"]


def test_a_chart_of_many_spaces_shows_their_mean():
    many = [comparison(str(place), (0.5, 1)) for place in range(MOST_PANELS + 1)]
    assert list(panels(many)) == [f"mean of {len(many)} spaces"]
