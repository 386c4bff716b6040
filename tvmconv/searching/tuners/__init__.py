"""Tuners: which configs to measure next, one algorithm a file."""

from __future__ import annotations

from tvmconv.errors import TunerError
from tvmconv.knobs.space import Space
from tvmconv.searching.tuners.base import Trial, Tuner
from tvmconv.searching.tuners.ga import GeneticTuner
from tvmconv.searching.tuners.grid import GridTuner
from tvmconv.searching.tuners.random import RandomTuner
from tvmconv.searching.tuners.xgb import XGBTuner

TUNERS: dict[str, type[Tuner]] = {"xgb": XGBTuner, "ga": GeneticTuner, "random": RandomTuner, "grid": GridTuner}

__all__ = ["TUNERS", "GeneticTuner", "GridTuner", "RandomTuner", "Trial", "Tuner", "XGBTuner", "find", "make"]


def make(name: str, space: Space, seed: int = 0) -> Tuner:
    """A tuner by name.

    Args:
        name: one of `TUNERS`.
        space: where it searches.
        seed: of its random numbers.

    Raises:
        TunerError: there is no such tuner.
    """
    return find(name)(space, seed)


def find(name: str) -> type[Tuner]:
    """The class of a tuner.

    Raises:
        TunerError: there is no such tuner.
    """
    if name not in TUNERS:
        raise TunerError(f"no tuner {name!r}; there are: {', '.join(TUNERS)}")
    return TUNERS[name]
