"""The layouts with the lowest total time, on graphs small enough to try all assignments."""

import itertools

import numpy as np
import pytest

from tvmconv.torch import layout_choice
from tvmconv.torch.layout_choice import CostTable, compute_cost, minimize_cost

LAYOUTS = ("nchw", "nhwc")


def make_table(rng, variables, domains):
    values = itertools.product(*(domains[variable] for variable in variables))
    return CostTable(tuple(variables), {each: float(rng.random()) for each in values})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_variables", [12, 1])
def test_no_assignment_is_cheaper(seed, max_variables, monkeypatch):
    """With large tables the result is exact; with small ones it is an assignment of the domains."""
    monkeypatch.setattr(layout_choice, "MAX_TABLE_VARIABLES", max_variables)
    rng = np.random.default_rng(seed)
    domains = {i: LAYOUTS if rng.random() < 0.8 else LAYOUTS[:1] for i in range(8)}
    tables = [make_table(rng, rng.choice(8, 2 + i % 2, replace=False).tolist(), domains) for i in range(12)]
    found = minimize_cost(domains, tables)
    every = [dict(zip(domains, values, strict=True)) for values in itertools.product(*domains.values())]
    least = min(compute_cost(each, tables) for each in every)
    assert found in every
    assert max_variables == 1 or compute_cost(found, tables) == pytest.approx(least)


def test_a_chain_changes_its_layout_at_its_ends_only_if_it_is_long_enough():
    def choose(num_layers):
        names = range(num_layers + 1)
        domains = {i: LAYOUTS if 0 < i < num_layers else LAYOUTS[:1] for i in names}
        seconds = {("nchw", "nchw"): 3.0, ("nchw", "nhwc"): 4.0, ("nhwc", "nchw"): 4.0, ("nhwc", "nhwc"): 1.0}
        tables = [
            CostTable(
                (i, i + 1), {key: s for key, s in seconds.items() if key[0] in domains[i] and key[1] in domains[i + 1]}
            )
            for i in range(num_layers)
        ]
        return [*minimize_cost(domains, tables).values()]

    assert choose(2) == ["nchw"] * 3
    assert choose(4) == ["nchw", "nhwc", "nhwc", "nhwc", "nchw"]
