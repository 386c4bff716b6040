"""`tvmconv report`: the page of a workload, and of a network."""

import json
import re
from pathlib import Path

import pytest

from tvmconv.cli import main
from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.workloads import parse

ROOT = Path(__file__).parents[2]
SHIPPED = "filter1d:16777216,k5"  # the shipped logs have it
LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"  # this, too
SMALL = "conv2d:1x8x8x8,8x8x3x3,s1,p1"  # and not this


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "page.html"
    assert main(["report", SHIPPED, "--arch", "sm_90", "-o", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_page_of_what_the_shipped_logs_have(shipped):
    text = shipped.read_text(encoding="utf-8")
    assert "From the logs that come with tvmconv, on NVIDIA H200" in text
    assert re.search(r'<th scope="row">register .*?</th><td>33\.\d µs</td>', text)
    assert "Roofline of NVIDIA H200" in text
    assert "the default config" in text
    assert "basic in full" in text
    assert re.search(r"filter1d\.jsonl: \d+ records on NVIDIA H200; 2026-11-\d\d; ", text)


@pytest.mark.slow
def test_the_same_page_wherever_it_is_written(tmp_path):
    first, again = tmp_path / "page.html", tmp_path / "again.html"
    for out in (first, again):
        assert main(["report", SHIPPED, "--arch", "sm_90", "--schedules", "basic", "-o", str(out)]) == 0
    assert again.read_bytes() == first.read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The page of a workload of which there is no time, but what a profiler counted."""
    file, out = (tmp_path_factory.mktemp("report") / name for name in ("counters.json", "page.html"))
    counted = {"counts": {"global_load_sectors": 500}, "limits": {}, "occupancy": 0.5, "registers": 40}
    measured = {"global_load_sectors": 1000, "occupancy_percent": 50.0}
    kernel = {"workload": SMALL, "schedule": "tiling", "config": {}, "step": 0, "counted": counted}
    file.write_text(json.dumps({"name": "x", "provenance": "a GPU", "kernels": [{**kernel, "measured": measured}]}))
    words = ["report", SMALL, "--arch", "sm_90", "--schedules", "tiling,vthread", "--counters", str(file)]
    assert main([*words, "-o", str(out)]) == 0
    return out.read_text(encoding="utf-8")


def results(page):
    """The names of the schedules whose times a page's Results show."""
    text = page.read_text(encoding="utf-8")
    section = text.partition('id="results-title"')[2].partition('id="kernels-title"')[0]
    return re.findall(r'<th scope="row">(\w+)', section)


@pytest.fixture
def times(tmp_path):
    """What `tvmconv run --json` prints of two workloads."""
    file = tmp_path / "run.json"
    lines = []
    for workload in (SMALL, SHIPPED):
        rows = tuple(ResultRow(name, timing=Timing((1e-5,), "by hand", cold=False)) for name in ("default", "tiling"))
        lines.append(json.dumps(Result(parse(workload), "cuda:0", "NVIDIA H200", 0, rows).to_json()))
    file.write_text("\n".join(lines) + "\n")
    return file


def test_times_are_read_from_what_run_prints(tmp_path, times):
    out = tmp_path / "page.html"
    words = ["report", SMALL, "--arch", "sm_90", "--results", str(times), "--schedules", "tiling", "-o", str(out)]
    assert main(words) == 0
    text = out.read_text(encoding="utf-8")
    assert "From run, on NVIDIA H200" in text
    assert results(out) == ["tiling"]


@pytest.mark.slow
def test_without_a_time_bounds_are_shown_and_said_to_be_computed(small):
    assert "estimate" in small
    assert "From the code, computed for NVIDIA H200" in small
    assert "vthread in full" in small


@pytest.mark.slow
def test_a_network_has_a_line_a_layer_and_all_of_them(tmp_path):
    suite, out = tmp_path / "net.json", tmp_path / "page.html"
    layers = [{"name": "<b>first</b>", "text": LAYER, "count": 3}, {"name": "last", "text": SMALL}]
    suite.write_text(json.dumps(layers), encoding="utf-8")
    words = ["report", "--suite", str(suite), "--arch", "sm_90", "--schedules", "tiling", "-o", str(out)]
    assert main(words) == 0
    text = out.read_text(encoding="utf-8")
    assert "4 convolutions, 2 of them distinct" in text
    assert "&lt;b&gt;first&lt;/b&gt; <span" in text
    assert "<b>first" not in text
    assert "All 4 layers" not in text  # nobody measured the second layer
    assert "This source has 1 of 2 layers." in text


@pytest.mark.slow
def test_what_a_profiler_counted_is_beside_what_is_counted(small):
    assert re.search(r'<td class="left">tiling</td><td>0\.500</td>', small)
    assert "<dt>counters.json</dt><dd>a GPU</dd>" in small


def test_an_architecture_whose_numbers_are_not_known(tmp_path):
    out = tmp_path / "page.html"
    assert main(["report", SMALL, "--arch", "sm_80", "--schedules", "tiling", "-o", str(out)]) == 0
    assert "there is no roofline" in out.read_text(encoding="utf-8")


def test_a_config_that_is_not_searched(tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "page.html"
    knobs = [["tile_c", "sp", [-1, 1, 4, 2]], ["tile_h", "sp", [-1, 1, 3, 1]], ["tile_w", "sp", [-1, 1, 8, 1]]]
    record = {"input": ["cuda -arch=sm_90", "tvmconv.conv2d.vthread", [SMALL], {}], "config": {"entity": knobs}}
    known = {"workload": SMALL, "schedule": "vthread", "device": "NVIDIA H200", "version": 0.2}
    log.write_text(json.dumps({**known, **record, "result": [[1e-5], 0, 1.0, 1.8e9], "tvm_version": "0.27.0"}))
    assert main(["report", SMALL, "--arch", "sm_90", "--schedules", "vthread", "--log", str(log), "-o", str(out)]) == 0
    assert "tile_h can be -1,1,3,1, but it is not searched" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "expected a workload or --suite"),
        ([SMALL, "--suite", "resnet50"], "expected a workload or --suite"),
        ([SMALL, "--schedules", "tilling"], "no schedule 'tilling'"),
        ([SMALL, "--results", "{log}"], "no results of a sweep"),
        ([SMALL, "--results", str(ROOT / "tuning_logs/nvidia-h200/d2l/d2l.json")], f"no result of {SMALL} in d2l"),
        ([SMALL, "--counters", "{log}"], "no such readings"),
        ([SMALL, "--log", "{log}"], f"no record of {SMALL} in log.jsonl"),
        ([SMALL, "--log", "{log}", "--only", "x"], "--only is for the layers of a suite"),
        ([SMALL, "--device", "opencl:0"], "opencl:0 is not an NVIDIA architecture"),
    ],
)
def test_a_mistake_is_one_line(words, line, tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "page.html"
    log.write_text("no record\n", encoding="utf-8")
    words = [str(log) if word == "{log}" else word for word in words]
    assert main(["report", *words, "-o", str(out)]) == 2
    told = capsys.readouterr()
    assert line in told.err
    assert told.err.count("\n") == 1
    assert not told.out
    assert not out.exists()


@pytest.mark.parametrize(("out", "line"), [("log.jsonl", "is also read"), ("", "Is a directory")])
def test_the_page_replaces_no_folder_and_no_file_that_is_read(out, line, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text("precious\n", encoding="utf-8")
    assert main(["report", SMALL, "--arch", "sm_90", "--log", str(log), "-o", str(tmp_path / out)]) == 2
    assert line in capsys.readouterr().err
    assert log.read_text(encoding="utf-8") == "precious\n"
