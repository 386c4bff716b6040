"""What a knob's values are worth, counted on searches small enough to be checked by hand."""

from dataclasses import replace

import pytest

from tvmconv.logs.record import ErrorKind, Record
from tvmconv.reports.knob_values import find_all, worths
from tvmconv.workloads import parse

FIRST, SECOND = (parse(f"conv2d:1x{c}x8x8,{c}x{c}x1x1") for c in (4, 8))


def timed(seconds, workload=FIRST, schedule="direct", timestamp=0.0, **config):
    return Record(workload, schedule, config, "a GPU", "cuda", times=(seconds,), timestamp=timestamp)


def failed(**config):
    return Record(FIRST, "direct", config, "a GPU", "cuda", error=ErrorKind.WRONG_ANSWER)


def by_value(records):
    return {worth.value: worth for worth in worths(find_all(records))}


def test_a_value_is_worth_the_speed_of_its_fastest_kernel():
    worth = by_value([timed(4.0, slices=1), timed(2.0, slices=1), timed(1.0, slices=2), timed(5.0, slices=2)])
    assert {value: each.speed for value, each in worth.items()} == {1: 0.5, 2: 1.0}


def test_the_mean_over_searches_is_geometric():
    first = [timed(8.0, slices=1), timed(1.0, slices=2)]
    second = [timed(2.0, SECOND, slices=1), timed(1.0, SECOND, slices=2)]
    assert by_value(first + second)[1].speed == pytest.approx(1 / 4)


def test_the_searches_are_counted_that_tried_a_value_and_those_whose_best_kernel_has_it():
    first = [timed(1.0, slices=1), timed(2.0, slices=2)]
    second = [timed(2.0, SECOND, slices=1), timed(1.0, SECOND, slices=2), timed(3.0, SECOND, slices=4)]
    counts = {value: (each.tried, each.best) for value, each in by_value(first + second).items()}
    assert counts == {1: (2, 1), 2: (2, 1), 4: (1, 0)}


def test_a_search_that_had_no_choice_tells_nothing():
    first = [timed(1.0, slices=1), timed(2.0, slices=2)]
    assert by_value([*first, timed(1.0, SECOND, slices=2)]) == by_value(first)


def test_last_timings_say_nothing_of_values():
    records = [timed(4.0, slices=1), timed(2.0, slices=2)]
    again = [replace(timed(1.0, slices=1), final=True), replace(timed(9.0, SECOND, slices=1), final=True)]
    assert by_value(records + again) == by_value(records)
    assert len(find_all(records + again)) == 1


def test_each_knob_is_compared_with_the_best_of_its_search():
    records = [timed(4.0, slices=1, fetch="blocked"), timed(1.0, slices=2, fetch="blocked")]
    worth = by_value([*records, timed(2.0, slices=2, fetch="interleaved")])
    assert {value: each.speed for value, each in worth.items()} == {1: 0.25, 2: 1.0, "blocked": 1.0, "interleaved": 0.5}


def test_the_knobs_of_two_schedules_are_two():
    records = [timed(s, schedule=name, slices=int(s)) for name in ("direct", "implicit_gemm") for s in (1.0, 2.0)]
    assert [(w.schedule, w.value) for w in worths(find_all(records))] == [
        ("direct", 1),
        ("direct", 2),
        ("implicit_gemm", 1),
        ("implicit_gemm", 2),
    ]


def test_errors_and_splits_count_for_nothing():
    records = [timed(1.0, tile_f=(-1, 2)), timed(2.0, tile_f=(-1, 4)), failed(slices=1), failed(slices=2)]
    (found,) = find_all(records).values()
    assert found.timed == 2
    assert worths(find_all(records)) == []


def test_a_search_knows_its_best_and_its_newest_record():
    records = [timed(2.0, timestamp=1.0), timed(1.0, timestamp=2.0), timed(3.0, timestamp=3.0)]
    (found,) = find_all(iter(records)).values()
    assert (found.best, found.newest) == (records[1], records[2])
