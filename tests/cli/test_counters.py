"""`scripts/counters.py`: what a GPU counts beside what the code says, without a GPU to count."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import tvmconv as tc

SCRIPT = Path(__file__).parents[2] / "scripts" / "counters.py"
SMALL = "conv2d:1x4x8x8,16x4x3x3,p1"
OUTPUTS = 16 * 8 * 8
READ = {"nanoseconds": 2500.0, "dram_read_bytes": 3.0 * OUTPUTS, "occupancy_percent": 50.0, "barrier": 0.5}
READ |= {"long_scoreboard": 7.25, "wait": 2.0}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("counters", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # where its dataclass looks for what its annotations name
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def measured(script, monkeypatch, tmp_path, capsys):
    """Run the script with the same counters for two launches; what it printed, and the folder that it wrote to."""

    def run(*words):
        monkeypatch.setattr(script.ncu, "profile", lambda command, metrics: iter([READ, READ]))
        status = script.main([*words, "-o", str(tmp_path)])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out, tmp_path

    return run


def arguments():
    return (SMALL, "--schedules", "tiling", "--device", "sm_90")  # the naive schedule comes with it


def test_a_line_has_what_was_counted_of_a_schedule(measured):
    out, _ = measured(*arguments())
    line = next(line for line in out.splitlines() if line.startswith("tiling"))
    assert line.split()[1:6] == ["2.50", "—", "—", "—", "3.00"]  # microseconds, three busy units, bytes read from DRAM
    assert line.endswith("50.0%  long scoreboard 7.25, wait 2.00")


def test_what_ncu_does_not_have_is_left_blank(measured):
    out, _ = measured(*arguments())
    line = next(line for line in out.splitlines() if line.startswith("default"))
    assert line.split()[6] == "—"  # bytes written


def test_the_counts_of_the_code_are_kept_beside_those_of_the_gpu(measured):
    _, folder = measured(*arguments())
    default, tiling = json.loads((folder / "conv2d-counters.json").read_text())["kernels"]
    assert (default["schedule"], default["outputs"]) == ("default", OUTPUTS)
    assert tiling["metrics"]["dram_read_bytes"] == 3 * OUTPUTS
    assert tiling["code"]["shared loads"] > 0
    assert default["code"]["shared loads"] == 0


def test_the_page_can_be_made_again_from_the_json(measured):
    _, folder = measured(*arguments())
    page = (folder / "conv2d-counters.md").read_text()
    assert f"## {tc.parse(SMALL).text}" in page
    assert "scripts/counters.py" in page
    measured("--from", str(folder / "conv2d-counters.json"))
    assert (folder / "conv2d-counters.md").read_text() == page


def test_a_summary_goes_between_the_markers_of_a_page(measured, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- conv2d-counters -->\nold\n<!-- /conv2d-counters -->\nafter\n")
    measured(*arguments(), "--into", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert "| tiling | 2.50 |" in text
    assert "old" not in text


@pytest.mark.parametrize("words", [(), (SMALL, "--from", "x.json")])
def test_either_workloads_or_a_file_are_asked_for(script, capsys, words):
    assert script.main(list(words)) == 2
    assert "give workloads to measure or --from FILE" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(script, capsys, tmp_path):
    file = tmp_path / "other.json"
    file.write_text("[]")
    assert script.main(["--from", str(file)]) == 2
    assert "no such readings" in capsys.readouterr().err
