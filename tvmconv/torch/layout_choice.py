"""The choice of the layout of each tensor of a model: the assignment with the lowest total time.

The tensors are variables, whose values are layouts. A `CostTable` has the seconds that some variables cost together: a
kernel for each layout of its input and output, or the conversion between two layouts. In a chain of layers this is a
shortest path, which dynamic programming finds. Branches, such as residuals, make it a graph; eliminating one variable
after another solves it exactly as long as few variables meet in one table.

Source: Dechter, "Bucket elimination: A unifying framework for reasoning", 1999.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

MAX_TABLE_VARIABLES = 12  # a table of more variables is avoided: one of them gets its value of the best uniform choice

Assignment = dict[Hashable, str]


@dataclass(frozen=True)
class CostTable:
    """Seconds by the values of some variables, in their order."""

    variables: tuple[Hashable, ...]
    seconds: Mapping[tuple[str, ...], float]

    def look_up(self, assignment: Mapping[Hashable, str]) -> float:
        """Return the seconds of an assignment of all variables."""
        return self.seconds[tuple(assignment[variable] for variable in self.variables)]


def minimize_cost(domains: Mapping[Hashable, Sequence[str]], tables: Sequence[CostTable]) -> Assignment:
    """Return the assignment with the lowest sum of all tables; of equal ones, that with the earlier values.

    Args:
        domains: Values that each variable may have, the preferred one first.
        tables: Costs, with an entry for each combination of the values of their variables.

    Examples:
        >>> costs = CostTable(("x", "y"), {("a", "a"): 2.0, ("a", "b"): 1.0})
        >>> minimize_cost({"x": ("a",), "y": ("a", "b")}, [costs])
        {'x': 'a', 'y': 'b'}
    """
    remaining, active = dict(domains), list(tables)
    eliminated: list[tuple[Hashable, tuple[Hashable, ...], dict[tuple[str, ...], str]]] = []
    neighbors = _find_neighbors(active)
    while remaining:
        variable = min(remaining, key=lambda candidate: len(neighbors[candidate]))
        if len(neighbors[variable]) > MAX_TABLE_VARIABLES:
            variable = max(remaining, key=lambda candidate: len(neighbors[candidate]))
            remaining[variable] = (_choose_uniform(domains, tables)[variable],)
        own = [table for table in active if variable in table.variables]
        scope, best_values, reduced = tuple(neighbors.pop(variable, ())), {}, {}
        for neighbor in scope:
            del neighbors[neighbor][variable]
        if len(remaining[variable]) == 1:  # it is a constant, which connects no others
            (value,) = remaining[variable]
            active = [_fix(table, variable, value) if variable in table.variables else table for table in active]
            eliminated.append((variable, (), {(): value}))
            del remaining[variable]
            continue
        for values in itertools.product(*(remaining[neighbor] for neighbor in scope)):
            assignment = dict(zip(scope, values, strict=True))
            costs = [
                sum(table.look_up({**assignment, variable: value}) for table in own) for value in remaining[variable]
            ]
            index = costs.index(min(costs))
            best_values[values], reduced[values] = remaining[variable][index], costs[index]
        active = [table for table in active if variable not in table.variables] + [CostTable(scope, reduced)]
        for neighbor in scope:
            neighbors[neighbor].update(dict.fromkeys(other for other in scope if other != neighbor))
        eliminated.append((variable, scope, best_values))
        del remaining[variable]
    chosen: Assignment = {}
    for variable, scope, best_values in reversed(eliminated):
        chosen[variable] = best_values[tuple(chosen[neighbor] for neighbor in scope)]
    return {variable: chosen[variable] for variable in domains}


def compute_cost(assignment: Mapping[Hashable, str], tables: Sequence[CostTable]) -> float:
    """Return the sum of all tables for an assignment."""
    return sum(table.look_up(assignment) for table in tables)


def _find_neighbors(tables: Sequence[CostTable]) -> defaultdict[Hashable, dict[Hashable, None]]:
    """Return the other variables of all tables with a variable, by variable."""
    neighbors: defaultdict[Hashable, dict[Hashable, None]] = defaultdict(dict)
    for table in tables:
        for variable in table.variables:
            neighbors[variable].update(dict.fromkeys(neighbor for neighbor in table.variables if neighbor != variable))
    return neighbors


def _fix(table: CostTable, variable: Hashable, value: str) -> CostTable:
    """Return a table for one value of a variable."""
    index = table.variables.index(variable)
    seconds = {
        values[:index] + values[index + 1 :]: cost for values, cost in table.seconds.items() if values[index] == value
    }
    return CostTable(table.variables[:index] + table.variables[index + 1 :], seconds)


def _choose_uniform(domains: Mapping[Hashable, Sequence[str]], tables: Sequence[CostTable]) -> Assignment:
    """Return the best assignment that gives all variables the same value where their domains have it."""
    names = dict.fromkeys(itertools.chain.from_iterable(domains.values()))
    assignments = [
        {variable: name if name in domain else domain[0] for variable, domain in domains.items()} for name in names
    ]
    costs = [compute_cost(assignment, tables) for assignment in assignments]
    return assignments[costs.index(min(costs, default=math.inf))] if costs else {}
