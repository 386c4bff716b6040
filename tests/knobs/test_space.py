"""Spaces: points and configs are two spellings of one thing, and no product is ever listed."""

import itertools
import time

import numpy as np
import pytest

from tvmconv import KnobError
from tvmconv.space import ChoiceKnob, Constraint, Knobs, SplitKnob
from tvmconv.space.search_space import BlockLimits, ResourceUsage, Space


def space_of(*knobs, **more):
    return Space({knob.name: knob for knob in knobs}, **more)


SMALL = space_of(
    SplitKnob("tile", 12, 3, (-1, 2, 2)),
    ChoiceKnob("unroll", (0, 16, 512), 16),
    ChoiceKnob("order", ("rows", "columns"), "rows"),
    ChoiceKnob("staged", (False, True), False),
)
HUGE = space_of(*(SplitKnob(f"tile_{i}", 2**20, 4, (-1, 1, 1, 1)) for i in range(8)))


def rows(points):
    return {tuple(point) for point in points.tolist()}


def usage_of_tile(columns):
    threads = columns["tile"][:, 1]
    one = np.ones_like(threads)
    return ResourceUsage(threads, 4096 * columns["tile"][:, 2], one, one, reuse=threads / 2)


def test_a_large_space_costs_nothing_to_hold():
    start = time.process_time()
    assert HUGE.size == 1771**8 > 10**25
    assert len(HUGE.slice_points(10**25, 3)) == 3
    assert len(HUGE.sample_legal(100, np.random.default_rng(0))) == 100
    assert time.process_time() - start < 1


def test_walking_a_space_lists_each_config_once():
    points = SMALL.slice_points(0, 10**6)
    assert [SMALL.point_from_config(SMALL.config_from_point(point)).tolist() for point in points] == points.tolist()
    configs = [tuple(SMALL.config_from_point(point).values()) for point in points]
    assert configs == list(itertools.product(*(knob.options for knob in SMALL.knobs.values())))


def test_config_may_leave_knobs_out_and_spell_splits_as_old_logs():
    assert SMALL.config_from_point(SMALL.point_from_config({"tile": [3, 2, 2], "unroll": 0})) == {
        **SMALL.default,
        "unroll": 0,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tile_q": 1}, "no knob 'tile_q'; the knobs are tile, unroll, order, staged"),
        ({"tile": (5, 2, 2)}, "12 needs 3 x 4"),
        ({"tile": (-1, 5, 1)}, "knob tile can be -1,5,1, but it is not searched"),
        ({"unroll": 7}, "one of 0, 16, 512, not 7"),
    ],
)
def test_a_config_outside_of_the_space_is_refused_in_one_line(config, message):
    with pytest.raises(KnobError, match=message):
        SMALL.point_from_config(config)


def test_legal_points_fulfil_conditions_and_limits():
    rule = Constraint("no unrolled columns", lambda c: (c["order"] == "rows") | (c["unroll"] == 0))
    limits = BlockLimits(max_threads=4, shared_bytes=3 * 4096)
    space = space_of(*SMALL.knobs.values(), constraints=[rule], usage_from_columns=usage_of_tile, limits=limits)
    expected = {
        tuple(point)
        for point in space.slice_points(0, space.size).tolist()
        for config in [space.config_from_point(point)]
        if config["tile"][1] <= 4 and config["tile"][2] <= 3
        if config["order"] == "rows" or config["unroll"] == 0
    }
    assert rows(space.enumerated_legal) == expected
    assert rows(space.sample_legal(10**6, np.random.default_rng(0))) == expected


def test_a_sample_of_a_large_space_is_distinct_legal_and_seeded():
    even = Constraint("even", lambda c: c["tile_0"][:, 1] % 2 == 0)
    space = space_of(*HUGE.knobs.values(), constraints=[even])
    sample = space.sample_legal(500, np.random.default_rng(7))
    assert len(rows(sample)) == 500
    assert space.is_legal(sample).all()
    assert (sample == space.sample_legal(500, np.random.default_rng(7))).all()


def test_a_space_without_a_legal_point_gives_none_and_ends():
    space = space_of(*HUGE.knobs.values(), constraints=[Constraint("never", lambda c: c["tile_0"][:, 0] < 0)])
    assert space.sample_legal(5, np.random.default_rng(0)).shape == (0, 8)


def test_neighbours_are_all_legal_points_one_knob_away():
    rule = Constraint("staged tiles only", lambda c: c["staged"] | (c["tile"][:, 2] == 2))
    space = space_of(*SMALL.knobs.values(), constraints=[rule])
    here = space.point_from_config(space.default)
    expected = {tuple(p) for p in space.enumerated_legal.tolist() if np.count_nonzero(p != here) == 1}
    assert rows(space.list_neighbors(here)) == expected


def test_neighbours_of_several_points_are_those_of_each():
    points = SMALL.slice_points(3, 5)
    for point, neighbours in zip(points, SMALL.list_neighbors_of_each(points), strict=True):
        assert neighbours.tolist() == SMALL.list_neighbors(point).tolist()


@pytest.mark.parametrize("is_met", [True, False])
def test_a_condition_may_return_one_bool_for_all_configs(is_met):
    space = space_of(*SMALL.knobs.values(), constraints=[Constraint("as the workload is", lambda c: is_met)])
    assert space.is_legal(SMALL.enumerated_legal).tolist() == [is_met] * SMALL.size


def nearest(config, space=SMALL):
    return space.config_from_point(space.project(config))


def test_the_nearest_point_to_a_config_of_the_space_is_its_own():
    for point in SMALL.slice_points(0, SMALL.size):
        assert SMALL.project(SMALL.config_from_point(point)).tolist() == point.tolist()


@pytest.mark.parametrize(
    ("tile", "nearest_one"),
    [
        ((-1, 4, 4), (-1, 3, 4)),  # 4 x 4 is no tile of 12; a factor of 4/3 is less than one of 2
        ((-1, 1, 64), (-1, 1, 12)),
        ((-1, 5, 1), (-1, 6, 1)),  # 6/5 is nearer than 5/4
        ((3, 2, 2), (-1, 2, 2)),
        ([-1, 3, 1], (-1, 3, 1)),  # as JSON has it
        ((-1, 2), SMALL.default["tile"]),  # of another number of parts
        ((-1, 0, 2), SMALL.default["tile"]),
        (7, SMALL.default["tile"]),
    ],
)
def test_factors_are_alike_by_their_ratios(tile, nearest_one):
    assert nearest({"tile": tile})["tile"] == nearest_one


@pytest.mark.parametrize(("unroll", "nearest_one"), [(10, 16), (7, 0), (300, 512), (1e9, 512), (-5, 0), (16.0, 16)])
def test_of_numbers_the_option_beside_them_is_nearest(unroll, nearest_one):
    assert nearest({"unroll": unroll})["unroll"] == nearest_one


@pytest.mark.parametrize("config", [{"order": "diagonal"}, {"unroll": "all"}, {"staged": 3}, {"gone": 1}, {}])
def test_unknown_words_and_missing_knobs_take_the_default(config):
    assert nearest(config) == SMALL.default


def test_features_are_logarithms_numbers_and_one_hot_words():
    space = space_of(*SMALL.knobs.values(), usage_from_columns=usage_of_tile)
    matrix, names = space.compute_features(
        space.point_from_config({"tile": (-1, 2, 1), "order": "columns", "staged": True})[None]
    )
    features = dict(zip(names, matrix[0].tolist(), strict=True))
    assert matrix.dtype == np.float32
    assert features["tile.0"] == pytest.approx(np.log2(6))
    assert (features["tile.1"], features["tile.tile"], features["unroll"]) == (1, 1, 16)
    assert (features["order=rows"], features["order=columns"], features["staged"]) == (0, 1, 1)
    assert (features["threads"], features["reuse"]) == pytest.approx((np.log2(3), 1))


def test_a_schedule_without_knobs_is_a_space_of_one():
    space = space_of()
    assert space.size == 1
    assert space.config_from_point(space.sample_legal(3, np.random.default_rng(0))[0]) == {}
    assert space.list_neighbors(space.point_from_config({})).shape == (0, 0)
    assert space.project({"tile": (-1, 2)}).shape == (0,)
    assert space.compute_features(space.enumerated_legal)[0].shape == (1, 0)


@pytest.mark.parametrize(("divisor", "is_listed"), [(1000, True), (10, False)])
def test_large_spaces_are_listed_if_few_points_are_legal(divisor, is_listed):
    k = Knobs()
    for name in "abc":
        k.choice(name, range(100), 0)
    k.require("few", lambda columns: (columns["a"] * 100 + columns["b"]) % divisor == 7)
    legal = Space(k.declared, k.constraints).enumerated_legal
    assert (legal is not None) == is_listed
    assert legal is None or len(legal) == 100**3 // divisor
