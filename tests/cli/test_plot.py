import json
from pathlib import Path

import pytest

from tvmconv.cli import main
from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.workloads import parse

SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")
OTHER = parse("conv2d:1x2x6x6,8x2x3x3,p1")
MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def write_log(path, *workloads):
    """A log of three trials for each workload, the second of which failed."""
    records = []
    for workload in workloads:
        for trial, times in enumerate(((3e-6,), (), (1e-6, 2e-6))):
            error = ErrorKind.NONE if times else ErrorKind.RUN_TIMEOUT
            record = Record(workload, "tiling", {}, "NVIDIA H200", "cuda", times=times, error=error, elapsed=trial)
            records.append(record.line())
    path.write_text("\n".join(records) + "\n")
    return str(path)


@pytest.fixture
def log(tmp_path):
    return write_log(tmp_path / "one.jsonl", SMALL)


@pytest.fixture
def sweep(tmp_path):
    """A sweep's JSON file."""
    results = [
        Result(
            SMALL,
            "cuda:0",
            "NVIDIA H200",
            0,
            (ResultRow("default", gflops=1.0), ResultRow("cudnn", gflops=2.0, library="9.19")),
        )
    ]
    path = tmp_path / "sweep.json"
    path.write_text(Sweep("d2l", ["4"], results, "here").to_json())
    return str(path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("suffix", MAGIC)
def test_the_suffix_tells_the_format(capsys, tmp_path, log, suffix):
    image = tmp_path / f"chart.{suffix}"
    assert main(["plot", log, "-o", str(image)]) == 0
    assert capsys.readouterr() == (f"{image}\n", "")
    assert image.read_bytes().startswith(MAGIC[suffix])


def svg(tmp_path, *words):
    """The texts of a chart: matplotlib leaves them in an SVG as comments."""
    image = tmp_path / "chart.svg"
    assert main(["plot", *words, "-o", str(image)]) == 0
    return image.read_text()


def test_one_workload_is_drawn_over_trials_and_time(tmp_path, log):
    chart = svg(tmp_path, log)
    assert "<!-- tiling, 3 trials, 33% failed -->" in chart
    assert "<!-- seconds of tuning -->" in chart


@pytest.mark.parametrize("elapsed", ["1e308", "-1"])
def test_seconds_of_tuning_out_of_range_are_a_bad_line(capsys, tmp_path, log, elapsed):
    with Path(log).open("a") as file:
        file.write(Path(log).read_text().splitlines()[0].replace('"elapsed": 0', f'"elapsed": {elapsed}') + "\n")
    assert "3 trials" in svg(tmp_path, log)
    assert "1 bad line (4), line 4: elapsed is not 0 to 1e+09 seconds" in capsys.readouterr().err


def test_many_workloads_are_drawn_side_by_side(tmp_path):
    chart = svg(tmp_path, write_log(tmp_path / "two.jsonl", SMALL, OTHER))
    assert "<!-- 1x2x6x6,8x2x3x3,s1,p1 -->" in chart
    assert "<!-- tiling, 6 trials, 33% failed -->" in chart


def test_a_sweep_is_drawn_beside_the_best_of_a_search(tmp_path, log, sweep):
    assert "<!-- cudnn -->" in svg(tmp_path, log, sweep)


@pytest.mark.parametrize("workloads", [(SMALL,), (SMALL, OTHER)])
def test_what_run_prints_is_drawn_as_a_sweep(tmp_path, workloads):
    rows = (ResultRow("default", gflops=1.0), ResultRow("tiling", gflops=2.0))
    lines = [json.dumps(Result(each, "cuda:0", "NVIDIA H200", 0, rows).to_json()) for each in workloads]
    path = tmp_path / "run.json"
    path.write_text("\n".join(lines) + "\n")
    chart = svg(tmp_path, str(path))
    assert "run, float32, on NVIDIA H200" in chart


def test_a_sweep_over_sizes_is_drawn_over_elements(tmp_path):
    timing = Timing((1e-3,), "by hand", cold=True)
    results = [
        Result(
            parse(f"filter1d:{n},k5"), "cuda:0", "NVIDIA H200", 0, (ResultRow("basic", timing=timing, bandwidth=1e12),)
        )
        for n in (4096, 1000)
    ]
    path = tmp_path / "filter.json"
    path.write_text(Sweep("filter1d-k5", ["4096", "1000"], results, "here").to_json())
    chart = svg(tmp_path, str(path))
    assert "<!-- filter1d:k5, float32, on NVIDIA H200 -->" in chart
    assert "<!-- GB/s -->" in chart
    assert "<!-- elements; hot: in the L2 cache, cold: not -->" in chart


REFUSALS = {
    "no such file": (["nowhere.jsonl", "-o", "x.png"], "nowhere.jsonl"),
    "not a log": ([__file__, "-o", "x.png"], "has no record"),
    "an empty log": (["/dev/null", "-o", "x.png"], "has no record"),
    "a folder": (["/", "-o", "x.png"], "/"),
    "format": (["LOG", "-o", "chart.gif"], "'chart.gif'"),
    "no format": (["LOG", "-o", "chart"], "expected a file named *.png"),
    "a workload that is not there": (["LOG", "-o", "x.png", "--workload", str(OTHER)], f"no record of {OTHER}"),
    "no workload": (["LOG", "-o", "x.png", "--workload", "banana"], "'banana'"),
    "a folder that is not there": (["LOG", "-o", "/nowhere/x.png"], "/nowhere/x.png"),
    "a sweep that is none": (["BAD", "-o", "x.png"], "no results of a sweep"),
}


@pytest.mark.parametrize(("words", "said"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_one_line_and_status_2(capsys, tmp_path, log, words, said):
    bad = tmp_path / "bad.json"
    bad.write_text('{"name": "d2l"}')
    status = main(["plot", *({"LOG": log, "BAD": str(bad)}.get(word, word) for word in words)])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_dollars_in_names_are_no_formulas(suffix, tmp_path, capsys):
    data = json.loads(
        (Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200" / "d2l" / "d2l-tuned.json").read_text()
    )
    for layer in data["layers"]:
        layer["label"] += " $x^{$"
        layer["result"]["device_name"] = "$x^{$"
    file = tmp_path / "$x^{$.json"
    file.write_text(json.dumps(data))
    assert main(["plot", str(file), "-o", str(tmp_path / f"out.{suffix}")]) == 0
    assert main(["plot", str(file), str(file), "-o", str(tmp_path / f"out.{suffix}")]) == 0
