"""Every command that names the result of a log names the same schedule, config and time."""

import json
from dataclasses import replace

import pytest

import tvmconv as tc
from tvmconv.cli import main
from tvmconv.cli.log import format_config
from tvmconv.logs.candidates import iterate_candidates
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.reports.tables import format_significant
from tvmconv.reports.timing_groups import times_from_log
from tvmconv.search.search import MAX_NAIVE_SECONDS

W = tc.parse("conv2d:1x8x14x14,8x8x3x3,s1,p1")
TUNE = ("tune", W.text, "--device", "opencl:0", "--tuner", "random", "--trials", "6", "--log")


def records_of(log):
    return list(read_records(log, InvalidLines()))


@pytest.fixture
def tuned(log, instant):
    """A log that `tune` wrote, whose final timings turn the order of the trials around."""
    instant.seconds = lambda trial, seconds: 1e-8 / seconds if trial.is_final else seconds
    assert main([*TUNE, str(log)]) == 0
    return log


def as_it_is(records):
    return records


def with_a_fast_naive_schedule(records):
    return [replace(record, times=(1e-9,)) if record.schedule == "default" else record for record in records]


def with_a_failed_final_timing(records):
    best = min((record for record in records if record.final), key=lambda record: record.cost)
    failed = replace(best, times=(), error=ErrorKind.RUNTIME, message="lost")
    return [failed if record == best else record for record in records]


def with_final_timings_of_trials_alone(records):
    return [record for record in records if not record.final]


def with_a_lucky_trial(records):
    trial = next(record for record in records if not record.final and record.schedule != "default")
    return [*records, replace(trial, times=(1e-9,))]


CHANGES = [
    as_it_is,
    with_a_fast_naive_schedule,
    with_a_failed_final_timing,
    with_final_timings_of_trials_alone,
    with_a_lucky_trial,
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", CHANGES)
def test_all_commands_name_the_same_result(tuned, change, opencl, capsys, tmp_path):
    changed = change(records_of(tuned))
    tuned.write_text("".join(f"{record.line()}\n" for record in changed))
    capsys.readouterr()

    def printed(*words):
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    for again in (False, True):
        if again:
            row = dict(zip(*(_cells(line) for line in printed(*TUNE, tuned).splitlines()[:2]), strict=True))
        result = Record.parse(printed("log", "best", tuned, "--json"))
        searches = json.loads(printed("log", "stats", tuned, "--json"))["searches"]
        assert {"best_seconds": result.cost, "best_config": _json(result.config)}.items() <= next(
            {key: search[key] for key in ("best_seconds", "best_config")}
            for search in searches
            if search["schedule"] == result.schedule
        ).items()
        chart = tmp_path / "chart.svg"
        printed("plot", tuned, "-o", chart)
        assert f"<!-- result: {result.schedule}: {format_significant(result.gflops)} GFLOP/s" in chart.read_text()
        first = times_from_log("log", records_of(tuned)).timings[0]
        assert (first.name, first.seconds) == (result.schedule, result.cost)
        assert tc.build(W, device="opencl:0", log=tuned).record == result
        candidate = next(iterate_candidates(tuned, W, opencl))
        assert (candidate.schedule.name, candidate.config) == (result.schedule, result.config)
        assert format_config(result) in printed("log", "best", tuned)
    assert (row["schedule"], row["best [µs]"]) == (result.schedule, format_significant(result.cost * 1e6))
    assert result.final


def _cells(line):
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def _json(config):
    return json.loads(json.dumps(config))


def test_the_ratio_of_the_table_is_of_the_times_beside_it(log, instant, capsys):
    instant.seconds = lambda trial, seconds: seconds * (3 if trial.is_final else 1) * MAX_NAIVE_SECONDS
    main([*TUNE, str(log)])
    row = dict(zip(*(_cells(line) for line in capsys.readouterr().out.splitlines()[:2]), strict=True))
    times = [float(row[name].replace(",", "")) for name in ("default [µs]", "best [µs]")]
    assert float(row["× default"].replace(",", "")) == pytest.approx(times[0] / times[1], rel=0.02)
