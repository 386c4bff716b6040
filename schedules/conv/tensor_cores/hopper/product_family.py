"""Schedules whose matrix product depends on one knob: the parts of a wgrad, or the tile size of Winograd's algorithm.

`hopper` computes the product. Rules, resources and estimates of a config are those of the product of its knob's value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv

from ...tile_config import Rule
from .knobs import compute_usage
from .latency import estimate_latency_us
from .tile_config import HopperTileConfig

ListRules = Callable[[int], list[Rule]]  # the rules of a value of the knob, of which some are those of all values


@dataclass(frozen=True)
class ProductFamily:
    """The products of a schedule, of which a knob selects one."""

    knob: str  # name of the knob
    products: Mapping[int, Conv]  # product by value of the knob, with filters of one tap
    other_us: Mapping[int, float]  # estimated latency of the other launches in microseconds, by value of the knob
    complete: Callable[[Columns], Columns] = dict  # function that adds the columns of knobs that the schedule lacks

    def estimate_us(self, config: HopperTileConfig, value: int) -> Any:
        """Return the estimated latency of all launches in microseconds."""
        return estimate_latency_us(config, self.products[value]) + self.other_us[value]

    def add_rules(self, k: Knobs, required: ListRules, pruned: ListRules) -> None:
        """Add the rules that every config meets, and those that a config worth searching meets.

        Rules of several values with the same description become one, which other values meet.
        """
        for add, list_rules in ((k.require, required), (k.prune, pruned)):
            predicates: dict[str, dict[int, Callable[[Any], Any]]] = {}  # by description and value
            for value in self.products:
                for description, predicate in list_rules(value):
                    predicates.setdefault(description, {})[value] = predicate
            for description, by_value in predicates.items():
                add(description, functools.partial(self._test, by_value))

    def compute_usage(self, columns: Columns) -> ResourceUsage:
        """Return the resources that the products use, with the latency of all launches in the estimate."""
        usages: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        for value, rows in self._rows_by_value(columns):
            selected = self.complete(self._select(columns, rows))
            quantities = compute_usage(self.products[value], selected).to_columns()
            usages.append((rows, quantities | {"estimate": quantities["estimate"] + self.other_us[value]}))
        quantities = {name: _join((rows, usage[name]) for rows, usage in usages) for name in usages[0][1]}
        return ResourceUsage(**quantities, estimate_seconds_per_unit=1e-6)

    def _test(self, predicates: Mapping[int, Callable[[Any], Any]], columns: Columns) -> np.ndarray:
        return _join(
            (rows, self._test_rows(predicates[value], columns, rows) if value in predicates else True)
            for value, rows in self._rows_by_value(columns)
        )

    def _test_rows(self, predicate: Callable[[Any], Any], columns: Columns, rows: np.ndarray) -> Any:
        return predicate(HopperTileConfig.from_columns(self.complete(self._select(columns, rows))))

    def _rows_by_value(self, columns: Columns) -> list[tuple[int, np.ndarray]]:
        """Return the values of the knob that occur, or any of them if there are no rows, each with its rows."""
        values = columns[self.knob]
        return [(value, values == value) for value in np.unique(values).tolist() or list(self.products)[:1]]

    def _select(self, columns: Columns, rows: np.ndarray) -> Columns:
        return {name: column[rows] for name, column in columns.items()}


def _join(parts: Iterable[tuple[np.ndarray, Any]]) -> np.ndarray:
    """Return one column from the values of some rows each."""
    columns = [(rows, np.broadcast_to(values, (int(np.count_nonzero(rows)),))) for rows, values in parts]
    joined = np.empty(len(columns[0][0]), np.result_type(*(values for _, values in columns)))
    for rows, values in columns:
        joined[rows] = values
    return joined
