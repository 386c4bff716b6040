"""The course of searches: curves of the best trial so far, sessions, results, and what they are compared with."""

import itertools
from dataclasses import replace

import pytest
from made_results import make_record, make_result, make_row, make_sweep

from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.record import ErrorKind
from tvmconv.reports.history import collect_traces, compute_history_info, merge_into_sweep, read_traces
from tvmconv.workloads import parse

SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")
OTHER = parse("conv2d:1x2x6x6,8x2x3x3,p1")


def record(gflops, *, workload=SMALL, schedule="direct", device="NVIDIA H200", **fields):
    """A record of that rate and of a config of its own; of 0 for a failure."""
    micros = gflops and workload.flops / gflops / 1e3
    error = ErrorKind.NONE if gflops else ErrorKind.RUN_TIMEOUT
    return replace(
        make_record(workload, micros, schedule, **fields), config={"rate": gflops}, device=device, error=error
    )


@pytest.fixture
def sweep():
    rows = [
        make_row("default", gflops=1.0),
        make_row("tiling", failure="wrong result"),
        make_row("vthread", gflops=2.0),
    ]
    return make_sweep({"4": make_result(SMALL.text, *rows, make_row("cudnn", gflops=6.0, library="9.19"))})


def test_failed_trials_count_as_trials_and_are_told():
    (history,) = compute_history_info(SMALL, collect_traces("log", map(record, (0, 2, 0, 5)))).curves
    assert history.summary == "direct, 4 trials, 50% failed"


def test_time_is_shown_only_if_all_trials_have_it():
    timed = compute_history_info(SMALL, collect_traces("log", [record(1, elapsed=0.5), record(2, elapsed=1.5)]))
    partly = compute_history_info(SMALL, collect_traces("log", [record(1), record(2, elapsed=1.5)]))
    assert [info.curves[0].elapsed for info in (timed, partly)] == [(0.5, 1.5), ()]


def test_last_timings_are_no_trials_unless_there_is_nothing_else():
    def final(gflops, **fields):
        return replace(record(gflops, **fields), final=True)

    found = collect_traces("log", [final(9), record(1, elapsed=1.0), record(2, elapsed=2.0), final(3), final(0)])
    (history,) = compute_history_info(SMALL, found).curves
    assert history.summary == "direct, 2 trials"
    assert (history.best_gflops, history.elapsed) == (pytest.approx((1, 2)), (1.0, 2.0))
    thinned = collect_traces("log", [final(3), final(5), record(1, workload=OTHER), final(4, workload=OTHER)])
    assert {trace.workload: trace.rates for trace in thinned} == {SMALL: pytest.approx([3, 5]), OTHER: [1]}


SESSIONS = {
    "one search": ([1.9, 5.1, 5.5], [1, 2, 3], [1.9, 5.1, 5.5]),
    "two searches": ([1.9, 5.1, 5.5, 1.9, 5.1, 5.5], [2, 5, 6, 102, 105, 106], [1.9, 5.1, 5.5, 7.4, 10.6, 11.0]),
    "two searches, the later first": ([1.0, 5.5, 1.9], [101, 106, 2], [1.0, 5.5, 7.4]),
    "two searches that do not tell when they were": ([1.0, 5.5, 1.9], [0, 0, 0], [1.0, 5.5, 7.4]),
    "two searches at once": ([10.0, 8.1, 10.5, 9.0], [20.0, 20.1, 20.5, 21.0], [10.0, 10.0, 10.5, 10.5]),
}


@pytest.mark.parametrize(("elapsed", "timestamps", "expected"), SESSIONS.values(), ids=SESSIONS)
def test_sessions_are_drawn_one_after_another(elapsed, timestamps, expected):
    schedules = itertools.cycle(("direct", "tiling"))
    records = [
        record(1, elapsed=seconds, timestamp=when, schedule=schedule)
        for seconds, when, schedule in zip(elapsed, timestamps, schedules, strict=False)
    ]
    found = collect_traces("log", records)
    assert sorted(seconds for trace in found for seconds in trace.elapsed) == pytest.approx(expected)


def test_a_log_that_is_looked_at_gives_the_traces_of_its_records(tmp_path):
    records = [record(each % 7, elapsed=float(each), schedule="ab"[each % 2], timestamp=each) for each in range(50)]
    records += [replace(record(2), final=True), record(3, device="cpu")]
    log = tmp_path / "log.jsonl"
    lines = [each.line() for each in records]
    lines[::5] = [line.replace(": ", ":") for line in lines[::5]]
    log.write_text("\n".join(lines))
    assert read_traces("log", log, InvalidLines()) == collect_traces("log", records)


def test_the_result_of_a_search_is_not_its_fastest_trial():
    found = collect_traces(
        "log", [record(8), record(5), replace(record(8), final=True, times=record(4).times), record(9)]
    )
    info = compute_history_info(SMALL, found)
    assert info.curves[0].best_gflops[-1] == pytest.approx(9)
    assert [name for name, _ in info.results] == ["direct: 4.00 GFLOP/s, final timing"]
    _, (result,) = merge_into_sweep(found)
    assert result.rows[0].gflops == pytest.approx(4)


def test_a_history_is_compared_with_a_sweeps_fastest_rows(sweep):
    info = compute_history_info(SMALL, collect_traces("log", [record(1)]), [sweep])
    assert info.targets == (("vthread", 2.0), ("cudnn", 6.0))


def test_the_best_of_a_search_stands_beside_the_rows_of_a_sweep(sweep):
    found = collect_traces("log", [record(0), record(8), record(3, workload=OTHER), record(1)])
    labels, results = merge_into_sweep(found, [sweep])
    assert labels == ["4", "1x2x6x6,8x2x3x3,s1,p1"]
    names = ["default", "tiling", "vthread", "cudnn", "direct, 4 trials, 25% failed"]
    assert [row.name for row in results[0].rows] == names
    assert [row.gflops for result in results for row in result.rows[-1:]] == pytest.approx([8, 3])


def test_what_a_tuner_measures_to_compare_with_is_no_search():
    info = compute_history_info(SMALL, collect_traces("log", [record(1, schedule="default"), record(3), record(4)]))
    assert info.targets == (("default", pytest.approx(1)),)
    assert [history.name for history in info.curves] == ["direct"]


def test_a_sweep_has_the_default_schedule_already(sweep):
    found = collect_traces("log", [record(2, schedule="default"), record(2, schedule="default", workload=OTHER)])
    _, results = merge_into_sweep(found, [sweep])
    rates = [[row.gflops for row in result.rows if row.name == "default"] for result in results]
    assert rates == [[1.0], [pytest.approx(2)]]
