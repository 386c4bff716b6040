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
from tvmconv.space.factors import count_factorizations, find_nearest_factors, list_factorizations, list_tile_sizes
from tvmconv.space.tile import Tile

Value = Any  # a tuple of factors for a split, else an int, float, bool or str
JSON_VALUE_TYPES = bool | int | float | str | tuple[int, ...]  # what a value is read from JSON as
Config = dict[str, Value]
Columns = Mapping[str, np.ndarray]  # values of many configs by knob: (n, parts) int64 for a split, else (n,)


@dataclass(frozen=True)
class SplitKnob:
    """A loop of `extent` cut into `num_factors` nested loops; a value is their factors, outermost first.

    The outermost factor may be written -1: as many as it takes to cover the extent. Factors need not divide the extent;
    the last tile then overhangs, and the schedule guards it. A tile may exceed the extent, but not be twice as large.

    Any such value can be set, but a search has fewer options: tiles that divide the extent or overhang it by at most
    the share `max_overhang_fraction` of it, and the default.

    A lenient split takes the inner factors for what counts, as AutoTVM did: the outermost may be anything, and a tile
    beyond the extent is the whole of it.
    """

    name: str
    extent: int
    num_factors: int
    default: tuple[int, ...]
    max_overhang_fraction: float = 0.0
    allow_mismatch: bool = False

    @functools.cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """What a search may choose: ordered factorisations with -1 first, in a stable order."""
        inner_factors = sorted(f for tile in self._tile_sizes for f in list_factorizations(tile, self.num_factors - 1))
        default_option = () if self._is_default_searched else (self.default,)
        return (*((-1, *factors) for factors in inner_factors), *default_option)

    @functools.cached_property
    def option_table(self) -> np.ndarray:
        """The options with the -1 resolved: (size, parts) int64."""
        table = np.array(self.options, dtype=np.int64).reshape(-1, self.num_factors)
        table[:, 0] = ceil_div(self.extent, table[:, 1:].prod(axis=1))
        return table

    @property
    def size(self) -> int:
        """How many options there are, counted without listing them."""
        num_searched_options = sum(count_factorizations(tile, self.num_factors - 1) for tile in self._tile_sizes)
        return num_searched_options + (not self._is_default_searched)

    @functools.cached_property
    def _tile_sizes(self) -> list[int]:
        return list_tile_sizes(self.extent, self.max_overhang_fraction)

    @property
    def _is_default_searched(self) -> bool:
        return math.prod(self.default[1:]) in self._tile_sizes

    def normalize(self, value: object) -> Value:
        """`value` as it is spelt among the options; raises `KnobError` as `resolve` does."""
        return (-1, *self.resolve(value)[1:])

    def resolve(self, value: object) -> tuple[int, ...]:
        """Check `value` and replace a leading -1; raises `KnobError` when it is no list of `num_factors` positive
        factors.
        """
        expected = (
            f"knob {self.name} takes {self.num_factors} factors of {self.extent} such as {format_value(self.default)} "
            f"(-1: as many as cover {self.extent})"
        )
        if not isinstance(value, (tuple, list)) or len(value) != self.num_factors:
            raise KnobError(f"{expected}, not {format_value(value)}")
        if not all(isinstance(f, int) and not isinstance(f, bool) for f in value):
            raise KnobError(f"{expected}, not {format_value(value)}: a factor is not an integer")
        if self.allow_mismatch and self.num_factors == 2:
            value = (-1, min(value[1], self.extent))
        tile_size = math.prod(value[1:])
        if min(value[1:], default=1) < 1 or not (value[0] >= 1 or value[0] == -1):
            raise KnobError(
                f"{expected}, not {format_value(value)}: only the first factor may be -1, the others are >= 1"
            )
        if tile_size >= 2 * self.extent:
            raise KnobError(
                f"{expected}, not {format_value(value)}: a tile of {tile_size} is too large for {self.extent}"
            )
        num_tiles = ceil_div(self.extent, tile_size)
        if value[0] not in (-1, num_tiles):
            raise KnobError(
                f"{expected}, not {format_value(value)}: {self.extent} needs {num_tiles} x {tile_size}, or -1 first"
            )
        return (num_tiles, *value[1:])


@dataclass(frozen=True)
class ChoiceKnob:
    """One of a few values."""

    name: str
    options: tuple[Value, ...]
    default: Value

    @property
    def size(self) -> int:
        """How many options there are."""
        return len(self.options)

    @functools.cached_property
    def option_table(self) -> np.ndarray:
        """The options as an array of (size,)."""
        return _make_column(self.options)

    def normalize(self, value: object) -> Value:
        """`value` as it is spelt among the options; raises `KnobError` as `resolve` does."""
        return self.options[self.options.index(self.resolve(value))]

    def resolve(self, value: object) -> Value:
        """Check that `value` is one of the options; raises `KnobError`."""
        if value not in self.options or isinstance(value, bool) != isinstance(self.default, bool):
            options = ", ".join(format_value(option) for option in self.options)
            raise KnobError(f"knob {self.name} takes one of {options}, not {format_value(value)}")
        return value


Knob = SplitKnob | ChoiceKnob


def _make_column(values: Sequence[Value]) -> np.ndarray:
    """An array that does not turn the numbers among words into words."""
    num_strings = sum(isinstance(value, str) for value in values)
    return np.array(values, dtype=object if 0 < num_strings < len(values) else None)


@dataclass(frozen=True)
class Constraint:
    """What the values of several knobs have to fulfil together.

    Attributes:
        description: the condition in words, for those who violate it.
        predicate: from columns to a bool array (n,).
    """

    description: str
    predicate: Callable[[Columns], np.ndarray]


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
        self._requested = dict(config or {})
        self.declared: dict[str, Knob] = {}
        self.constraints: list[Constraint] = []
        self.config: Config = {}
        self._resolved_values: dict[str, Value] = {}

    def split(
        self,
        name: str,
        extent: int,
        parts: int,
        default: Sequence[int],
        *,
        exact: bool = False,
        overhang: float = 0.0,
        allow_mismatch: bool = False,
    ) -> tuple[int, ...]:
        """The factors of `extent`, outermost first, all positive.

        Args:
            name: the knob's name.
            extent: the loop's extent.
            parts: how many loops it becomes.
            default: the preferred factors, -1 first; `find_nearest_factors` fits them to the extent.
            exact: the default has to divide the extent (for reductions, where an overhang costs a test per iteration).
            overhang: the largest share of the extent that a tile may overhang it to be searched.
            allow_mismatch: take values of AutoTVM's logs that do not fit the extent, as it did.
        """
        inner_factors = find_nearest_factors(extent, tuple(default[1:]), exact_divisors=exact)
        return self._declare(SplitKnob(name, extent, parts, (-1, *inner_factors), overhang, allow_mismatch))

    def tile(
        self,
        name: str,
        extent: int,
        levels: Sequence[str],
        default: Mapping[str, int] | None = None,
        *,
        exact: bool = False,
        overhang: float = 0.0,
        allow_mismatch: bool = False,
    ) -> Tile:
        """The axis of `extent`, cut into the named levels: a `split` whose factors have names.

        Args:
            name: the knob's name.
            extent: the loop's extent.
            levels: names of the loops that it becomes, outermost first.
            default: the preferred factors by level, 1 where it has none; not of the outermost.
            exact: as for `split`, like those that follow.
            overhang: likewise.
            allow_mismatch: likewise.
        """
        preferred = (-1, *((default or {}).get(level, 1) for level in levels[1:]))
        factors = self.split(
            name, extent, len(levels), preferred, exact=exact, overhang=overhang, allow_mismatch=allow_mismatch
        )
        return Tile(extent, dict(zip(levels, factors, strict=True)))

    def choice(self, name: str, options: Sequence[Value], default: Value) -> Value:
        """One of `options`."""
        return self._declare(ChoiceKnob(name, tuple(options), default))

    def _declare(self, knob: Knob) -> Value:
        value = self._requested.get(knob.name, knob.default)
        resolved_value = knob.resolve(value)
        self.declared[knob.name] = knob
        self.config[knob.name] = tuple(value) if isinstance(value, (tuple, list)) else value
        self._resolved_values[knob.name] = resolved_value
        return resolved_value

    def require(self, description: str, predicate: Callable[[Columns], np.ndarray]) -> None:
        """Demand something of the knobs asked for so far; a search keeps to it.

        The defaults are not refused, so that a workload that they do not fit can still be searched.

        Args:
            description: the condition in words, such as `tile_x has at most 32 threads`.
            predicate: from the values of many configs by knob, (n, parts) for a split without -1 or else (n,), to a
                bool array (n,).

        Raises:
            KnobError: the configured values violate it.
        """
        self.constraints.append(Constraint(description, predicate))
        columns = {name: _make_column([answer]) for name, answer in self._resolved_values.items()}
        if self._requested and not np.all(predicate(columns)):
            values = " ".join(f"{name}={format_value(value)}" for name, value in self.config.items())
            raise KnobError(f"{description}; that does not hold for {values}")

    def prune(self, description: str, predicate: Callable[[Columns], np.ndarray]) -> None:
        """Keep a search to what promises something; values that are set may violate it. Arguments as `require`."""
        self.constraints.append(Constraint(description, predicate))

    def check_unknown_knobs(self, schedule_name: str) -> None:
        """Raise `KnobError` for a configured knob that the schedule never asked for."""
        for name in self._requested:
            if name not in self.declared:
                declared_names = ", ".join(self.declared) or "none"
                raise KnobError(f"schedule {schedule_name} has no knob {name!r}; its knobs here: {declared_names}")


def format_value(value: object) -> str:
    """A knob's value as it is typed after `--set knob=`."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def parse_value(text: str) -> Value:
    """A knob's value from `--set knob=TEXT`: integers separated by commas, true/false, a number, or a word."""
    boolean_words = {"true": True, "false": False}
    if text.lower() in boolean_words:
        return boolean_words[text.lower()]
    try:
        numbers = tuple(int(number_text) for number_text in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]
