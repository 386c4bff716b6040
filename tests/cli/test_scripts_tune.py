"""The scripts that tune a suite and compare it, on two small layers without a baseline."""

import importlib
import json
import runpy
from pathlib import Path

import pytest
from instant import Instant

from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.workloads import Layer, parse

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYERS = tuple(Layer(f"{c}_channels", parse(f"conv2d:1x{c}x6x6,{c}x{c}x1x1"), 1) for c in (2, 4))
HOW = ["--schedule", "tiling", "--tuner", "random", "--trials", "3", "--workers", "1", "--device", "opencl:0"]


@pytest.fixture
def script(monkeypatch):
    """Import a script as Python does when it is run."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.fixture
def small(monkeypatch):
    """All suites consist of the two layers."""
    monkeypatch.setattr("tvmconv.experiments.sweep.suite", lambda *_, **how: LAYERS)


def records_of(log):
    return list(read(log, BadLines()))


def test_a_suite_is_tuned_and_compared(script, small, tmp_path, capsys):
    words = [*HOW, "--baseline", "none", "-o", str(tmp_path)]
    assert script("tune_suite").main(words) == 0
    records = records_of(tmp_path / "d2l.jsonl")
    assert [record.workload for record in records] == [layer.workload for layer in LAYERS for _ in range(3)]
    for layer in json.loads((tmp_path / "d2l-tuned.json").read_text())["layers"]:
        rows = layer["result"]["rows"]
        assert [row["name"] for row in rows] == ["default", "conflict_free", "tuned"]
        assert all(row["timing"]["median"] > 0 for row in rows)
    assert (tmp_path / "d2l-tuned.md").exists()
    assert (tmp_path / "d2l-tuned.png").exists()
    assert "ms a trial" in capsys.readouterr().out


def test_the_same_command_tunes_nothing_again(script, small, tmp_path, monkeypatch):
    monkeypatch.setattr("tvmconv.searching.search.Measurer", Instant())
    words = [*HOW, "--tune-only", "-o", str(tmp_path)]
    assert script("tune_suite").main(words) == 0
    log = tmp_path / "d2l.jsonl"
    before = log.read_bytes()
    assert script("tune_suite").main(words) == 0
    assert log.read_bytes() == before


@pytest.mark.parametrize(("name", "suite", "seconds"), [("tune_d2l", "d2l", 60.0), ("tune_resnet50", "resnet50", 30.0)])
def test_the_script_of_a_suite_has_its_time_as_default(script, name, suite, seconds, monkeypatch):
    asked = {}
    monkeypatch.setattr(script("tune_suite"), "main", lambda **how: asked.update(how))
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    assert asked == {"prog": name, "suite": suite, "seconds": seconds}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--suite", "alexnet"], "'alexnet'"), (["--only", "9x9"], "'9x9'"), (["--trials", "-1"], "'-1'")],
)
def test_bad_input_is_one_line_and_status_2(script, tmp_path, capsys, words, said):
    status = script("tune_suite").main([*words, "-o", str(tmp_path)])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tune_suite: ")
    assert said in err
