"""The benchmark that measures a filter over sizes, on small ones and with two small schedules."""

import json

import pytest

from tvmconv.experiments.sweep import Sweep
from tvmconv.registry import schedule


def basic(s, w, k):
    """A thread for each output."""
    _one_thread_an_output(s, w, 64)


def wide(s, w, k):
    """The same in larger blocks."""
    _one_thread_an_output(s, w, 256)


def shuffle(s, w, k):
    """Never built here."""


def _one_thread_an_output(s, w, threads):
    s.compute_inline(s.get_sblock("padded"))
    total = s.get_sblock("sum")
    store = s.cache_write(total, 0, "local")
    s.reverse_compute_inline(s.get_sblock("Y"))
    loops = s.get_loops(total)
    block, thread = s.split(s.fuse(*loops[: len(w.argument_shapes[-1])]), [None, threads])
    s.bind(block, "blockIdx.x")
    s.bind(thread, "threadIdx.x")
    s.reverse_compute_at(store, thread)


@pytest.fixture
def few_filters(schedule_registry):
    """The schedule_registry with filters that have three schedules, one of them for CUDA alone."""
    for key in [key for key in schedule_registry if key[0].startswith("filter")]:
        del schedule_registry[key]
    for operator in ("filter1d", "filter2d"):
        schedule(operator, baseline=True)(basic)
        schedule(operator)(wide)
        schedule(operator, device_kinds=("cuda",))(shuffle)


pytestmark = pytest.mark.usefixtures("few_filters")
HOW = ["--device", "opencl:0", "--seconds", "0.01"]
SIZES = ["--sizes", "1000", "4096"]


@pytest.mark.slow
def test_every_schedule_is_measured_at_every_size(bench, tmp_path):
    assert bench([*HOW, *SIZES, "-o", str(tmp_path)]) == 0
    sweep = Sweep.read(tmp_path / "filter1d-k5.json")
    assert [result.workload.text for result in sweep.results] == ["filter1d:1000,k5", "filter1d:4096,k5"]
    assert all([row.name for row in result.rows] == ["basic", "wide"] for result in sweep.results)
    assert all(row.verified and row.bandwidth > 0 for result in sweep.results for row in result.rows)
    text = (tmp_path / "filter1d-k5.md").read_text()
    assert text.startswith("| GB/s | 1000 hot | 4096 hot |\n")
    assert "tvmconv bench bandwidth --device opencl:0" in text


def test_mask_sizes_and_schedules_are_options(bench, tmp_path):
    words = ["--operator", "filter2d", "--mask", "3x5", "--sizes", "8x9x3", "20x8x3", "--only", "wide"]
    assert bench([*HOW, *words, "-o", str(tmp_path)]) == 0
    layers = json.loads((tmp_path / "filter2d-3x5.json").read_text())["layers"]
    assert [layer["result"]["workload"] for layer in layers] == ["filter2d:8x9x3,3x5", "filter2d:20x8x3,3x5"]
    assert (tmp_path / "filter2d-3x5.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(bench, tmp_path, monkeypatch):
    from tvmconv.experiments.run import run_schedules

    measured = []

    def stopped_at_4096(workload, **how):
        if workload.n == 4096:
            raise KeyboardInterrupt
        return run_schedules(workload, **how)

    def noted(workload, **how):
        measured.append(workload.n)
        return run_schedules(workload, **how)

    monkeypatch.setattr("tvmconv.experiments.sweep.run_schedules", stopped_at_4096)
    assert bench([*HOW, *SIZES, "-o", str(tmp_path)]) == 130
    monkeypatch.setattr("tvmconv.experiments.sweep.run_schedules", noted)
    assert bench([*HOW, *SIZES, "-o", str(tmp_path)]) == 0
    assert measured == [4096]
    assert Sweep.read(tmp_path / "filter1d-k5.json").labels == ["1000", "4096"]


@pytest.mark.slow
def test_other_schedules_are_measured_anew(bench, tmp_path):
    bench([*HOW, *SIZES, "--only", "basic", "-o", str(tmp_path)])
    bench([*HOW, *SIZES, "-o", str(tmp_path)])
    rows = Sweep.read(tmp_path / "filter1d-k5.json").results[0].rows
    assert [row.name for row in rows] == ["basic", "wide"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "4096"], "at least two"),
        (["--sizes", "4096", "banana"], "'banana'"),
        (["--mask", "k4"], "odd"),
        (["--only", "basic,,wide"], "'basic,,wide'"),
        (["--only", "nope"], "no schedule 'nope' for filter1d"),
        (["--only", "shuffle"], "schedule shuffle is for cuda, not for opencl:0"),
        (["--operator", "conv2d"], "'conv2d'"),
        (["--baseline", "mkl"], "'mkl'"),
        (["-o", __file__], "exists"),
    ],
)
def test_bad_input_is_one_line_and_status_2(bench, capsys, words, said):
    assert bench([*HOW[:2], *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1].startswith("tvmconv: ")) == ("", True)
    assert said in err
