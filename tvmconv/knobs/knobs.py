"""Knobs: the choices inside a schedule, declared where they are used.

A schedule asks for each choice by name while it runs (`k.split(...)`, `k.choice(...)`) and goes on with the answer. The
same function therefore is a kernel (every knob at its default), a configured kernel (some knobs set) and a search space
(what was asked for), with nothing declared twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.errors import KnobError
from tvmconv.knobs.factors import count_factorisations, factorisations, nearest_factors, tiles
from tvmconv.knobs.tile import Tile

Value = Any  # a tuple of factors for a split, else an int, float, bool or str
JSON_VALUE = bool | int | float | str | tuple[int, ...]  # what a value is read from JSON as
Config = dict[str, Value]
Columns = Mapping[str, np.ndarray]  # values of many configs by knob: (n, parts) int64 for a split, else (n,)


@dataclass(frozen=True)
class Split:
    """A loop of `extent` cut into `parts` nested loops; a value is their factors, outermost first.

    The outermost factor may be written -1: as many as it takes to cover the extent. Factors need not divide the extent;
    the last tile then overhangs, and the schedule guards it. A tile may exceed the extent, but not be twice as large.

    Any such value can be set, but a search has fewer options: tiles that divide the extent or overhang it by at most
    the share `overhang` of it, and the default.

    A lenient split takes the inner factors for what counts, as AutoTVM did: the outermost may be anything, and a tile
    beyond the extent is the whole of it.
    """

    name: str
    extent: int
    parts: int
    default: tuple[int, ...]
    overhang: float = 0.0
    lenient: bool = False

    @functools.cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """What a search may choose: ordered factorisations with -1 first, in a stable order."""
        inner = sorted(f for tile in self._tiles for f in factorisations(tile, self.parts - 1))
        extra = () if self._default_is_regular else (self.default,)
        return (*((-1, *factors) for factors in inner), *extra)

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The options with the -1 resolved: (size, parts) int64."""
        table = np.array(self.options, dtype=np.int64).reshape(-1, self.parts)
        table[:, 0] = ceil_div(self.extent, table[:, 1:].prod(axis=1))
        return table

    @property
    def size(self) -> int:
        """How many options there are, counted without listing them."""
        regular = sum(count_factorisations(tile, self.parts - 1) for tile in self._tiles)
        return regular + (not self._default_is_regular)

    @functools.cached_property
    def _tiles(self) -> list[int]:
        return tiles(self.extent, self.overhang)

    @property
    def _default_is_regular(self) -> bool:
        return math.prod(self.default[1:]) in self._tiles

    def option(self, value: object) -> Value:
        """`value` as it is spelt among the options; raises `KnobError` as `resolve` does."""
        return (-1, *self.resolve(value)[1:])

    def resolve(self, value: object) -> tuple[int, ...]:
        """Check `value` and replace a leading -1; raises `KnobError` when it is no list of `parts` positive factors."""
        wanted = (
            f"knob {self.name} takes {self.parts} factors of {self.extent} such as {format_value(self.default)} "
            f"(-1: as many as cover {self.extent})"
        )
        if not isinstance(value, (tuple, list)) or len(value) != self.parts:
            raise KnobError(f"{wanted}, not {format_value(value)}")
        if not all(isinstance(f, int) and not isinstance(f, bool) for f in value):
            raise KnobError(f"{wanted}, not {format_value(value)}: a factor is not an integer")
        if self.lenient and self.parts == 2:
            value = (-1, min(value[1], self.extent))
        inner = math.prod(value[1:])
        if min(value[1:], default=1) < 1 or not (value[0] >= 1 or value[0] == -1):
            raise KnobError(
                f"{wanted}, not {format_value(value)}: only the first factor may be -1, the others are >= 1"
            )
        if inner >= 2 * self.extent:
            raise KnobError(f"{wanted}, not {format_value(value)}: a tile of {inner} is too large for {self.extent}")
        blocks = ceil_div(self.extent, inner)
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

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The options as an array of (size,)."""
        return _column(self.options)

    def option(self, value: object) -> Value:
        """`value` as it is spelt among the options; raises `KnobError` as `resolve` does."""
        return self.options[self.options.index(self.resolve(value))]

    def resolve(self, value: object) -> Value:
        """Check that `value` is one of the options; raises `KnobError`."""
        if value not in self.options or isinstance(value, bool) != isinstance(self.default, bool):
            options = ", ".join(format_value(option) for option in self.options)
            raise KnobError(f"knob {self.name} takes one of {options}, not {format_value(value)}")
        return value


Knob = Split | Choice


def _column(values: Sequence[Value]) -> np.ndarray:
    """An array that does not turn the numbers among words into words."""
    words = sum(isinstance(value, str) for value in values)
    return np.array(values, dtype=object if 0 < words < len(values) else None)


@dataclass(frozen=True)
class Condition:
    """What the values of several knobs have to fulfil together.

    Attributes:
        text: the condition in words, for those who violate it.
        holds: from columns to a bool array (n,).
    """

    text: str
    holds: Callable[[Columns], np.ndarray]


class Knobs:
    """Answers a schedule's questions from a config, or with the defaults, and records what was asked.

    Args:
        config: values by knob name; a knob that is missing takes its default.

    Raises:
        KnobError: the config is no mapping.
    """

    def __init__(self, config: Mapping[str, Value] | None = None):
        if config is not None and not isinstance(config, Mapping):
            raise KnobError(f"expected values by knob name, such as {{'tile_w': (-1, 4)}}, not {config!r}"[:200])
        self._given = dict(config or {})
        self.asked: dict[str, Knob] = {}
        self.conditions: list[Condition] = []
        self.config: Config = {}
        self._answers: dict[str, Value] = {}

    def split(
        self,
        name: str,
        extent: int,
        parts: int,
        default: Sequence[int],
        *,
        exact: bool = False,
        overhang: float = 0.0,
        lenient: bool = False,
    ) -> tuple[int, ...]:
        """The factors of `extent`, outermost first, all positive.

        Args:
            name: the knob's name.
            extent: the loop's extent.
            parts: how many loops it becomes.
            default: the preferred factors, -1 first; `nearest_factors` fits them to the extent.
            exact: the default has to divide the extent (for reductions, where an overhang costs a test per iteration).
            overhang: the largest share of the extent that a tile may overhang it to be searched.
            lenient: take values of AutoTVM's logs that do not fit the extent, as it did.
        """
        inner = nearest_factors(extent, tuple(default[1:]), exact=exact)
        return self._ask(Split(name, extent, parts, (-1, *inner), overhang, lenient))

    def tile(
        self,
        name: str,
        extent: int,
        levels: Sequence[str],
        default: Mapping[str, int] | None = None,
        *,
        exact: bool = False,
        overhang: float = 0.0,
        lenient: bool = False,
    ) -> Tile:
        """The axis of `extent`, cut into the named levels: a `split` whose factors have names.

        Args:
            name: the knob's name.
            extent: the loop's extent.
            levels: names of the loops that it becomes, outermost first.
            default: the preferred factors by level, 1 where it has none; not of the outermost.
            exact: as for `split`, like those that follow.
            overhang: likewise.
            lenient: likewise.
        """
        preferred = (-1, *((default or {}).get(level, 1) for level in levels[1:]))
        factors = self.split(name, extent, len(levels), preferred, exact=exact, overhang=overhang, lenient=lenient)
        return Tile(extent, dict(zip(levels, factors, strict=True)))

    def choice(self, name: str, options: Sequence[Value], default: Value) -> Value:
        """One of `options`."""
        return self._ask(Choice(name, tuple(options), default))

    def _ask(self, knob: Knob) -> Value:
        value = self._given.get(knob.name, knob.default)
        answer = knob.resolve(value)
        self.asked[knob.name] = knob
        self.config[knob.name] = tuple(value) if isinstance(value, (tuple, list)) else value
        self._answers[knob.name] = answer
        return answer

    def condition(self, text: str, holds: Callable[[Columns], np.ndarray]) -> None:
        """Demand something of the knobs asked for so far; a search keeps to it.

        The defaults are not refused, so that a workload that they do not fit can still be searched.

        Args:
            text: the condition in words, such as `tile_x has at most 32 threads`.
            holds: from the values of many configs by knob, (n, parts) for a split without -1 or else (n,), to a bool
                array (n,).

        Raises:
            KnobError: the configured values violate it.
        """
        self.conditions.append(Condition(text, holds))
        columns = {name: _column([answer]) for name, answer in self._answers.items()}
        if self._given and not np.all(holds(columns)):
            values = " ".join(f"{name}={format_value(value)}" for name, value in self.config.items())
            raise KnobError(f"{text}; that does not hold for {values}")

    def search_only(self, text: str, holds: Callable[[Columns], np.ndarray]) -> None:
        """Keep a search to what promises something; values that are set may violate it. Arguments as `condition`."""
        self.conditions.append(Condition(text, holds))

    def check_all_asked(self, schedule: str) -> None:
        """Raise `KnobError` for a configured knob that the schedule never asked for."""
        for name in self._given:
            if name not in self.asked:
                known = ", ".join(self.asked) or "none"
                raise KnobError(f"schedule {schedule} has no knob {name!r}; its knobs here: {known}")


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
