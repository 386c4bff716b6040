"""The fastest of a search are timed again at its end: that decides."""

import dataclasses

import pytest
from searches import WORKLOAD, append, finals_of, records_of, search, some, trials_of

from tvmconv import naive_cost
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import find_best_record
from tvmconv.logs.record import ErrorKind
from tvmconv.measure.results import NUM_FINAL_ROUNDS, NUM_FINALISTS
from tvmconv.search.search import (
    FINAL_MEASUREMENT_SECONDS,
    MAX_FINAL_SECONDS,
    MAX_NAIVE_SECONDS,
    MIN_FINALISTS,
    _config_key,
    order_finalists,
)


def test_fastest_are_measured_again_in_turn_and_that_is_on_disk(log, instant):
    tuned = search(log, trials=10, remeasure_best=True)
    fastest = sorted(trials_of(log), key=lambda record: record.cost)[:NUM_FINALISTS]
    assert [config for _, config in instant.measured[10:]] == [record.config for record in fastest] * NUM_FINAL_ROUNDS
    finals = finals_of(log)
    assert [record.config for record in finals] == [record.config for record in fastest]
    assert all(len(record.times) == NUM_FINAL_ROUNDS for record in finals)
    assert tuned.final == finals[0]
    assert tuned.status.num_trials == len(trials_of(log)) == 10  # which last timings do not count as


def test_a_last_timing_that_deviates_is_repeated_and_left_out(log, instant):
    """The fastest trial looks half as fast in its first round only."""
    disturbed = []

    def seconds(trial, seconds):
        if trial.is_final and not disturbed:  # the fastest comes first
            disturbed.append(trial)
            return 2 * seconds
        return seconds

    instant.seconds = seconds
    tuned = search(log, trials=10, remeasure_best=True)
    assert tuned.final.config == tuned.status.best.config
    assert tuned.final.times == tuned.status.best.times * NUM_FINAL_ROUNDS
    assert len(instant.measured) == 10 + NUM_FINALISTS * NUM_FINAL_ROUNDS + 1


@pytest.mark.usefixtures("shared_processes")
def test_records_that_nobody_can_build_are_no_finalists(log):
    """As a log of another version has them, whose schedules had other knobs."""
    search(log, trials=3)
    trials = records_of(log)
    for number in range(2 * NUM_FINALISTS):
        other = dataclasses.replace(trials[0], config={"no_knob": number}, times=(1e-9 * (1 + number),))
        Log(log).append(other)
    tuned = search(log, trials=3, remeasure_best=True)
    assert tuned.final.config in [record.config for record in trials if record.ok]
    assert {str(record.config) for record in finals_of(log)} <= {str(record.config) for record in trials}


def slow_at_last(instant, log):
    """Have the config that is the fastest of the trials be the slowest of the last timings; which one it is."""

    def seconds(trial, seconds):
        if trial.is_final and trial.config == min(trials_of(log), key=lambda record: record.cost).config:
            return 1.0
        return seconds

    instant.seconds = seconds


def test_fastest_of_the_last_timings_is_what_the_search_found(log, instant):
    slow_at_last(instant, log)
    tuned = search(log, trials=10, remeasure_best=True)
    second = sorted(trials_of(log), key=lambda record: record.cost)[1]
    assert tuned.final.config == second.config != tuned.status.best.config
    assert find_best_record(log, WORKLOAD) == tuned.final


def test_what_was_timed_at_the_end_is_not_timed_again(log, instant):
    slow_at_last(instant, log)
    found = search(log, trials=10, remeasure_best=True).final
    before = log.read_bytes()
    instant.measured.clear()
    assert search(log, trials=10, remeasure_best=True).final == found
    assert instant.measured == []
    assert log.read_bytes() == before


def test_what_another_search_found_faster_is_timed_at_the_end(log, instant, opencl):
    search(log, trials=5, remeasure_best=True)
    (rival,) = some(1, 7, opencl, times=(1e-9,))
    append(log, [rival])
    instant.measured.clear()
    tuned = search(log, trials=6, remeasure_best=True)
    assert instant.measured[0] == ("tiling", rival.config)
    assert rival.config in [record.config for record in finals_of(log)]
    assert find_best_record(log, WORKLOAD) == tuned.final


def test_what_turns_out_wrong_at_the_end_is_never_built(log, instant):
    def spoil(trial, error):
        return ErrorKind.WRONG_ANSWER if trial.is_final else error

    instant.error = spoil
    for _ in range(2):
        assert search(log, trials=5, remeasure_best=True).final is None
    assert {record.error for record in finals_of(log)} == {ErrorKind.WRONG_ANSWER}
    assert find_best_record(log, WORKLOAD) is None


def test_last_timings_that_failed_in_passing_are_taken_again(log, instant):
    instant.error = lambda trial, error: ErrorKind.RUNTIME if trial.is_final else error
    found = search(log, trials=5, remeasure_best=True).final
    assert found == find_best_record(log, WORKLOAD) == min(trials_of(log), key=lambda record: record.cost)
    instant.error = lambda trial, error: error
    again = search(log, trials=5, remeasure_best=True).final
    assert again == find_best_record(log, WORKLOAD)
    assert again.final


def test_the_naive_schedule_is_timed_in_turn_with_the_finalists(log, instant):
    tuned = search(log, trials=9, measure_baseline=True, remeasure_best=True)
    fastest = [record.config for record in sorted(trials_of(log)[1:], key=lambda record: record.cost)[:NUM_FINALISTS]]
    turn = [("tiling", config) for config in fastest] + [("default", {})]
    assert instant.measured[-NUM_FINAL_ROUNDS * len(turn) :] == turn * NUM_FINAL_ROUNDS
    assert tuned.reference in finals_of(log)
    assert tuned.reference.schedule == "default"
    assert tuned.speedup == tuned.reference.cost / tuned.final.cost


def test_speed_up_is_over_the_naive_time_of_the_same_final_run(log, instant):
    instant.seconds = lambda trial, seconds: 5 * seconds if trial.is_final and trial.schedule == "default" else seconds
    tuned = search(log, trials=5, measure_baseline=True, remeasure_best=True)
    trial = next(record for record in trials_of(log) if record.schedule == "default")
    assert tuned.reference.cost == pytest.approx(5 * trial.cost)
    for timestamp in (-1e3, 1e3):  # of other final runs
        append(log, [dataclasses.replace(tuned.reference, times=(1.0,), timestamp=timestamp)])
    assert search(log, trials=5, measure_baseline=True, remeasure_best=True).speedup == tuned.speedup


def test_a_slow_naive_schedule_is_not_timed_again(log, instant):
    instant.seconds = lambda trial, seconds: 2 * MAX_NAIVE_SECONDS if trial.schedule == "default" else seconds
    tuned = search(log, trials=5, measure_baseline=True, remeasure_best=True)
    assert {record.schedule for record in finals_of(log)} == {"tiling"}
    assert tuned.reference.cost == 2 * MAX_NAIVE_SECONDS
    before = log.read_bytes()
    search(log, trials=5, measure_baseline=True, remeasure_best=True)
    assert log.read_bytes() == before


@pytest.mark.parametrize(("schedule", "winner"), [(None, "default"), ("tiling", "tiling")])
def test_the_naive_schedule_wins_where_none_was_named(log, instant, schedule, winner):
    instant.seconds = lambda trial, seconds: 1e-9 if trial.schedule == "default" else seconds
    tuned = search(log, schedule=schedule, trials=4, measure_baseline=True, remeasure_best=True)
    assert tuned.final.schedule == winner
    assert tuned.speedup == (1 if winner == "default" else pytest.approx(1e-9 / tuned.final.cost))
    if schedule is None:
        assert tuned.final == find_best_record(log, WORKLOAD)


@pytest.mark.parametrize(
    ("seconds", "kept"), [(None, MAX_FINAL_SECONDS), (1000.0, MAX_FINAL_SECONDS), (8.0, 1.6), (2.0, 0.4)]
)
def test_there_are_as_many_finalists_as_there_is_time_for(log, instant, seconds, kept):
    instant.milliseconds = {"load": 100.0, "verify": 80.0, "time": 20.0}
    search(log, trials=10, seconds=seconds, remeasure_best=True)
    count = int(kept / NUM_FINAL_ROUNDS / (FINAL_MEASUREMENT_SECONDS + 0.2))
    assert len(finals_of(log)) == max(MIN_FINALISTS, count) < NUM_FINALISTS


def test_finalists_that_differ_in_resources_come_first(log):
    search(log, trials=6)
    records = sorted(trials_of(log), key=lambda record: record.cost)[:5]
    costs, registers = (1.0, 1.01, 1.02, 1.1, 1.2), (32, 32, 64, 32, 96)
    records = [
        dataclasses.replace(record, times=(cost,), resources={"registers": count})
        for record, cost, count in zip(records, costs, registers, strict=True)
    ]
    keys = {_config_key(record) for record in records}
    assert [record.cost for record in order_finalists(records, keys)] == [1.0, 1.02, 1.01, 1.1, 1.2]
    assert [record.cost for record in order_finalists(records, keys - {_config_key(records[2])})] == [*costs]
    assert [record.cost for record in order_finalists(records, set())] == [1.0, 1.02, 1.01, 1.1, 1.2]
    assert order_finalists([], keys) == []


def test_a_naive_schedule_that_takes_seconds_is_never_measured(log, instant, monkeypatch):
    monkeypatch.setattr(naive_cost, "FALLBACK_FLOPS", 1.0)
    tuned = search(log, trials=5, measure_baseline=True, remeasure_best=True)
    assert {name for name, _ in instant.measured} == {"tiling"}
    assert (tuned.reference, tuned.speedup) == (None, None)
    assert tuned.final
    assert not tuned.omitted
