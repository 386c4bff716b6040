"""`tvmconv log`: tables and logs of logs, every refusal in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.logs.record import ErrorKind, Record

W = tc.parse("conv2d:1x8x6x6,4x8x3x3,p1")
FAST = Record(W, "tiling", {"tile_c": (-1, 1, 2)}, "cpu", "opencl", times=(1.5e-5,), elapsed=2.0)
SLOW = replace(FAST, config={"tile_c": (-1, 2, 1)}, times=(3e-5,), elapsed=4.0)
FAILED = replace(FAST, times=(), error=ErrorKind.RUN_TIMEOUT, elapsed=5.0)
ELSEWHERE = replace(FAST, device="NVIDIA H200", target="cuda -arch=sm_90", schedule="vthread")
SAMPLE = str(Path(__file__).parents[1] / "data/tophub-cuda.jsonl")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [record.line() for record in (SLOW, FAST, FAILED, ELSEWHERE)]
    path.write_text("\n".join([*lines, "garbage", ""]))
    return str(path)


def test_best_prints_a_line_for_each_workload_and_device(run, log):
    status, out, err = run("log", "best", log)
    _, cpu, gpu = out.splitlines()
    assert status == 0
    assert cpu.split() == [W.text, "tiling", "cpu", "15.0", "1.38", "tile_c=-1,1,2"]
    assert "NVIDIA H200" in gpu
    assert err.startswith(f"tvmconv: {log}: 1 bad line (5)")


def test_best_writes_a_log(run, log, tmp_path):
    out = tmp_path / "best.jsonl"
    assert run("log", "best", log, "-o", out)[0] == 0
    assert [Record.parse(line) for line in out.read_text().splitlines()] == [FAST, ELSEWHERE]


def test_a_log_of_the_best_keeps_times_to_five_digits(run, log, tmp_path):
    exact = tmp_path / "exact.jsonl"
    exact.write_text(replace(FAST, times=(1.23456789e-5,), timestamp=17.25).line() + "\n")
    out = tmp_path / "best.jsonl"
    assert run("log", "best", exact, "-o", out)[0] == 0
    (kept,) = map(Record.parse, out.read_text().splitlines())
    assert (kept.times, kept.timestamp) == ((1.2346e-5,), 17.0)


def test_best_gives_as_many_of_each_workload_and_device_as_asked(run, log, tmp_path):
    more = tmp_path / "more.jsonl"
    others = [replace(FAST, config={"tile_c": (-1, c, 3)}, times=(c * 1e-5,)) for c in (4, 2)]
    more.write_text("".join(f"{record.line()}\n" for record in others))
    out = tmp_path / "best.jsonl"
    assert run("log", "best", log, more, "--top", "2", "-o", out)[0] == 0
    assert [Record.parse(line) for line in out.read_text().splitlines()] == [FAST, others[1], ELSEWHERE]


def test_stats_as_json_have_the_rate_and_the_best_of_each_search(run, log):
    _, out, _ = run("log", "stats", log, "--json")
    stats = json.loads(out)
    cpu = stats["searches"][0]
    assert (cpu["records"], cpu["errors"]) == (3, 1)
    assert cpu["trials_per_second"] == pytest.approx(3 / 5)
    assert (cpu["best_seconds"], cpu["best_config"]) == (1.5e-5, {"tile_c": [-1, 1, 2]})


def test_stats_do_not_count_last_timings_as_trials(run, log):
    before = run("log", "stats", log)[1]
    failed = replace(FAILED, final=True, elapsed=None)
    with Path(log).open("a") as file:
        for record in (replace(FAST, times=(1e-6,), final=True, elapsed=None), failed):
            file.write(record.line() + "\n")
    after = run("log", "stats", log)[1]
    assert before.splitlines()[0] == after.splitlines()[0] == "records    4"
    assert "finals     2\n" in after
    assert before.split().count("final") == 0
    assert after.split().count("final") == 1
    stats = json.loads(run("log", "stats", log, "--json")[1])
    assert (stats["records"], stats["finals"], stats["searches"][0]["finals"]) == (4, 2, 2)
    assert (stats["searches"][0]["best_seconds"], stats["searches"][0]["best_final"]) == (1e-6, True)


def test_best_tells_of_a_trial_that_no_final_timing_confirmed(run, log):
    final = replace(SLOW, times=(4e-5,), final=True, elapsed=None)
    with Path(log).open("a") as file:
        file.write("\n" + final.line() + "\n")
    _, out, err = run("log", "best", log, "--device", "cpu", "--json")
    assert Record.parse(out) == final
    assert f"{W} on cpu: a trial of tiling took 15.0 µs, less than all final timings" in err


def test_stats_of_last_timings_alone_have_the_best_of_these(run, tmp_path):
    path = tmp_path / "thinned.jsonl"
    path.write_text("".join(replace(r, final=True, elapsed=None).line() + "\n" for r in (SLOW, FAST)))
    (search,) = json.loads(run("log", "stats", path, "--json")[1])["searches"]
    assert (search["records"], search["finals"], search["best_seconds"]) == (0, 2, 1.5e-5)


@pytest.mark.parametrize(
    ("old", "new"), [("0.125", "1e303"), ("0.125", "1e-310"), ("other", "\\ud800other"), ("other", "\\u001b[2Jother")]
)
@pytest.mark.parametrize("action", ["best", "stats"])
def test_what_cannot_be_printed_costs_one_line(run, log, action, old, new):
    other = replace(FAST, device="other", times=(0.125,)).line().replace(old, new)
    with Path(log).open("a") as file:
        file.write(f"{other}\n")
    status, out, _ = run("log", action, log)
    assert status == 0
    assert "other" not in out
    assert action == "best" or f"{log}: 2 bad lines (5, 6)" in out


def test_a_search_that_took_next_to_no_time_has_no_rate(run, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(replace(FAST, elapsed=5e-324).line() + "\n")
    status, out, _ = run("log", "stats", path)
    assert status == 0
    assert "trials/s   —" in out


def test_import_tells_what_it_refuses_in_a_line_each(run, tmp_path):
    out = tmp_path / "new.jsonl"
    status, stdout, err = run("log", "import", SAMPLE, "-o", out)
    assert status == 0
    assert stdout == f"{out}: 29 records imported, 4 refused\n"
    assert len(err.splitlines()) == 2
    assert "refused 3 lines, the first line 31: there is no schedule for task 'conv2d_transpose_nchw.cuda'" in err
    assert len(out.read_text().splitlines()) == 29


def test_merge_writes_each_measurement_once(run, log, tmp_path):
    out = tmp_path / "merged.jsonl"
    status, stdout, err = run("log", "merge", log, log, "-o", out)
    assert status == 0
    assert stdout == f"{out}: 4 records, 4 left out as repeated\n"
    assert "left out 2 bad lines" in err


REFUSALS = {
    "no action": ([], "required: ACTION"),
    "no file": (["best"], "required: FILE"),
    "a missing file": (["best", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory"),
    "no such record": (["best", SAMPLE, "--workload", str(W)], f"no valid record of {W} in {SAMPLE}"),
    "no such device": (["best", SAMPLE, "--device", "TPU"], "no valid record on TPU"),
    "a workload that does not parse": (["best", SAMPLE, "--workload", "banana"], "'banana'"),
    "none of each": (["best", SAMPLE, "--top", "0"], "at least 1, not '0'"),
    "the folder for output": (["best", SAMPLE, "-o", "."], "cannot write .: expected a regular file"),
    "the root for output": (["merge", SAMPLE, "-o", "/"], "cannot write /: expected a regular file"),
    "a folder for output": (["import", SAMPLE, "-o", "/tmp"], "cannot write /tmp: expected a regular file"),
    "an input for output": (["merge", SAMPLE, "-o", SAMPLE], "is also read"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_are_one_line_and_status_2(run, name):
    words, message = REFUSALS[name]
    status, _, err = run("log", *words)
    assert status == 2
    assert message in err.splitlines()[-1]


def test_a_log_with_nothing_to_import_is_refused(run, tmp_path):
    old, new = tmp_path / "old.log", tmp_path / "new.jsonl"
    old.write_text("garbage\n")
    status, _, err = run("log", "import", old, "-o", new)
    assert status == 2
    assert f"nothing to import in {old}" in err.splitlines()[-1]
    assert not new.exists()
