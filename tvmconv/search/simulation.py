"""Simulated searches: a tuner searches a recorded space, without a device or noise, and the optimum is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvmconv.search.recorded_space import RecordedSpaceRunner
from tvmconv.search.tuners import Tuner, find_tuner

CHECKPOINTS = (10, 25, 50, 100, 200)


@dataclass(frozen=True)
class SimulatedSearch:
    """One simulated search."""

    # Throughput of the best config so far divided by that of the optimum, after each trial: float (trials,). It is 0
    # until the first config succeeds.
    relative_throughput: np.ndarray
    seconds: float  # wall time in the tuner

    @staticmethod
    def average(searches: Sequence[SimulatedSearch]) -> SimulatedSearch:
        """Return the mean of searches with equal numbers of trials."""
        mean_throughput = np.mean([simulated.relative_throughput for simulated in searches], axis=0)
        return SimulatedSearch(mean_throughput, float(np.mean([simulated.seconds for simulated in searches])))


@dataclass(frozen=True)
class SimulationSummary:
    """Simulated searches by one tuner with several seeds."""

    tuner: str
    searches: Sequence[SimulatedSearch]  # one search for each seed

    def get_throughput_after(self, num_trials: int) -> np.ndarray:
        """Return the relative throughput of each seed after `num_trials` trials: float (seeds,)."""
        return np.array([simulated.relative_throughput[num_trials - 1] for simulated in self.searches])

    @property
    def mean_seconds(self) -> float:
        """Mean wall time of a search in the tuner, in seconds."""
        return float(np.mean([simulated.seconds for simulated in self.searches]))


def simulate_search(
    recording: RecordedSpaceRunner, tuner: str | type[Tuner], num_trials: int, seed: int
) -> SimulatedSearch:
    """Simulate the search of a tuner in a recorded space, in batches of the tuner's `batch_size`. In a smaller space,
    the last relative throughput is repeated.
    """
    searcher = (find_tuner(tuner) if isinstance(tuner, str) else tuner)(recording.space, seed)
    costs: list[float] = []
    tuner_seconds = 0.0
    while len(costs) < num_trials:
        start = time.perf_counter()
        configs = searcher.ask(min(searcher.batch_size, num_trials - len(costs)))
        measured_trials = [recording.measure(config) for config in configs]
        searcher.tell(measured_trials)
        tuner_seconds += time.perf_counter() - start
        if not measured_trials:
            break
        costs += [trial.cost for trial in measured_trials]
    throughput = recording.best_seconds / np.minimum.accumulate(costs)
    return SimulatedSearch(np.pad(throughput, (0, num_trials - len(throughput)), mode="edge"), tuner_seconds)


def select_checkpoints(num_trials: int) -> list[int]:
    """Return the numbers of trials after which results are reported: `CHECKPOINTS` below the last, and the last."""
    return sorted({*(n for n in CHECKPOINTS if n < num_trials), num_trials})
