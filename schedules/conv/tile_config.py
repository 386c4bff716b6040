"""Base of tile configs: a config as numbers, or many configs as columns, so that the same formulas serve both.

The kernel uses a config of numbers; search limits, latency estimates and defaults use columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tvmconv.space import Columns, Knobs

Config = TypeVar("Config", bound="TileConfig")
MAX_LATENCY_RATIO = 2.5  # maximum estimated latency of a searched config, relative to the best estimate
Rule = tuple[str, Callable[[Any], Any]]  # a condition on configs: its description, and whether it holds


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """A config, or many as columns; the attributes of a subclass are its knobs and what is the same for all configs."""

    @classmethod
    def from_columns(cls: type[Config], columns: Columns, **fixed: Any) -> Config:
        """Return the configs of columns by knob, or of one config's values; `fixed` attributes are no knobs."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**fixed, **{name: columns[name] for name in names if name in columns and name not in fixed})

    @classmethod
    def from_options(cls: type[Config], options: Mapping[str, Sequence[Any]], **fixed: Any) -> Config:
        """Return all combinations of options, with the last knob varying fastest."""
        grid = np.meshgrid(*options.values(), indexing="ij")
        return cls(**fixed, **{name: column.ravel() for name, column in zip(options, grid, strict=True)})

    def filter(self: Config, is_kept: Any) -> Config:
        """Return the configs of some rows."""
        return dataclasses.replace(self, **{name: column[is_kept] for name, column in self._columns().items()})

    def select_meeting(self: Config, rules: Iterable[Rule]) -> Config:
        """Return the configs that meet all rules."""
        configs = self
        for _, predicate in rules:  # one after another, so that each rule is evaluated for those that are left
            is_met = predicate(configs)
            configs = configs.filter(is_met) if np.ndim(is_met) else configs
        return configs

    def row(self: Config, index: int) -> Config:
        """Return one config."""
        return dataclasses.replace(self, **{name: column[index].item() for name, column in self._columns().items()})

    def _columns(self) -> dict[str, np.ndarray]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def select_cheapest(configs: Config, is_legal: Any, preferred: Iterable[Rule], costs: Any) -> Config:
    """Return the legal config with the lowest cost, among those that meet the preferred rules as far as any does.

    Args:
        configs: Many configs as columns, (n,).
        is_legal: Which of them are legal, (n,).
        preferred: Rules, the most important first; a rule that no config left meets is dropped.
        costs: Costs of the configs, (n,).
    """
    for _, predicate in preferred:
        is_useful = is_legal & predicate(configs)
        is_legal = is_useful if is_useful.any() else is_legal
    return configs.row(int(np.argmin(np.where(is_legal, costs, np.inf))))


def combine_overlapping(*cycles: Any) -> Any:
    """Return the estimated clock cycles of work that overlaps in part: more than the longest, less than the sum."""
    terms = np.stack(np.broadcast_arrays(*cycles))
    return 0.75 * terms.max(axis=0) + 0.25 * terms.sum(axis=0)


def overlap_cycles(fraction: float, *cycles: Any) -> Any:
    """Return the estimated clock cycles of work whose longest part hides a fraction of the others."""
    terms = np.stack(np.broadcast_arrays(*cycles))
    longest = terms.max(axis=0)
    return longest + (1 - fraction) * (terms.sum(axis=0) - longest)


def declare_choices(
    k: Knobs,
    options: Mapping[str, Sequence[Any]],
    default: TileConfig | Mapping[str, Any],
    missing: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Declare a knob for each list of options, with its default from a config or by name, and return the values.

    `missing` has the values of knobs that older configs lack, where these are not the defaults.
    """
    defaults, missing = vars(default) if isinstance(default, TileConfig) else default, missing or {}
    return {
        name: k.choice(name, choices, defaults[name], missing=missing.get(name)) for name, choices in options.items()
    }


def prune_by_estimate(k: Knobs, make_config: Callable[[Columns], Any], best_estimate: float) -> None:
    """Add the condition that the estimate of a config worth searching is near that of the default, the best one."""
    k.prune(
        f"the estimated latency is at most {MAX_LATENCY_RATIO} times that of the default",
        lambda columns: make_config(columns).estimated_cycles <= MAX_LATENCY_RATIO * best_estimate,
    )


def add_rules(
    k: Knobs, make_config: Callable[[Columns], Any], required: Iterable[Rule] = (), pruned: Iterable[Rule] = ()
) -> None:
    """Add conditions on configs: those that every config meets, and those that a config worth searching meets."""

    def on_columns(predicate: Callable[[Any], Any]) -> Callable[[Columns], Any]:
        return lambda columns: predicate(make_config(columns))

    for description, predicate in required:
        k.require(description, on_columns(predicate))
    for description, predicate in pruned:
        k.prune(description, on_columns(predicate))
