"""Search quality, on spaces that others measured in full.

The data are the 2-D convolution of https://github.com/AutoTuningAssociation/benchmark_hub (MIT), cut down to the times.
"""

from pathlib import Path

import numpy as np
import pytest

from tvmconv.searching.replay import Recorded, Recording, load
from tvmconv.searching.simulate import Run, Summary, checkpoints, search

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def measured():
    return load(DATA / "convolution_RTX_2080_Ti.json.gz")


def test_model_is_near_the_best_of_thousands_after_100_trials(measured):
    searches = Summary("xgb", [search(measured, "xgb", 100, seed) for seed in range(3)])
    assert searches.after(50).mean() > 0.9
    assert searches.after(100).mean() > 0.97
    assert searches.seconds < 15


def test_evolution_beats_chance(measured):
    evolved, chance = ([search(measured, name, 100, seed) for seed in range(4)] for name in ("ga", "random"))
    assert Summary("ga", evolved).after(100).mean() > Summary("random", chance).after(100).mean()


def tiny(costs):
    return Recording([Recorded({"knob": knob}, cost) for knob, cost in enumerate(costs)])


def test_shares_are_of_the_speed_of_the_optimum():
    run = search(tiny([4e-3, np.inf, 1e-3, 2e-3]), "grid", 4, seed=0)
    assert run.shares.tolist() == [0.25, 0.25, 1, 1]


def test_a_summary_is_over_seeds():
    summary = Summary("xgb", [Run(np.array([0.5, 1.0]), 1.0), Run(np.array([0.25, 0.5]), 3.0)])
    assert summary.after(1).tolist() == [0.5, 0.25]
    assert summary.seconds == 2


@pytest.mark.parametrize(("trials", "expected"), [(5, [5]), (50, [10, 25, 50]), (120, [10, 25, 50, 100, 120])])
def test_reports_end_with_the_last_trial(trials, expected):
    assert checkpoints(trials) == expected
