"""How well a tuner searches, tried on a recorded space: no device, no noise, and the optimum is known."""

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
    """One search.

    Attributes:
        relative_throughput: the share of the optimum's speed that the best config so far reaches, after each trial:
            float (trials,); 0 until the first config succeeds.
        seconds: wall time spent in the tuner.
    """

    relative_throughput: np.ndarray
    seconds: float

    @staticmethod
    def average(searches: Sequence[SimulatedSearch]) -> SimulatedSearch:
        """The mean of searches of as many trials."""
        mean_throughput = np.mean([simulated.relative_throughput for simulated in searches], axis=0)
        return SimulatedSearch(mean_throughput, float(np.mean([simulated.seconds for simulated in searches])))


@dataclass(frozen=True)
class SimulationSummary:
    """Searches by one tuner with several seeds.

    Attributes:
        tuner: its name.
        searches: one a seed.
    """

    tuner: str
    searches: Sequence[SimulatedSearch]

    def get_throughput_after(self, num_trials: int) -> np.ndarray:
        """The share of the optimum's speed that each seed reached: float (seeds,)."""
        return np.array([simulated.relative_throughput[num_trials - 1] for simulated in self.searches])

    @property
    def mean_seconds(self) -> float:
        """Mean wall time that a search spent in the tuner."""
        return float(np.mean([simulated.seconds for simulated in self.searches]))


def simulate_search(
    recording: RecordedSpaceRunner, tuner: str | type[Tuner], num_trials: int, seed: int
) -> SimulatedSearch:
    """Let a tuner search a recorded space, in batches of the size that it likes.

    Args:
        recording: the space.
        tuner: a name in `TUNERS`, or a class.
        num_trials: how many configs to measure; in a smaller space, the last share stays.
        seed: of the tuner.

    Raises:
        TunerError: there is no such tuner.
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
    relative_throughput = recording.best_seconds / np.minimum.accumulate(costs)
    return SimulatedSearch(
        np.pad(relative_throughput, (0, num_trials - len(relative_throughput)), mode="edge"), tuner_seconds
    )


def select_checkpoints(num_trials: int) -> list[int]:
    """After how many trials to report: the usual ones, and the last."""
    return sorted({*(n for n in CHECKPOINTS if n < num_trials), num_trials})
