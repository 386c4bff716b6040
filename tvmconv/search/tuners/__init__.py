"""Tuners: search algorithms that propose which configs to measure next, one per file."""

from __future__ import annotations

from tvmconv.compat import rename_tuner
from tvmconv.errors import TunerError
from tvmconv.search.tuners.base import Trial, Tuner
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.search.tuners.ga import GeneticTuner
from tvmconv.search.tuners.grid import GridTuner
from tvmconv.search.tuners.random import RandomTuner
from tvmconv.space.search_space import Space

TUNERS: dict[str, type[Tuner]] = {"gp": BayesianTuner, "ga": GeneticTuner, "random": RandomTuner, "grid": GridTuner}

__all__ = [
    "TUNERS",
    "BayesianTuner",
    "GeneticTuner",
    "GridTuner",
    "RandomTuner",
    "Trial",
    "Tuner",
    "create_tuner",
    "find_tuner",
]


def create_tuner(name: str, space: Space, seed: int = 0) -> Tuner:
    """Create a tuner by its name.

    Example:
        >>> from tvmconv.search.tuners import create_tuner
        >>> from tvmconv.space import ChoiceKnob
        >>> from tvmconv.space.search_space import Space
        >>> create_tuner("grid", Space({"unroll": ChoiceKnob("unroll", (0, 16), 0)})).ask(2)
        [{'unroll': 0}, {'unroll': 16}]
    """
    return find_tuner(name)(space, seed)


def find_tuner(name: str) -> type[Tuner]:
    """Return the class of a tuner, which `name` is the key of in `TUNERS`."""
    name = rename_tuner(name)
    if name not in TUNERS:
        raise TunerError(f"no tuner {name!r}; there are: {', '.join(TUNERS)}")
    return TUNERS[name]
