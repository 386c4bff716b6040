"""Tiles: factors by name, and one formula for one config and for many."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmconv.arithmetic import ceil_div
from tvmconv.space import Knobs, Tile

LEVELS = ("block", "vthread", "thread", "local")


def tile(extent, *inner):
    """Of an axis, with an outermost factor that covers it."""
    return Tile(extent, dict(zip(LEVELS, (ceil_div(extent, math.prod(inner)), *inner), strict=True)))


def test_a_level_that_is_not_there_is_named_with_those_there_are():
    with pytest.raises(AttributeError, match=r"tile level among block, vthread, thread, local, not 'warp'"):
        tile(8, 1, 2, 4).warp  # noqa: B018


def test_sizes_by_hand():
    cut = tile(100, 2, 16, 3)
    assert cut.size == 2 * 16 * 3
    assert not cut.divides
    assert tile(192, 2, 16, 3).divides


@given(st.integers(1, 500), st.lists(st.tuples(*[st.integers(1, 8)] * 3), min_size=1, max_size=5))
def test_a_formula_of_columns_is_that_of_each_config(extent, configs):
    each = [tile(extent, *inner) for inner in configs]
    rows = np.array([list(cut.factors.values()) for cut in each])
    columns = Tile.from_column(extent, LEVELS, rows)
    assert Tile.from_column(extent, LEVELS, tuple(rows[0])).factors == each[0].factors
    assert columns.size.tolist() == [cut.size for cut in each]
    assert columns.divides.tolist() == [cut.divides for cut in each]
    assert (columns.thread * columns.local).tolist() == [cut.thread * cut.local for cut in each]


def test_a_knob_of_a_tile_is_what_its_column_holds():
    k = Knobs({"tile_x": (-1, 1, 7, 2)})
    asked = k.tile("tile_x", 28, LEVELS, {"thread": 4})
    (column,) = [knob.resolve((-1, 1, 7, 2)) for knob in k.declared.values()]
    assert tuple(asked.factors.values()) == column == (2, 1, 7, 2)


def test_a_tile_travels_as_it_is():
    import copy
    import pickle

    for again in (copy.copy(tile(28, 1, 7, 2)), pickle.loads(pickle.dumps(tile(28, 1, 7, 2)))):
        assert (again.extent, again.factors) == (28, tile(28, 1, 7, 2).factors)
