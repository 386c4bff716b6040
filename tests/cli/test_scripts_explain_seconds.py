"""scripts/explain_seconds.py: how long pages take, and what an earlier run timed."""

import json
import runpy
from pathlib import Path

import pytest

from tvmconv.compiler.nvrtc import unavailable

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/explain_seconds.py"))
MAIN = SCRIPT["main"]
SLOW = "tiling"


@pytest.fixture
def kept(tmp_path):
    """A file of an earlier run, which timed the largest layer of each schedule: one of them took long."""
    file = tmp_path / "seconds.jsonl"
    wanted = SCRIPT["shipped_kernels"](1)
    rows = [[schedule, workload, 1000.0 if schedule == SLOW else 0.5] for schedule, workload in wanted]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.skipif(unavailable() is not None, reason="needs NVRTC")
def test_what_was_timed_is_kept_and_what_took_long_is_timed_again(kept, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- seconds -->\n<!-- /seconds -->\nafter\n")
    before = len(kept.read_text().splitlines())
    assert MAIN(["--each", "1", "--limit", "500", "-o", str(kept), "--into", str(page)]) == 0
    schedule, workload, seconds = json.loads(kept.read_text().splitlines()[-1])
    assert (schedule, len(kept.read_text().splitlines())) == (SLOW, before + 1)
    assert 0.1 < seconds < 500
    assert any(line.startswith(SLOW) and line.endswith(workload) for line in capsys.readouterr().out.splitlines())
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| all |"))
    assert row.startswith(f"| all | {before} | 0.50 | {seconds:.2f} | 0 | {workload} by {SLOW}")


@pytest.mark.parametrize("text", ["nonsense", "[1]", '["tiling", "conv2d:1x1x1x1,1x1x1x1", null]', "7"])
def test_what_another_program_wrote_is_one_line_and_status_2(text, tmp_path, capsys):
    file = tmp_path / "seconds.jsonl"
    file.write_text(f"{text}\n")
    assert MAIN(["--each", "1", "-o", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "is not what this script writes" in err
