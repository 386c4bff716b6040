"""How well a tuner searches, tried on a recorded space: no device, no noise, and the optimum is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvmconv.searching.replay import Recording
from tvmconv.searching.tuners import Tuner, find

CHECKPOINTS = (10, 25, 50, 100, 200)


@dataclass(frozen=True)
class Run:
    """One search.

    Attributes:
        shares: the share of the optimum's speed that the best config so far reaches, after each trial: float (trials,);
            0 until the first config succeeds.
        seconds: wall time spent in the tuner.
    """

    shares: np.ndarray
    seconds: float

    @staticmethod
    def mean(runs: Sequence[Run]) -> Run:
        """The mean of searches of as many trials."""
        shares = np.mean([run.shares for run in runs], axis=0)
        return Run(shares, float(np.mean([run.seconds for run in runs])))


@dataclass(frozen=True)
class Summary:
    """Searches by one tuner with several seeds.

    Attributes:
        tuner: its name.
        runs: one a seed.
    """

    tuner: str
    runs: Sequence[Run]

    def after(self, trials: int) -> np.ndarray:
        """The share of the optimum's speed that each seed reached: float (seeds,)."""
        return np.array([run.shares[trials - 1] for run in self.runs])

    @property
    def seconds(self) -> float:
        """Mean wall time that a search spent in the tuner."""
        return float(np.mean([run.seconds for run in self.runs]))


def search(recording: Recording, tuner: str | type[Tuner], trials: int, seed: int) -> Run:
    """Let a tuner search a recorded space, in batches of the size that it likes.

    Args:
        recording: the space.
        tuner: a name in `TUNERS`, or a class.
        trials: how many configs to measure; in a smaller space, the last share stays.
        seed: of the tuner.

    Raises:
        TunerError: there is no such tuner.
    """
    searching = (find(tuner) if isinstance(tuner, str) else tuner)(recording.space, seed)
    costs: list[float] = []
    seconds = 0.0
    while len(costs) < trials:
        start = time.perf_counter()
        proposed = searching.propose(min(searching.batch, trials - len(costs)))
        measured = [recording.measure(config) for config in proposed]
        searching.learn(measured)
        seconds += time.perf_counter() - start
        if not measured:
            break
        costs += [trial.cost for trial in measured]
    shares = recording.best / np.minimum.accumulate(costs)
    return Run(np.pad(shares, (0, trials - len(shares)), mode="edge"), seconds)


def checkpoints(trials: int) -> list[int]:
    """After how many trials to report: the usual ones, and the last."""
    return sorted({*(n for n in CHECKPOINTS if n < trials), trials})
