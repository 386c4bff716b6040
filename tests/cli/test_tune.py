"""`tvmconv tune`, mostly with a measurer that answers at once; tests/tuning/test_robustness.py runs it as a process."""

import json
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from instant import made_up

from tvmconv import naive_cost
from tvmconv.cli import main, parse_words, prestart_search
from tvmconv.cli.tune import format_progress
from tvmconv.devices.cuda.device import DRIVER_FILES
from tvmconv.errors import HostError
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import find_best_record
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.reports.tables import format_significant
from tvmconv.search.progress import SearchProgress
from tvmconv.workloads import Layer, parse

SMALL = "conv2d:1x4x8x8,4x4x1x1,s1,p0"
OTHER = "conv2d:1x4x6x6,4x4x1x1,s1,p0"
HOW = ("--schedule", "tiling", "--tuner", "random", "--device", "opencl:0")


@pytest.fixture
def tune(log, capsys):
    """Run the command with the log; its exit status, stdout and stderr."""

    def run(*words):
        status = main(["tune", "--log", str(log), *words])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("words", "num_starts"),
    [
        ("tune --suite d2l", 1),
        ("bench tune-suite --seconds 6", 1),
        ("bench tune-suite --compare-only", 0),
        ("tune --help", 0),
        ("bench sweep", 0),
        ("run", 0),
    ],
)
def test_fork_server_starts_before_a_search_command_is_parsed(monkeypatch, words, num_starts):
    starts = []
    monkeypatch.setattr(
        "tvmconv.measure.workers.pool.WorkerPool.prestart_fork_server", lambda pool: starts.append(pool)
    )
    with prestart_search(words.split()):
        assert len(starts) == num_starts


@pytest.mark.skipif(any(Path(file).exists() for file in DRIVER_FILES), reason="there is an NVIDIA driver")
def test_tune_on_cuda_says_that_there_is_no_driver(log):
    pytest.importorskip("cuda.bindings")
    command = [sys.executable, "-m", "tvmconv", "tune", SMALL, "--device", "cuda:0", "--log", str(log)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("tvmconv: no cuda device: no NVIDIA driver; install it")


def records_of(log):
    return list(read_records(log, InvalidLines()))


def trials_of(log):
    """The records that are no last timings, but for that of the schedule `default`."""
    return [record for record in records_of(log) if not record.final and record.schedule != "default"]


@pytest.mark.usefixtures("shared_processes")
def test_a_search_prints_its_result_and_its_stages(tune, log):
    status, out, _ = tune(SMALL, *HOW, "--trials", "3")
    header, row, stages, _, *commands = out.splitlines()
    assert status == 0
    assert header.split()[:3] == ["workload", "schedule", "configs"]
    assert row.split()[:4] == [SMALL, "tiling", "3", "0"]
    assert stages.startswith(f"{SMALL} tiling, ms a trial: apply ")
    assert commands[0] == "Next:"
    for command in commands[1:]:  # they parse, and name the log
        words = shlex.split(command, comments=True)
        assert str(log) in words
        parse_words(words[1:])
    assert [command.split()[1] for command in commands[1:]] == ["run", "plot", "build"]
    assert len(trials_of(log)) == 3
    naive = [record for record in records_of(log) if record.schedule != "tiling"]
    assert [(record.schedule, record.final) for record in naive] == [("default", False), ("default", True)]
    assert 2 <= sum(record.final for record in records_of(log)) <= 4


@pytest.mark.parametrize(("words", "told"), [(["--verify", "sample"], True), ([], False)])
def test_a_search_says_that_it_verified_a_sample(tune, instant, words, told):
    status, out, _ = tune("conv2d:1x4x64x64,8x4x3x3,s1,p1", "--schedule", "tiling", "--trials", "2", *words)
    assert status == 0
    assert ("verified on a random sample of outputs (--verify full compares all): conv2d:1x4x64x64" in out) == told


def test_json_is_the_record_that_a_build_takes_from_the_log(tune, log, instant):
    def seconds(trial, seconds):  # the last timings turn the order around
        return 1e-3 / seconds * 1e-6 if trial.is_final else seconds

    instant.seconds = seconds
    status, out, _ = tune(SMALL, *HOW, "--schedule", "columns", "--trials", "9", "--json")
    assert status == 0
    assert out.count("\n") == 1
    assert out in log.read_text()
    assert (
        Record.parse(out) == find_best_record(log, parse(SMALL)) != min(trials_of(log), key=lambda record: record.cost)
    )


def test_several_schedules_are_one_search_with_one_winner(tune, log, instant):
    status, out, _ = tune(SMALL, *HOW, "--schedule", "columns", "--trials", "9")
    row = out.splitlines()[1]
    winner = min(trials_of(log), key=lambda record: record.cost)
    assert "The log has the search already" not in out
    _, again, _ = tune(SMALL, *HOW, "--schedule", "columns", "--trials", "9")
    assert "The log has the search already; its trials and seconds count, so that a larger --trials" in again
    assert status == 0
    assert row.split()[:3] == [SMALL, winner.schedule, "9"]
    assert format_significant(winner.cost * 1e6) in row.split()
    assert len(trials_of(log)) == 9
    assert {record.schedule for record in trials_of(log)} == {"tiling", "columns"}


def test_a_suite_is_tuned_once_for_each_distinct_workload(tune, instant, monkeypatch):
    layers = [Layer(name, parse(text), 1) for name, text in (("a", SMALL), ("b", OTHER), ("c", SMALL))]
    monkeypatch.setattr("tvmconv.experiments.sweep.suite", lambda *_, **how: layers)
    _, out, _ = tune("--suite", "resnet50", *HOW, "--trials", "3", "--json")
    assert [Record.parse(line).workload.text for line in out.splitlines()] == [SMALL, OTHER]


def test_the_last_line_of_a_network_sums_its_fastest_kernels(tune, log, instant, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL, "count": 3}, {"name": "b", "text": OTHER}]))
    _, out, _ = tune("--suite", str(file), *HOW, "--schedule", "columns", "--trials", "6")
    a, b = (min(each.cost for each in trials_of(log) if each.workload == parse(text)) for text in (SMALL, OTHER))
    assert out.splitlines()[3].split("  ")[0] == "all, times their number"
    assert format_significant((3 * a + b) * 1e6) in out.splitlines()[3].split()
    instant.failing = frozenset({"tiling"})
    _, out, _ = tune(
        "--suite", str(file), *HOW, "--device", "opencl:0", "--trials", "9", "--log", str(tmp_path / "new")
    )
    assert set(out.splitlines()[3].split()[4:]) == {"—"}


@pytest.fixture
def asked(monkeypatch):
    """The seconds that each search is given; each ends after one trial."""
    asked = []

    def status(trials, seconds):
        asked.append(seconds)
        return SearchProgress(1, None)

    monkeypatch.setattr("tvmconv.search.search.SearchProgress", status)
    return asked


def test_total_time_is_shared_by_what_workloads_cost(tune, instant, asked, tmp_path, monkeypatch):
    monkeypatch.setattr("tvmconv.cli.tune.get_process_start", time.monotonic)
    large = "conv2d:1x256x56x56,256x256x3x3,s1,p1"
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL}, {"name": "b", "text": large}]))
    tune("--suite", str(file), *HOW, "--seconds", "10")
    assert asked == [10.0, 10.0]
    asked.clear()
    _, out, _ = tune("--suite", str(file), *HOW, "--seconds-total", "1000", "--log", str(tmp_path / "new"))
    first, second = asked
    assert 900.0 < first < second < 1000.0  # the large one, which is first; and what it left
    assert [line.split()[0] for line in out.splitlines()[1:3]] == [SMALL, large]


def test_one_search_counts_time_from_the_commands_start(tune, log, instant, monkeypatch):
    monkeypatch.setattr("tvmconv.cli.tune.get_process_start", lambda: time.monotonic() - 100.0)
    tune(SMALL, *HOW, "--trials", "2")
    assert min(record.elapsed for record in trials_of(log)) > 100.0


def test_a_suite_counts_time_from_the_start_of_its_searches(tune, log, instant, monkeypatch):
    monkeypatch.setattr("tvmconv.cli.tune.get_process_start", lambda: time.monotonic() - 100.0)
    monkeypatch.setattr(
        "tvmconv.experiments.sweep.suite",
        lambda *_, **how: [Layer(name, parse(text), 1) for name, text in (("a", SMALL), ("b", OTHER))],
    )
    tune("--suite", "resnet50", *HOW, "--trials", "2")
    assert {record.workload.text for record in trials_of(log)} == {SMALL, OTHER}
    assert max(record.elapsed for record in trials_of(log)) < 50.0


def test_the_command_was_begun_a_moment_ago():
    code = "import time; from tvmconv.deadline import get_process_start; print(time.monotonic() - get_process_start())"
    start = time.monotonic()
    seconds = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0.0 < seconds <= time.monotonic() - start + 0.1  # it is told to a hundredth


def test_progress_is_told_also_where_there_is_no_terminal(tune, instant, capsys):
    _, _, err = tune(SMALL, *HOW, "--trials", "3")
    assert err == f"{SMALL} on opencl:0: 0/3 configs, 0.0/s\n"  # when the naive schedule was measured


def test_an_interrupted_search_says_that_it_can_go_on(tune, log, instant):
    instant.lasts, instant.loss = 3, KeyboardInterrupt()
    status, out, err = tune(SMALL, *HOW, "--trials", "10")
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == f"tvmconv: interrupted; {log} is whole, and the same command goes on with it"
    assert len(records_of(log)) == 3


def record(seconds, schedule="tiling"):
    return made_up(parse(SMALL), schedule, {}, "a device", times=(seconds,))


def test_progress_tells_rate_best_speedup_errors_and_time_left():
    status = SearchProgress(2000, None, reference=record(4e-6, "default"))
    for elapsed in (1.0, 2.0):
        status.elapsed_seconds = elapsed
        status.count_record(record(2e-6))
    status.error_counts = Counter({ErrorKind.RUN_TIMEOUT: 1, ErrorKind.WRONG_ANSWER: 3})
    assert format_progress(status) == (
        "2/2,000 configs, 1.0/s, best trial 2.00 µs (tiling, 1.02 GFLOP/s, 2.00 × default), failed: 3 wrong answer, "
        "1 run timeout, 1998 s left"
    )


def test_what_no_schedule_is_tuned_for_is_refused(tune, instant, schedule_registry):
    for key in [key for key, schedule in schedule_registry.items() if schedule.search_if]:
        del schedule_registry[key]
    status, out, err = tune(SMALL, "--device", "opencl:0")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "searched by default" in err


def test_where_all_trials_fail_the_most_frequent_message_is_told(tune, instant):
    instant.failing = frozenset({"tiling"})
    status, _, err = tune(SMALL, *HOW, "--trials", "3")
    assert status == 1
    assert err.splitlines()[-1] == f"tvmconv: nothing ran for {SMALL}: 3 of 3 configs failed: it fails"


def test_a_host_that_runs_nothing_is_one_line_and_status_2(tune, instant, log):
    instant.lasts, instant.loss = 0, HostError("opencl:0 cannot be measured on: No space left on device")
    status, out, err = tune(SMALL, *HOW, "--trials", "3")
    assert (status, out) == (2, "")
    assert err.splitlines() == ["tvmconv: opencl:0 cannot be measured on: No space left on device"]
    assert not log.exists()


@pytest.mark.parametrize("workloads", [[SMALL], [SMALL, OTHER]])
def test_a_long_naive_schedule_is_not_measured_and_told_once(tune, log, instant, monkeypatch, tmp_path, workloads):
    monkeypatch.setattr(naive_cost, "FALLBACK_FLOPS", 1.0)
    suite = tmp_path / "mine.json"
    suite.write_text(json.dumps([{"name": f"layer {number}", "text": text} for number, text in enumerate(workloads)]))
    words = [SMALL] if len(workloads) == 1 else ["--suite", str(suite)]
    status, out, err = tune(*words, *HOW, "--trials", "3")
    assert status == 0
    assert err.count("default left out") == 1
    assert {name for name, _ in instant.measured} == {"tiling"}
    assert "× default" in out
    assert " — " in out
