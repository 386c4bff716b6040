"""Configs that between them try everything that a schedule's knobs can do."""

import itertools

import numpy as np

from tvmconv.space import Config, SplitKnob
from tvmconv.space.search_space import Space

DRAWN = 400


def covering(space: Space, n: int, seed: int = 0, seen: set[tuple[str, str]] | None = None) -> list[Config]:
    """Legal configs, each chosen for the pairs of features that those before it do not have.

    Args:
        space: where from.
        n: how many at most.
        seed: of what is drawn to choose from.
        seen: pairs that have been tried elsewhere; those of the configs are added.
    """
    points = space.sample_legal(DRAWN, np.random.default_rng(seed))
    pairs = [set(itertools.combinations(features(space, space.config_from_point(point)), 2)) for point in points]
    seen = set() if seen is None else seen
    chosen: list[int] = []
    while len(chosen) < min(n, len(points)):
        best = max(range(len(points)), key=lambda i: (i not in chosen, len(pairs[i] - seen)))
        chosen.append(best)
        seen |= pairs[best]
    return [space.config_from_point(points[i]) for i in chosen]


def features(space: Space, config: Config) -> list[str]:
    """The words and numbers that were chosen, and of each tile whether it overhangs or has virtual threads."""
    found = []
    for name, value in config.items():
        if isinstance(space.knobs[name], SplitKnob):
            found += [f"{name} overhangs"] * (not divides(space, name, value))
            found += [f"{name} has virtual threads"] * (len(value) == 4 and value[1] > 1)
        else:
            found.append(f"{name}={value}")
    return found


def divides(space: Space, name: str, value: tuple[int, ...]) -> bool:
    """Whether a tile divides its axis."""
    return space.knobs[name].extent % int(np.prod(value[1:])) == 0


def all_divide(space: Space, config: Config) -> bool:
    """Whether no tile overhangs."""
    return all(
        divides(space, name, value) for name, value in config.items() if isinstance(space.knobs[name], SplitKnob)
    )
