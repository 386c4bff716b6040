"""Knobs: defaults that fit the extent, values that are checked, spaces that are counted and not listed."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvmconv import KnobError
from tvmconv.space import Knobs, SplitKnob, parse_value
from tvmconv.space.factors import find_nearest_factors


@pytest.mark.parametrize(
    ("extent", "preferred", "expected"),
    [
        (56, (2, 16, 2), (2, 14, 2)),  # a whole row, no overhang
        (10, (1, 4, 8), (1, 2, 5)),  # all ten channels, no overhang
        (1, (4, 8), (1, 1)),
        (1025, (2, 16, 2), (2, 16, 2)),  # an overhang of 6 % is cheaper than thinner tiles
        (7, (2, 2), (2, 2)),
    ],
)
def test_a_default_that_does_not_divide_shrinks_to_the_nearest(extent, preferred, expected):
    assert find_nearest_factors(extent, preferred) == expected


@given(st.integers(1, 3000), st.lists(st.integers(1, 8), min_size=1, max_size=3), st.booleans())
def test_a_default_never_exceeds_what_was_asked_for_unless_exact(extent, preferred, exact):
    factors = find_nearest_factors(extent, tuple(preferred), exact_divisors=exact)
    assert all(f >= 1 for f in factors)
    if exact:
        assert extent % math.prod(factors) == 0
    else:
        assert all(f <= p for f, p in zip(factors, preferred, strict=True))


def test_a_split_covers_its_extent_with_the_outermost_factor():
    k = Knobs({"tile": (-1, 3, 4)})
    assert k.split("tile", 25, parts=3, default=(-1, 1, 1)) == (3, 3, 4)
    assert k.config == {"tile": (-1, 3, 4)}


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),  # too few parts
        (-1, 0, 4),
        (-1, -1, 4),
        (2, 3, 4),  # 2 tiles of 12 do not cover 25
        (-1, 2.0, 4),
        (-1, True, 4),
        "-1,2,4",
        7,
        None,
    ],
)
def test_a_malformed_split_is_refused_with_an_example(value):
    with pytest.raises(KnobError, match=r"knob tile takes 3 factors of 25 such as -1,5,5") as caught:
        Knobs({"tile": value}).split("tile", 25, parts=3, default=(-1, 5, 5))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("extent", "tile"), [(1, 2), (7, 14), (64, 4000)])
def test_a_tile_twice_as_large_as_its_extent_is_refused(extent, tile):
    with pytest.raises(KnobError, match=f"a tile of {tile} is too large for {extent}"):
        Knobs({"tile": (-1, tile)}).split("tile", extent, parts=2, default=(-1, 1))
    assert Knobs({"tile": (-1, tile - 1)}).split("tile", tile, parts=2, default=(-1, 1)) == (2, tile - 1)


def test_a_choice_is_one_of_its_options():
    assert Knobs({"step": 512}).choice("step", (0, 512), default=0) == 512
    with pytest.raises(KnobError, match="knob step takes one of 0, 512, not 7"):
        Knobs({"step": 7}).choice("step", (0, 512), default=0)
    with pytest.raises(KnobError, match="not True"):
        Knobs({"step": True}).choice("step", (0, 1), default=0)


def test_configs_without_a_newer_knob_have_its_former_behaviour():
    def declare(config):
        k = Knobs(config)
        return k.choice("tile", (1, 2), 2), k.choice("order", ("old", "new"), "new", missing="old")

    assert declare({}) == (2, "new")
    assert declare({"tile": 1}) == (1, "old")
    assert declare({"order": "new"}) == (2, "new")


def test_a_knob_that_nothing_asked_for_is_named():
    k = Knobs({"tile_q": (1, 1)})
    k.choice("unroll", (False, True), default=False)
    with pytest.raises(KnobError, match="schedule tiling has no knob 'tile_q'; its knobs here: unroll"):
        k.check_unknown_knobs("tiling")


@given(st.integers(1, 200), st.integers(1, 4))
def test_the_size_of_a_split_counts_its_ordered_factorisations(extent, parts):
    divisors = [d for d in range(1, extent + 1) if extent % d == 0]
    listed = sum(math.prod(f) == extent for f in itertools.product(divisors, repeat=parts))
    assert SplitKnob("tile", extent, parts, (-1,) + (1,) * (parts - 1)).size == listed


@given(st.integers(1, 300), st.integers(1, 4), st.floats(0, 0.5))
def test_every_option_of_a_split_can_be_set_and_is_in_its_table(extent, parts, overhang):
    tile = SplitKnob("tile", extent, parts, (-1,) + (1,) * (parts - 1), overhang)
    assert len(set(tile.options)) == tile.size
    assert [tile.resolve(option) for option in tile.options] == [tuple(row) for row in tile.option_table.tolist()]
    assert all(extent <= math.prod(row) <= extent * (1 + overhang) for row in tile.option_table.tolist())


def test_long_extent_does_not_list_tiles_that_no_block_can_take():
    assert SplitKnob("tile", 100_003, 4, (-1, 1, 1, 1), max_overhang_fraction=0.15).size < 50_000


def few_threads(columns):
    return columns["tile"][:, 1] <= columns["most"]


def test_config_that_violates_a_condition_is_refused():
    k = Knobs({"tile": (-1, 8)})
    k.split("tile", 64, parts=2, default=(-1, 4))
    k.choice("most", (4, 16), default=4)
    with pytest.raises(KnobError, match=r"tile=-1,8 most=4 violate the constraint: at most `most` threads"):
        k.require("at most `most` threads", few_threads)


@pytest.mark.parametrize(
    ("text", "value"),
    [("-1,4,8", (-1, 4, 8)), ("512", 512), ("true", True), ("False", False), ("warp", "warp"), ("1,,2", "1,,2")],
)
def test_values_are_read_from_the_command_line(text, value):
    assert parse_value(text) == value
