"""One search over several schedules: what is known comes first, trials go to what is fast, the fastest are refined."""

import itertools
import json
import zlib

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.registry import Schedule
from tvmconv.search.portfolio import (
    LOW_PRIORITY_WEIGHT,
    MAX_INITIAL_FAILURES,
    NUM_LOCAL_SEARCH_STARTS,
    PortfolioMember,
    PortfolioSearch,
)
from tvmconv.search.tuners import create_tuner
from tvmconv.space import ChoiceKnob, Constraint, SplitKnob
from tvmconv.space.search_space import Space

WORKLOAD = tc.parse("conv2d:1x4x8x8,4x4x1x1")


def function(s, w, k):
    """Never run: what a schedule does is made up here."""


def space(options=1000, conditions=()):
    """A space of so many configs for each of two words."""
    knobs = [ChoiceKnob("number", tuple(range(options)), 0), ChoiceKnob("order", ("rows", "columns"), "rows")]
    return Space({knob.name: knob for knob in knobs}, conditions)


SMALL, ODD = space(3), space(100, [Constraint("odd", lambda columns: columns["number"] % 2 == 1)])

DEFAULT_OF_B = [("b", space().default)]


def entrant(name, there=None, weight=1.0, tuner="random"):
    return PortfolioMember(
        Schedule(name, "conv2d", function, ("float32",), 0), create_tuner(tuner, there or space(), seed=1), weight
    )


def record(name, config, seconds):
    """What came of a config; None for one that fails."""
    error = ErrorKind.RUNTIME if seconds is None else ErrorKind.NONE
    return Record(WORKLOAD, name, config, "a device", "opencl", times=(seconds,) if seconds else (), error=error)


def search(contest, trials, costs, batch=4, **how):
    """Propose and learn so many trials, where the configs of a schedule take so many seconds; what was proposed."""
    proposed = []
    while len(proposed) < trials and (now := contest.ask(batch, **how)):
        contest.tell([record(name, config, costs[name]) for name, config in now])
        proposed += now
    return proposed


def spelt(proposals):
    return [(name, json.dumps(config)) for name, config in proposals]


def shares(proposed):
    """Which part of the proposals each schedule has."""
    names = [name for name, _ in proposed]
    return {name: names.count(name) / len(names) for name in dict.fromkeys(names)}


def test_low_priority_configs_wait_for_a_time_of_another_schedule():
    slow, late = entrant("slow", weight=LOW_PRIORITY_WEIGHT), entrant("late", weight=LOW_PRIORITY_WEIGHT)
    slow.min_seconds = 2.0
    contest = PortfolioSearch(
        [entrant("a", ODD), slow, late], [[(name, ODD.default) for name in ("slow", "late", "a")]]
    )
    assert {name for name, _ in contest.ask(4)} == {"a"}
    assert {name for name, _ in contest.ask(4)} == {"a"}  # although nothing else is enqueued
    contest.tell([record("a", ODD.default, 1.0)])
    assert contest.ask(1)[0][0] == "late"  # and not the one that takes two seconds at least
    assert "slow" not in {name for name, _ in contest.ask(50)}


def test_low_priority_configs_come_at_once_if_the_others_have_no_more():
    few = entrant("few", space(1))
    contest = PortfolioSearch([few, entrant("late", weight=LOW_PRIORITY_WEIGHT)], [[("late", space().default)]])
    assert [name for name, _ in search(contest, 3, {"few": None, "late": 1.0}, batch=2)][:3] == ["few", "few", "late"]


def test_schedule_a_fifth_slower_has_a_quarter_of_the_trials():
    found = shares(search(PortfolioSearch([entrant("a"), entrant("b")]), 400, {"a": 1.0, "b": 1.2}))
    assert found["b"] / found["a"] == pytest.approx(0.25, abs=0.05)


def test_one_that_always_fails_has_no_more_trials_soon():
    proposed = search(PortfolioSearch([entrant("broken"), entrant("a")]), 400, {"a": 1.0, "broken": None}, batch=1)
    names = [name for name, _ in proposed]
    assert 1 <= names.count("broken") <= MAX_INITIAL_FAILURES
    assert "broken" not in names[20:]


def test_schedules_in_reserve_have_few_trials_until_fast():
    slow, fast = (
        shares(
            search(
                PortfolioSearch([entrant("a"), entrant("b", weight=LOW_PRIORITY_WEIGHT)], [DEFAULT_OF_B]),
                400,
                {"a": 1.0, "b": seconds},
            )
        )
        for seconds in (1.0, 0.5)
    )
    assert slow["b"] / slow["a"] == pytest.approx(LOW_PRIORITY_WEIGHT, abs=0.05)
    assert fast["b"] > 0.9


def test_reserve_waits_until_the_others_have_been_measured():
    contest = PortfolioSearch([entrant("a"), entrant("b", weight=LOW_PRIORITY_WEIGHT)], [DEFAULT_OF_B])
    contest.tell([record("b", space().default, 1.0)])
    assert [name for name, _ in contest.ask(20)] == ["a"] * 20
    contest.tell([record("a", {"number": 500, "order": "rows"}, 1.0)])
    assert "b" in [name for name, _ in contest.ask(60)]


@pytest.mark.parametrize("known", [[], [("b", space().default)]])
def test_schedule_in_reserve_has_its_turn_after_the_others(known):
    contest = PortfolioSearch([entrant("a", SMALL), entrant("b", weight=LOW_PRIORITY_WEIGHT)], [known])
    names = [name for name, _ in search(contest, SMALL.size + 9, {"a": 1.0, "b": None}, batch=3)][: SMALL.size + 9]
    assert names == ["a"] * 3 + ["b"] * len(known) + ["a"] * (SMALL.size - 3) + ["b"] * (9 - len(known))


def test_no_config_is_proposed_twice_or_outside_of_its_space():
    contest = PortfolioSearch(
        [entrant("a", SMALL), entrant("b", ODD)], [[("a", SMALL.default), ("b", ODD.default)]] * 2
    )
    proposed = search(contest, 10_000, {"a": 1.0, "b": 1.1}, is_final_phase=True)
    assert len(set(spelt(proposed))) == len(proposed)
    assert all(ODD.is_legal(ODD.point_from_config(config)[None])[0] for name, config in proposed if name == "b")


@pytest.mark.parametrize("tuner", ["gp", "ga", "random", "grid"])
@pytest.mark.parametrize("last", [False, True])
def test_it_ends_with_the_last_config_of_the_last_space(tuner, last):
    contest = PortfolioSearch([entrant("a", SMALL, tuner=tuner), entrant("b", ODD, 0.5, tuner)])
    proposed = search(contest, 10_000, {"a": 1.0, "b": 3.0}, is_final_phase=last)
    assert len(proposed) == SMALL.size + ODD.size // 2
    assert contest.ask(5, is_final_phase=last) == []


def test_what_is_known_is_asked_for_in_portions_as_it_is_needed():
    first, second = (
        [("a", SMALL.default)],
        [("b", ODD.config_from_point(point)) for point in ODD.sample_legal(2, np.random.default_rng(0))],
    )
    asked = []

    def portions():
        for portion in (first, second):
            asked.append(portion)
            yield portion

    contest = PortfolioSearch([entrant("a", SMALL), entrant("b", ODD)], portions())
    assert contest.ask(9) == first
    assert asked == [first]
    assert contest.ask(9) == second


def test_what_is_known_comes_first_also_of_a_schedule_that_fails():
    known = [("b", {"number": 7, "order": "columns"}), ("a", {"number": 0, "order": "rows"}), ("b", space().default)]
    contest = PortfolioSearch([entrant("a"), entrant("b")], [known])
    assert search(contest, 3, {"a": 1.0, "b": None}, batch=1) == known
    assert len(contest.ask(5)) == 5


def test_what_is_known_elsewhere_is_brought_into_the_space():
    (name, config), *_ = PortfolioSearch(
        [entrant("a", SMALL)], [[("a", {"number": 90, "order": "diagonal", "x": 1})]]
    ).ask(1)
    assert (name, config) == ("a", {"number": 2, "order": "rows"})


def test_illegal_known_config_is_replaced_by_a_legal_neighbour():
    ((_, config),) = PortfolioSearch([entrant("a", ODD)], [[("a", {"number": 40, "order": "columns"})]]).ask(1)
    assert config["number"] % 2 == 1
    assert config["order"] == "columns"


def distance(config, other):
    return sum(config[name] != other[name] for name in config)


def test_at_the_end_the_neighbours_of_the_fastest_come_first():
    there = Space({name: SplitKnob(name, 4096, 2, (-1, 1)) for name in ("x", "y", "z")})
    contest = PortfolioSearch([entrant("a", there), entrant("b", there)])
    configs = [there.config_from_point(point) for point in there.sample_legal(20, np.random.default_rng(0))]
    names = itertools.cycle(("a", "b"))
    records = [record(next(names), config, 1.0 + number) for number, config in enumerate(configs)]
    contest.tell(records)
    near = contest.ask(3, is_final_phase=True)
    assert [name for name, _ in near] == ["a"] * 3
    assert [distance(config, configs[0]) for _, config in near] == [1] * 3
    more = contest.ask(10_000, is_final_phase=True)
    neighbours = [
        (r.schedule, n)
        for r in records[:NUM_LOCAL_SEARCH_STARTS]
        for n in map(there.config_from_point, near_of(there, r.config))
    ]
    assert {*spelt(near), *spelt(more[: len(neighbours)])} >= {*spelt(neighbours)} - {*spelt(of(records))}


def near_of(there, config):
    return there.list_neighbors(there.point_from_config(config))


def of(records):
    return [(each.schedule, each.config) for each in records]


def made_up_seconds(name, config):
    return (1.0 if name == "a" else 1.1) + zlib.crc32(json.dumps(config).encode()) / (1 << 32)


def test_the_same_calls_propose_the_same():
    found = []
    for _ in range(2):
        contest = PortfolioSearch([entrant("a", tuner="gp"), entrant("b", tuner="gp")], [[("b", space().default)]])
        found.append([])
        for round_ in range(12):
            now = contest.ask(6, is_final_phase=round_ >= 9)
            contest.tell([record(name, config, made_up_seconds(name, config)) for name, config in now])
            found[-1] += now
    assert found[0] == found[1]
