"""Tuners: search algorithms that propose which configs to measure next."""

from __future__ import annotations

from tvmconv.compat import rename_tuner
from tvmconv.errors import TunerError
from tvmconv.search.tuners.base import GeneticTuner, GridTuner, RandomTuner, Trial, Tuner
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.space.search_space import Space

TUNERS: dict[str, type[Tuner]] = {"gp": BayesianTuner, "ga": GeneticTuner, "random": RandomTuner, "grid": GridTuner}

__all__ = ["TUNERS", "BayesianTuner", "GeneticTuner", "GridTuner", "RandomTuner", "Trial", "Tuner", "create_tuner"]


def create_tuner(name: str, space: Space, seed: int = 0) -> Tuner:
    """Create a tuner by its name in `TUNERS`.

    Examples:
        >>> from tvmconv.search.tuners import create_tuner
        >>> from tvmconv.space import ChoiceKnob
        >>> from tvmconv.space.search_space import Space
        >>> create_tuner("grid", Space({"unroll": ChoiceKnob("unroll", (0, 16), 0)})).ask(2)
        [{'unroll': 0}, {'unroll': 16}]
    """
    return find_tuner(name)(space, seed)


def find_tuner(name: str) -> type[Tuner]:
    """Return the class of a tuner by its name in `TUNERS`; raise TunerError if there is none."""
    name = rename_tuner(name)
    if name not in TUNERS:
        raise TunerError(f"no tuner {name!r}; there are: {', '.join(TUNERS)}")
    return TUNERS[name]
