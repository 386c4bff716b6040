"""Knobs: the parameters of a schedule, declared where the schedule uses them.

A schedule declares each knob by name while it runs (`k.split(...)`, `k.choice(...)`) and continues with the value that
it gets. One function therefore defines a default kernel (every knob at its default), a configured kernel (some knobs
set) and a search space (all declared knobs).
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.errors import KnobError
from tvmconv.space.factors import count_factorizations, find_nearest_factors, list_factorizations, list_tile_sizes

Value = Any  # a tuple of factors for a split, otherwise an int, float, bool or str
JSON_VALUE_TYPES = bool | int | float | str | tuple[int, ...]  # types of a value that is read from JSON
Config = dict[str, Value]
Columns = Mapping[str, np.ndarray]  # values of many configs by knob: int64 (n, num_factors) for a split, otherwise (n,)


@dataclass(frozen=True)
class SplitKnob:
    """A loop of `extent` iterations split into `num_factors` nested loops; a value is their factors, outermost first.

    The outermost factor may be written as -1, which stands for the number of tiles that cover the extent. Factors need
    not divide the extent: the last tile then overhangs, and the schedule guards it. A tile may exceed the extent, but
    must be less than twice as large.

    Any such value can be set. A search only considers tiles that divide the extent or overhang it by at most the
    fraction `max_overhang_fraction`, and the default.

    With `allow_mismatch`, only the inner factors count, as in AutoTVM: the outermost factor may be any number, and a
    tile that exceeds the extent is reduced to the extent.
    """

    name: str
    extent: int  # number of iterations of the loop
    num_factors: int  # number of nested loops
    default: tuple[int, ...]  # default factors, with -1 first
    max_overhang_fraction: float = 0.0  # maximum overhang of searched tiles, as a fraction of the extent
    allow_mismatch: bool = False  # whether factors from AutoTVM's logs that do not fit the extent are accepted

    @functools.cached_property
    def options(self) -> tuple[tuple[int, ...], ...]:
        """Options that a search considers: ordered factorizations with -1 first, in a stable order."""
        inner_factors = sorted(f for tile in self._tile_sizes for f in list_factorizations(tile, self.num_factors - 1))
        default_option = () if self._is_default_searched else (self.default,)
        return (*((-1, *factors) for factors in inner_factors), *default_option)

    @functools.cached_property
    def option_table(self) -> np.ndarray:
        """Options with -1 resolved: int64 (size, num_factors)."""
        table = np.array(self.options, dtype=np.int64).reshape(-1, self.num_factors)
        table[:, 0] = ceil_div(self.extent, table[:, 1:].prod(axis=1))
        return table

    @property
    def size(self) -> int:
        """Number of options, computed without listing them."""
        num_searched_options = sum(count_factorizations(tile, self.num_factors - 1) for tile in self._tile_sizes)
        return num_searched_options + (not self._is_default_searched)

    @functools.cached_property
    def _tile_sizes(self) -> list[int]:
        return list_tile_sizes(self.extent, self.max_overhang_fraction)

    @property
    def _is_default_searched(self) -> bool:
        return math.prod(self.default[1:]) in self._tile_sizes

    def normalize(self, value: object) -> Value:
        """Return `value` as it is written among the options; raises `KnobError` as `resolve` does."""
        return (-1, *self.resolve(value)[1:])

    def describe_values(self) -> str:
        """Return what the knob takes, to follow "takes"."""
        return (
            f"{self.num_factors} factors of {self.extent} such as {format_value(self.default)} "
            f"(-1: as many as cover {self.extent})"
        )

    def resolve(self, value: object) -> tuple[int, ...]:
        """Check `value` and replace a leading -1 by the number of tiles."""

        def refuse(reason: str = "") -> KnobError:
            return KnobError(f"knob {self.name} takes {self.describe_values()}, not {format_value(value)}{reason}")

        if not isinstance(value, (tuple, list)) or len(value) != self.num_factors:
            raise refuse()
        if not all(isinstance(f, int) and not isinstance(f, bool) for f in value):
            raise refuse(": a factor is not an integer")
        if self.allow_mismatch and self.num_factors == 2:
            value = (-1, min(value[1], self.extent))
        tile_size = math.prod(value[1:])
        if min(value[1:], default=1) < 1 or not (value[0] >= 1 or value[0] == -1):
            raise refuse(": only the first factor may be -1, the others are >= 1")
        if tile_size >= 2 * self.extent:
            raise refuse(f": a tile of {tile_size} is too large for {self.extent}")
        num_tiles = ceil_div(self.extent, tile_size)
        if value[0] not in (-1, num_tiles):
            raise refuse(f": {self.extent} needs {num_tiles} x {tile_size}, or -1 first")
        return (num_tiles, *value[1:])


@dataclass(frozen=True)
class ChoiceKnob:
    """A knob with a short list of values."""

    name: str
    options: tuple[Value, ...]  # values that it accepts
    default: Value  # default value, one of the options
    # Value of configs that have other knobs but lack this one, as they are older or partial; None for the default.
    missing: Value = None

    @property
    def size(self) -> int:
        """Number of options."""
        return len(self.options)

    @functools.cached_property
    def option_table(self) -> np.ndarray:
        """Options as an array of shape (size,)."""
        return _make_column(self.options)

    def normalize(self, value: object) -> Value:
        """Return `value` as it is written among the options; raises `KnobError` as `resolve` does."""
        return self.options[self.options.index(self.resolve(value))]

    def describe_values(self) -> str:
        """Return what the knob takes, to follow "takes"."""
        return f"one of {', '.join(map(format_value, self.options))}"

    def resolve(self, value: object) -> Value:
        """Return `value` if it is one of the options; raises `KnobError` otherwise."""
        if value not in self.options or isinstance(value, bool) != isinstance(self.default, bool):
            raise KnobError(
                f"knob {self.name} takes {self.describe_values()}, not {format_value(value)}"
                + suggest_name(format_value(value), map(format_value, self.options))
            )
        return value


Knob = SplitKnob | ChoiceKnob


def find_value(config: Mapping[str, Value], knob: Knob) -> Value:
    """Return the value of a knob in a config. Without it, this is the knob's default; if the config has other knobs and
    the knob declares a value for such configs (`ChoiceKnob.missing`), it is that one.
    """
    if knob.name in config:
        return config[knob.name]
    if config and isinstance(knob, ChoiceKnob) and knob.missing is not None:
        return knob.missing
    return knob.default


def _make_column(values: Sequence[Value]) -> np.ndarray:
    """Return an array of values that keeps numbers as numbers if other values are strings."""
    num_strings = sum(isinstance(value, str) for value in values)
    return np.array(values, dtype=object if 0 < num_strings < len(values) else None)


@dataclass(frozen=True)
class Constraint:
    """A condition on the values of several knobs."""

    description: str  # the condition in words, for error messages
    predicate: Callable[[Columns], np.ndarray]  # function from columns to a bool array (n,)


class Knobs:
    """Knobs of one run of a schedule: values from a config or defaults, and the declarations that the schedule made.

    Args:
        config: Values by knob name; missing knobs take their defaults.

    Raises:
        KnobError: The config is not a mapping.

    Examples:
        >>> k = Knobs({"tile_w": (-1, 8)})
        >>> k.split("tile_w", 56, 2, (-1, 4)), k.choice("unroll", (0, 512), 512)
        ((7, 8), 512)
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
        """Declare a split of a loop and return its factors, outermost first, all positive.

        Args:
            name: Name of the knob.
            extent: Number of iterations of the loop.
            parts: Number of nested loops.
            default: Preferred factors, -1 first; `find_nearest_factors` fits them to the extent.
            exact: Whether the default must divide the extent. Reductions need this, because an overhang costs a test in
                each iteration.
            overhang: Maximum overhang of searched tiles, as a fraction of the extent.
            allow_mismatch: Whether values from AutoTVM's logs that do not fit the extent are accepted.

        Raises:
            KnobError: The configured value does not fit the extent.
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
        """Declare a split whose factors have names, and return it as a `Tile`.

        Args:
            name: Name of the knob.
            extent: Number of iterations of the axis.
            levels: Names of the nested loops, outermost first.
            default: Preferred factors by level, without the outermost; missing levels are 1.
            exact: As for `split`.
            overhang: As for `split`.
            allow_mismatch: As for `split`.

        Raises:
            KnobError: As for `split`.
        """
        preferred = (-1, *((default or {}).get(level, 1) for level in levels[1:]))
        factors = self.split(
            name, extent, len(levels), preferred, exact=exact, overhang=overhang, allow_mismatch=allow_mismatch
        )
        return Tile(extent, dict(zip(levels, factors, strict=True)))

    def choice(self, name: str, options: Sequence[Value], default: Value, *, missing: Value = None) -> Value:
        """Declare a knob with a list of options and return its value.

        Args:
            name: Name of the knob.
            options: Values that it accepts.
            default: Default value, one of the options.
            missing: Value of configs that have other knobs but lack this one; None for the default. A knob whose
                default is not the behaviour before the knob existed states that behaviour here, so that configs in
                older logs keep their kernels.

        Raises:
            KnobError: The configured value is not one of the options.
        """
        return self._declare(ChoiceKnob(name, tuple(options), default, missing))

    def _declare(self, knob: Knob) -> Value:
        value = find_value(self._requested, knob)
        resolved_value = knob.resolve(value)
        self.declared[knob.name] = knob
        self.config[knob.name] = tuple(value) if isinstance(value, (tuple, list)) else value
        self._resolved_values[knob.name] = resolved_value
        return resolved_value

    def require(self, description: str, predicate: Callable[[Columns], np.ndarray]) -> None:
        """Add a constraint on the knobs declared so far, for searches and for configured values.

        Default values are not checked, so that a workload can be searched even if the defaults do not fit it.

        Args:
            description: The condition in words, such as `tile_x has at most 32 threads`.
            predicate: Function from the values of many configs by knob to a bool array (n,). A split is an array (n,
                num_factors) without -1, any other knob an array (n,).

        Raises:
            KnobError: The configured values violate the constraint.
        """
        self.constraints.append(Constraint(description, predicate))
        columns = {name: _make_column([answer]) for name, answer in self._resolved_values.items()}
        if self._requested and not np.all(predicate(columns)):
            values = " ".join(f"{name}={format_value(value)}" for name, value in self.config.items())
            raise KnobError(f"knob values {values} violate the constraint: {description}")

    def prune(self, description: str, predicate: Callable[[Columns], np.ndarray]) -> None:
        """Add a constraint for searches only, which configured values may violate; the arguments are those of
        `require`.
        """
        self.constraints.append(Constraint(description, predicate))

    @property
    def values(self) -> dict[str, Any]:
        """Values of the declared knobs by name; a split's are its factors without -1."""
        return dict(self._resolved_values)

    def check_unknown_knobs(self, schedule_name: str) -> None:
        """Raise `KnobError` for a configured knob that the schedule did not declare."""
        for name in self._requested:
            if name not in self.declared:
                suggestion = suggest_knob(name, self.declared)
                declared_names = ", ".join(self.declared) or "none"
                raise KnobError(
                    f"schedule {schedule_name} has no knob {name!r}{suggestion}; its knobs here: {declared_names}"
                )


def suggest_name(name: str, known_names: Iterable[str]) -> str:
    """Return "; the nearest is NAME" with the known name that is most similar to a misspelled one, or "" if none is.

    Examples:
        >>> suggest_name("tile_ww", ["tile_c", "tile_w"]), suggest_name("unroll", ["tile_c"])
        ('; the nearest is tile_w', '')
    """
    similar_names = difflib.get_close_matches(name, list(known_names), n=1)
    return f"; the nearest is {similar_names[0]}" if similar_names else ""


def suggest_knob(name: str, knobs: Mapping[str, Knob]) -> str:
    """Return "; the nearest is KNOB, which takes …" with the knob whose name is most similar, or "" if none is."""
    similar_names = difflib.get_close_matches(name, list(knobs), n=1)
    return "".join(f"; the nearest is {known}, which takes {knobs[known].describe_values()}" for known in similar_names)


def format_value(value: object) -> str:
    """Return a knob's value in the syntax of `--set knob=VALUE`.

    Examples:
        >>> format_value((-1, 4))
        '-1,4'
    """
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def parse_value(text: str) -> Value:
    """Return a knob's value from the text after `--set knob=`: integers separated by commas, true/false, or a word.

    Examples:
        >>> parse_value("-1,4"), parse_value("true"), parse_value("512")
        ((-1, 4), True, 512)
    """
    boolean_words = {"true": True, "false": False}
    if text.lower() in boolean_words:
        return boolean_words[text.lower()]
    try:
        numbers = tuple(int(number_text) for number_text in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


class Tile:
    """An axis of `extent` iterations split into nested loops, each with a name and a factor, outermost first.

    The factors are ints for one config, or columns of shape (n,) for many configs, so one formula serves both. Each
    factor is an attribute with its level's name (`tile.thread`). The outermost factor is the number of tiles that cover
    the extent.

    Attributes:
        extent: Number of iterations of the axis.
        factors: Factors by level name, outermost first.

    Example:
        >>> tile = Tile(56, {"block": 4, "thread": 7, "local": 2})
        >>> tile.size, tile.thread, tile.divides
        (14, 7, True)
    """

    def __init__(self, extent: int, factors: Mapping[str, Any]) -> None:
        self.extent = extent
        self.factors = dict(factors)

    @classmethod
    def from_column(cls, extent: int, levels: Sequence[str], column: np.ndarray | tuple[int, ...]) -> Tile:
        """Return the tile of one config's factors, without -1, or of many configs' as a column (n, levels)."""
        factors = column.T if isinstance(column, np.ndarray) else column
        return cls(extent, dict(zip(levels, factors, strict=True)))

    def __getattr__(self, level: str) -> Any:
        factors = self.__dict__.get("factors", {})
        if level not in factors:
            raise AttributeError(f"expected a tile level among {', '.join(factors)}, not {level!r}")
        return factors[level]

    def __repr__(self) -> str:
        return f"Tile({self.extent}, {self.factors})"

    @property
    def size(self) -> Any:
        """Number of iterations that the inner loops cover: the product of all factors except the outermost."""
        return math.prod(list(self.factors.values())[1:])

    @property
    def divides(self) -> Any:
        """Whether the tile size divides the extent, so that no tile overhangs the axis."""
        return self.extent % self.size == 0
