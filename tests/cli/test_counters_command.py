"""`tvmconv counters`: kernels that are built and counted without a GPU, and what one says of them."""

import json
from dataclasses import replace

import pytest

from tvmconv import cli
from tvmconv.experiments.beside import METRICS, Beside
from tvmconv.measuring import programs
from tvmconv.reports.beside import differing, ratio, summary, table

SMALL = "conv2d:1x4x8x8,16x4x3x3,p1"
ROW = Beside(
    SMALL,
    "tiling",
    {},
    0,
    {"counts": {"global_load_sectors": 10000.0}, "limits": {}, "occupancy": 0.5, "registers": 32},
    {"global_load_sectors": 10100.0, "global_store_sectors": 500.0, "occupancy_percent": 50.0},
)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("counters") / "kernels.zip"
    words = ["counters", SMALL, "--schedules", "tiling", "--arch", "sm_90", "--programs", str(file)]
    assert cli.main(words) == 0
    return file


def test_kernels_are_kept_with_what_is_counted_of_them(file):
    kept = list(programs.load(file))
    assert [told["schedule"] for told, _ in kept] == ["default", "tiling"]
    told, program = kept[1]
    assert len(told["steps"]) == len(program.steps) == 1
    assert told["steps"][0]["counts"]["shared_load_wavefronts"] > 0


def test_names_of_counts_are_those_of_the_counters(file):
    for told, _ in programs.load(file):
        assert set(told["steps"][0]["counts"]) <= set(METRICS)


def test_a_file_of_something_else_is_refused(tmp_path, capsys, monkeypatch):
    other = tmp_path / "other.zip"
    other.write_text("no archive")
    monkeypatch.setattr("tvmconv.cli.counters.find_place", lambda args: type("Gpu", (), {"text": "cuda:0"}))
    assert cli.main(["counters", "--programs", str(other)]) == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), (SMALL,), ("--programs", "x.zip")])
def test_without_a_gpu_both_are_needed(words, capsys):
    assert cli.main(["counters", *words, "--arch", "sm_90"]) == 2
    assert "--programs FILE takes kernels to measure" in capsys.readouterr().err


def test_readings_are_shown_again(tmp_path, capsys):
    file = tmp_path / "counters.json"
    told = {"name": "counters", "provenance": "a GPU, that day", "kernels": [vars(ROW)]}
    file.write_text(json.dumps(told))
    assert cli.main(["counters", "--from", str(file)]) == 0
    out = capsys.readouterr().out
    assert "0.990" in out
    assert "a GPU, that day" in out


def test_what_differs_by_more_than_two_percent_is_named():
    ((row, names),) = differing([ROW])
    assert (row, names) == (ROW, ["sectors, stores"])


def test_a_count_that_neither_has_is_no_share():
    assert ratio(ROW, "shared_load_wavefronts") is None


def test_the_summary_counts_those_that_agree():
    lines = {line[0]: line[1:] for line in summary([ROW]).rows}
    assert lines["sectors, loads"] == ("1", "1", "100%")
    assert lines["sectors, stores"] == ("1", "0", "0%")
    assert lines["occupancy"] == ("1", "1", "100%")


def test_what_the_gpu_does_not_count_at_all_is_shown():
    row = replace(ROW, measured={**ROW.measured, "global_load_sectors": 0.0})
    assert "∞" in table([row]).text()
