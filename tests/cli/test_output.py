"""Tables on a terminal: they fit its width, and say what is left out; JSON and CSV; colors; completion of words."""

import csv
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tvmconv.cli.colors import paint
from tvmconv.reports.tables import Table

SMALL = "conv2d:1x4x8x8,4x4x3x3,s1,p1"
WIDE = Table(
    ("schedule", "time", "GFLOP/s", "error", "note"),
    [
        ("tiling", "1,083", "279", "—", "short"),
        ("conflict_free", "18.6", "16,259", "4e-07", "a text of some words" * 3),
    ],
    {"schedule", "note"},
    ("error",),
)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_table_fits_the_terminal(width):
    lines = WIDE.format_text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("schedule")


def test_optional_columns_are_left_out_first():
    text = WIDE.format_text(58)
    assert "(left out: error; --wide prints them)" in text
    assert "some" in text
    assert "left out" not in WIDE.format_text(80)  # the last column is wrapped


def test_csv_has_plain_numbers():
    rows = list(csv.reader(io.StringIO(WIDE.format_csv())))
    assert rows[:2] == [["schedule", "time", "GFLOP/s", "error", "note"], ["tiling", "1083", "279", "", "short"]]


@pytest.mark.parametrize(
    "words", [("suites",), ("suites", "resnet50", "--only", "conv5"), ("devices",), ("schedules", SMALL)]
)
def test_a_list_is_the_same_as_json_and_as_csv(run, words):
    listed = json.loads(run(*words, "--json")[1])
    rows = list(csv.DictReader(io.StringIO(run(*words, "--csv")[1])))
    assert 0 < len(rows) <= len(listed)
    assert any(next(iter(rows[0].values())) in entry.values() for entry in listed)


SHIPPED = Path(__file__).parents[2] / "tuning_logs/nvidia-h200"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("words", "column", "value"),
    [
        (("bench", "networks", SHIPPED / "d2l/d2l-tuned.json"), "suite", "d2l"),
        (("bench", "sweep", "--from", SHIPPED / "d2l/d2l.json"), "channels", "32"),
        (("counters", "--from", SHIPPED / "filter1d/filter1d-counters.json"), "schedule", "basic"),
        (("counters", "--from", SHIPPED / "experiments/kernels-beside.json.gz"), "schedule", "basic"),
        (("show", SMALL, "tiling", "--stage", "traffic", "--arch", "sm_90"), "operation", "global loads"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_tables_of_measurements_are_printed_for_programs(run, words, column, value):
    words = [*map(str, words)]
    rows = list(csv.DictReader(io.StringIO(run(*words, "--csv")[1])))
    assert value in {row[column] for row in rows}
    assert f'"{value}"' in run(*words, "--json")[1]
    assert json.loads(run(*words, "--json")[1])


def test_knobs_as_csv(run):
    rows = list(csv.DictReader(io.StringIO(run("schedules", SMALL, "tiling", "--csv")[1])))
    assert {"knob": "tile_w", "default": "-1,8,1"}.items() <= rows[2].items()


@pytest.mark.slow
def test_counts_of_kernels_as_json_and_csv(run):
    words = ("explain", SMALL, "tiling", "columns", "--arch", "sm_90")
    explained = json.loads(run(*words, "--json")[1])
    assert [kernel["name"] for kernel in explained] == ["tiling", "columns"]
    assert explained[0]["predicted_seconds"] > 0
    rows = list(csv.DictReader(io.StringIO(run(*words, "--csv")[1])))
    found = {row["of the whole kernel"]: row["tiling"] for row in rows}
    assert found["bank conflicts"] == explained[0]["quantities"]["bank conflicts"].replace(",", "")


def test_formats_exclude_each_other(run):
    assert "not allowed with" in run("suites", "--json", "--csv")[2]


@pytest.mark.parametrize(
    ("variables", "is_colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colors_are_for_terminals_alone(variables, is_colored, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leader, follower = pty.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as terminal:
        assert ("\x1b" in paint("text", "1", terminal)) == is_colored
    assert paint("text", "1", io.StringIO()) == "text"


def test_doctor_runs_a_kernel_and_names_remedies(run):
    status, out, _ = run("doctor", "--json")
    checks = {check["part"]: check for check in json.loads(out)}
    assert status == 0
    assert checks["a kernel"]["state"] == "ok"
    assert all(check["remedy"] for check in checks.values() if check["state"] != "ok")


def test_words_are_completed(tmp_path):
    pytest.importorskip("argcomplete")
    found = tmp_path / "found"
    line = "tvmconv bench tor"
    variables = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(found)}
    code = "from tvmconv.cli import command_line; command_line()"
    environment = {**os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", **variables}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    names = "torch-models", "torch-training", "torch-overhead", "torch-table", "torch-training-table"
    assert found.read_text().split() == [*names]


def test_completion_prints_code_for_the_shell(run):
    pytest.importorskip("argcomplete")
    status, out, _ = run("completion", "--shell", "bash")
    assert (status, "complete" in out) == (0, True)
