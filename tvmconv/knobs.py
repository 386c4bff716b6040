"""Knobs: the choices inside a schedule, declared where they are used.

A schedule asks for each choice by name while it runs (`k.split(...)`, `k.choice(...)`) and goes on with the answer. The
same function therefore is a kernel (every knob at its default), a configured kernel (some knobs set) and a search space
(what was asked for), with nothing declared twice.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv.errors import KnobError

Value = Any  # a tuple of factors for a split, else an int, float, bool or str
Config = dict[str, Value]


@dataclass(frozen=True)
class Split:
    """A loop of `extent` cut into `parts` nested loops; a value is their factors, outermost first.

    The outermost factor may be written -1: as many as it takes to cover the extent. Factors need not divide the extent;
    the last tile then overhangs, and the schedule guards it. A tile may exceed the extent, but not be twice as large.
    """

    name: str
    extent: int
    parts: int
    default: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ordered factorisations of the extent there are, counted without listing them."""
        return math.prod(math.comb(power + self.parts - 1, self.parts - 1) for _, power in prime_factors(self.extent))

    def resolve(self, value: object) -> tuple[int, ...]:
        """Check `value` and replace a leading -1; raises `KnobError` when it is no list of `parts` positive factors."""
        wanted = f"knob {self.name} takes {self.parts} factors such as {format_value(self.default)}"
        if not isinstance(value, (tuple, list)) or len(value) != self.parts:
            raise KnobError(f"{wanted}, not {format_value(value)}")
        if not all(isinstance(f, int) and not isinstance(f, bool) for f in value):
            raise KnobError(f"{wanted}, not {format_value(value)}: a factor is not an integer")
        inner = math.prod(value[1:])
        if min(value[1:], default=1) < 1 or not (value[0] >= 1 or value[0] == -1):
            raise KnobError(
                f"{wanted}, not {format_value(value)}: only the first factor may be -1, the others are >= 1"
            )
        if inner >= 2 * self.extent:
            raise KnobError(f"{wanted}, not {format_value(value)}: a tile of {inner} is too large for {self.extent}")
        blocks = -(-self.extent // inner)
        if value[0] not in (-1, blocks):
            raise KnobError(f"{wanted}, not {format_value(value)}: {self.extent} needs {blocks} x {inner}, or -1 first")
        return (blocks, *value[1:])


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    name: str
    options: tuple[Value, ...]
    default: Value

    @property
    def size(self) -> int:
        """How many options there are."""
        return len(self.options)

    def resolve(self, value: object) -> Value:
        """Check that `value` is one of the options; raises `KnobError`."""
        if value not in self.options or isinstance(value, bool) != isinstance(self.default, bool):
            options = ", ".join(format_value(option) for option in self.options)
            raise KnobError(f"knob {self.name} takes one of {options}, not {format_value(value)}")
        return value


Knob = Split | Choice


class Knobs:
    """Answers a schedule's questions from a config, or with the defaults, and records what was asked.

    Args:
        config: values by knob name; a knob that is missing takes its default.
    """

    def __init__(self, config: Mapping[str, Value] | None = None):
        self._given = dict(config or {})
        self.asked: dict[str, Knob] = {}
        self.config: Config = {}

    def split(
        self, name: str, extent: int, parts: int, default: Sequence[int], *, exact: bool = False
    ) -> tuple[int, ...]:
        """The factors of `extent`, outermost first, all positive.

        Args:
            name: the knob's name.
            extent: the loop's extent.
            parts: how many loops it becomes.
            default: the preferred factors, -1 first; `nearest_factors` fits them to the extent.
            exact: the default has to divide the extent (for reductions, where an overhang costs a test per iteration).
        """
        inner = nearest_factors(extent, tuple(default[1:]), exact=exact)
        return self._ask(Split(name, extent, parts, (-1, *inner)))

    def choice(self, name: str, options: Sequence[Value], default: Value) -> Value:
        """One of `options`."""
        return self._ask(Choice(name, tuple(options), default))

    def _ask(self, knob: Knob) -> Value:
        value = self._given.get(knob.name, knob.default)
        answer = knob.resolve(value)
        self.asked[knob.name] = knob
        self.config[knob.name] = tuple(value) if isinstance(value, (tuple, list)) else value
        return answer

    def check_all_asked(self, schedule: str) -> None:
        """Raise `KnobError` for a configured knob that the schedule never asked for."""
        for name in self._given:
            if name not in self.asked:
                known = ", ".join(self.asked) or "none"
                raise KnobError(f"schedule {schedule} has no knob {name!r}; its knobs here: {known}")


@dataclass(frozen=True)
class Space:
    """All configs of a schedule for one workload: the product of its knobs, never listed."""

    knobs: Mapping[str, Knob]

    @property
    def size(self) -> int:
        """How many configs there are."""
        return math.prod(knob.size for knob in self.knobs.values())

    @property
    def default(self) -> Config:
        """The config that the schedule takes by itself."""
        return {name: knob.default for name, knob in self.knobs.items()}


# The price of a factor's distance from what was asked for (in factors of two), against the price of computing past the
# end (as a share of the extent): halving a factor is worth it when it saves a quarter of the work.
_DISTANCE_PRICE = 0.25


@functools.lru_cache(maxsize=4096)
def nearest_factors(extent: int, preferred: tuple[int, ...], *, exact: bool = False) -> tuple[int, ...]:
    """The legal inner factors nearest to the preferred ones.

    The preferred factors are taken as they are where they divide the extent. Otherwise the result minimises the
    overhang (padded extent / extent - 1) plus the distance from the preferred factors; no factor grows, unless `exact`
    asks for divisors, which may be larger. Of equals, the one with the largest factor before the last wins: a tile's
    threads.
    """
    if extent % math.prod(preferred) == 0:
        return preferred

    def cost(factors: tuple[int, ...]) -> tuple[float, int]:
        tile = math.prod(factors)
        overhang = -(-extent // tile) * tile / extent - 1
        distance = sum(abs(math.log2(p / f)) for p, f in zip(preferred, factors, strict=True))
        return round(overhang + _DISTANCE_PRICE * distance, 9), -factors[-2] if len(factors) > 1 else 0

    if exact:
        divisors = [d for d in range(1, extent + 1) if extent % d == 0]
        candidates = itertools.product(divisors, repeat=len(preferred))
        return min((c for c in candidates if extent % math.prod(c) == 0), key=cost)
    return min(itertools.product(*(range(p, 0, -1) for p in preferred)), key=cost)


def prime_factors(n: int) -> list[tuple[int, int]]:
    """The prime factorisation of `n` as (prime, power), by trial division (extents are small)."""
    factors = []
    p = 2
    while p * p <= n:
        power = 0
        while n % p == 0:
            n //= p
            power += 1
        if power:
            factors.append((p, power))
        p += 1
    return factors + ([(n, 1)] if n > 1 else [])


def format_value(value: object) -> str:
    """A knob's value as it is typed after `--set knob=`."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def parse_value(text: str) -> Value:
    """A knob's value from `--set knob=TEXT`: integers separated by commas, true/false, a number, or a word."""
    words = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]
