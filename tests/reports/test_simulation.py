import numpy as np
import pytest

from tvmconv.reports.simulation import MAX_PANELS, TunerComparison, compute_mean_summaries, compute_panels
from tvmconv.search.recorded_space import RecordedSpaceRunner, RecordedTrial, SimulatedSearch, SimulationSummary

SPACE = RecordedSpaceRunner([RecordedTrial({"knob": knob}, 1e-3 * knob) for knob in (1, 2)])


def comparison(name, *shares):
    """One tuner's searches: its shares after two trials, for each seed."""
    return TunerComparison(
        name, SPACE, [SimulationSummary("gp", [SimulatedSearch(np.array(each), 1.0) for each in shares])]
    )


def test_the_mean_of_spaces_is_taken_seed_by_seed():
    (mean,) = compute_mean_summaries([comparison("a", (0.2, 0.4), (0.6, 0.8)), comparison("b", (0.4, 0.6), (0.8, 1.0))])
    assert mean.get_throughput_after(1) == pytest.approx([0.3, 0.7])
    assert mean.get_throughput_after(2) == pytest.approx([0.5, 0.9])


def test_a_chart_shows_the_mean_and_the_quartiles_of_each_space():
    shown = compute_panels([comparison("a", (0, 0.2), (0.5, 0.6), (1, 1)), comparison("b", (1, 1))])
    (curve,) = shown["a"]
    assert curve.mean == pytest.approx([0.5, 0.6])
    assert curve.quartiles[:, 0] == pytest.approx([0.25, 0.75])
    assert list(shown) == ["a", "b"]


def test_a_chart_of_many_spaces_shows_their_mean():
    many = [comparison(str(place), (0.5, 1)) for place in range(MAX_PANELS + 1)]
    assert list(compute_panels(many)) == [f"mean of {len(many)} spaces"]
