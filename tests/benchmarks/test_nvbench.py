"""`tvmconv bench nvbench`: what it refuses, and how it reads NVBench's JSON; NVBench itself needs an NVIDIA GPU."""

import json
import sys

import pytest

from tvmconv.benchmarks import nvbench
from tvmconv.reports.tables import make_table

SMALL = "filter1d:999,k3"


def test_without_the_bindings_one_line_names_the_extra(bench, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bench", None)
    assert bench([SMALL]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert 'pip install "cuda-bench==0.3.*"' in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "WORKLOAD"),
        ([SMALL, "filter2d:9x9x1,3x3"], "one operator, not of filter1d, filter2d"),
        ([SMALL, "--device", "opencl:0"], "expected --device cuda:N instead of opencl:0"),
        ([SMALL, "--seconds", "0"], "positive number"),
        (["filter1d:999,k4"], "odd"),
    ],
)
def test_bad_input_is_one_line_and_status_2(bench, capsys, monkeypatch, words, said):
    monkeypatch.setattr(nvbench, "nvbench_version", lambda: "cuda-bench 0.3.0")
    assert bench(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def state(schedule, values=None, skipped=None):
    """A state as NVBench writes it."""
    names = {"schedule": schedule, "workload": SMALL}
    return {
        "name": f"Device=0 {schedule}",
        "axis_values": [{"name": name, "type": "string", "value": value} for name, value in names.items()],
        "is_skipped": skipped is not None,
        "skip_reason": skipped,
        "summaries": [
            {"tag": f"nv/cold/{tag}", "data": [{"name": "value", "type": "float64", "value": str(value)}]}
            for tag, value in (values or {}).items()
        ],
    }


def write(path, *states):
    """A file as NVBench writes it."""
    values = {"schedule": [one["axis_values"][0]["value"] for one in states], "workload": [SMALL]}
    axes = [
        {"name": name, "type": "string", "flags": "", "values": [{"input_string": text} for text in texts]}
        for name, texts in values.items()
    ]
    benchmark = {"name": "tvmconv", "devices": [0], "axes": axes, "states": states}
    path.write_text(json.dumps({"devices": [{"id": 0, "name": "a GPU"}], "benchmarks": [benchmark]}))
    return path


def test_times_and_failures_are_read_from_nvbench_json(tmp_path):
    pytest.importorskip("cuda.bench")
    measured = dict(zip(nvbench.SUMMARIES, (4e-6, float("inf"), 2e9, 0.5), strict=True))
    file = write(
        tmp_path / "nvbench.json",
        state("basic", measured),
        state("shuffle", skipped="wrong result"),
        state("texture", skipped=nvbench.NOT_APPLICABLE),
    )
    rows, failures = nvbench.read_states(file, {(SMALL, "basic"): 5e-6})
    assert rows == [nvbench.NvbenchRow(SMALL, "basic", 4e-6, None, 2e9, 0.5, 5e-6)]
    assert failures == [f"{SMALL} shuffle failed: wrong result"]


def test_the_table_has_both_times_and_their_ratio():
    row = nvbench.NvbenchRow(SMALL, "basic", 4.5e-6, 0.0123, 2.5e12, 0.52, 5e-6)
    table = make_table([row], nvbench.COLUMNS)
    assert table.rows == [(SMALL, "basic", "4.50", "1.2%", "2,500", "52.0%", "5.00", "0.900")]


@pytest.mark.gpu
def test_nvbench_times_every_schedule_of_every_size(bench, tmp_path, capsys):
    pytest.importorskip("cuda.bench")
    larger = "filter1d:4194304,k3"
    assert bench([SMALL, larger, "--seconds", "0.01", "-o", str(tmp_path)]) == 0
    kernels = json.loads((tmp_path / "filter1d-nvbench.json").read_text())["kernels"]
    assert {kernel["workload"] for kernel in kernels} == {SMALL, larger}
    assert all(kernel["nvbench"] > 0 < kernel["ours"] for kernel in kernels)
    assert "cuda-bench" in (tmp_path / "filter1d-nvbench.md").read_text()
