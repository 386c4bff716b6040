"""The script that tells from logs what the values of knobs are worth."""

import importlib
from pathlib import Path

import pytest

from tvmconv.logs.log import Log
from tvmconv.logs.record import Record
from tvmconv.workloads import parse

WORKLOAD = parse("conv2d:1x4x8x8,4x4x1x1")
VERSIONS = {"tvmconv": "0.1.0", "tvm": "0.27.0", "nvrtc": "13.0"}
NOVEMBER_20, NOVEMBER_21 = 1795132800.0, 1795219200.0  # of 2026


@pytest.fixture
def knobs(monkeypatch):
    """The script's main function."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return importlib.import_module("knobs").main


@pytest.fixture
def log(tmp_path):
    """A log of two kernels, one twice as fast, and a line that is no record."""
    path = tmp_path / "small.jsonl"
    append(path, 2e-6, {"slices": 1}, timestamp=NOVEMBER_21)
    append(path, 1e-6, {"slices": 2}, timestamp=NOVEMBER_20)
    with path.open("a") as file:
        file.write("no record\n")
    return path


def append(path, seconds, config, device="a GPU", timestamp=0.0):
    record = Record(
        WORKLOAD, "direct", config, device, "cuda", times=(seconds,), timestamp=timestamp, versions=VERSIONS
    )
    Log(path).append(record)


def test_the_table_is_printed_and_bad_lines_are_told(knobs, log, capsys):
    assert knobs([str(log)]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert rows[1:3] == [["direct", "slices", "2", "1.000", "1", "1"], ["direct", "slices", "1", "0.500", "1", "0"]]
    assert err.startswith(f"knobs: {log}: 1 bad line (3)")


def test_markdown_tells_where_its_numbers_come_from(knobs, log, tmp_path):
    assert knobs([str(log), "-o", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "small-knobs.md").read_text()
    assert "| direct | slices | 1 | 0.500 | 1 | 0 |" in page
    measured = "a GPU; tvmconv 0.1.0, TVM 0.27.0, NVRTC 13.0; 2026-11-21; 2 kernels of 1 searches; "
    assert f"{measured}`python scripts/knobs.py {log} -o " in page


def test_a_page_takes_the_table_between_its_markers(knobs, log, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- small-knobs -->\nold\n<!-- /small-knobs -->\nbelow\n")
    assert knobs([str(log), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("above\n<!-- small-knobs -->\n| schedule |")
    assert "old" not in text


def test_logs_of_several_devices_are_not_mixed(knobs, log, capsys):
    append(log, 5e-6, {"slices": 4}, device="another GPU")
    assert knobs([str(log)]) == 2
    assert capsys.readouterr().err.endswith("name one of a GPU, another GPU with --device\n")
    assert knobs([str(log), "--device", "a GPU"]) == 0
    values = [line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("direct")]
    assert values == ["2", "1"]


def test_a_device_without_records_is_refused_with_those_that_have_some(knobs, log, capsys):
    assert knobs([str(log), "--device", "a CPU"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "knobs: no search of a CPU timed a kernel; there are: a GPU"
