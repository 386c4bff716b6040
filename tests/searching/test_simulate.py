"""Search quality, on spaces that others measured in full.

The data are the 2-D convolution of https://github.com/AutoTuningAssociation/benchmark_hub (MIT), cut down to the times.
"""

from pathlib import Path

import numpy as np
import pytest

from tvmconv.search.recorded_space import (
    RecordedSpaceRunner,
    RecordedTrial,
    SimulatedSearch,
    SimulationSummary,
    load_recorded_space,
    select_checkpoints,
    simulate_search,
)

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def measured():
    return load_recorded_space(DATA / "convolution_RTX_2080_Ti.json.gz")


@pytest.mark.slow
def test_model_is_near_the_best_of_thousands_after_100_trials(measured):
    searches = SimulationSummary("gp", [simulate_search(measured, "gp", 100, seed) for seed in range(3)])
    assert searches.get_throughput_after(50).mean() > 0.9
    assert searches.get_throughput_after(100).mean() > 0.97
    assert searches.mean_seconds < 15


def test_evolution_beats_chance(measured):
    evolved, chance = ([simulate_search(measured, name, 100, seed) for seed in range(4)] for name in ("ga", "random"))
    assert (
        SimulationSummary("ga", evolved).get_throughput_after(100).mean()
        > SimulationSummary("random", chance).get_throughput_after(100).mean()
    )


def tiny(costs):
    return RecordedSpaceRunner([RecordedTrial({"knob": knob}, cost) for knob, cost in enumerate(costs)])


def test_shares_are_of_the_speed_of_the_optimum():
    run = simulate_search(tiny([4e-3, np.inf, 1e-3, 2e-3]), "grid", 4, seed=0)
    assert run.relative_throughput.tolist() == [0.25, 0.25, 1, 1]


def test_a_summary_is_over_seeds():
    summary = SimulationSummary(
        "gp", [SimulatedSearch(np.array([0.5, 1.0]), 1.0), SimulatedSearch(np.array([0.25, 0.5]), 3.0)]
    )
    assert summary.get_throughput_after(1).tolist() == [0.5, 0.25]
    assert summary.mean_seconds == 2


@pytest.mark.parametrize(("trials", "expected"), [(5, [5]), (50, [10, 25, 50]), (120, [10, 25, 50, 100, 120])])
def test_reports_end_with_the_last_trial(trials, expected):
    assert select_checkpoints(trials) == expected
