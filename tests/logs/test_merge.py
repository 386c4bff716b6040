"""Logs become one without losing or repeating a measurement, and never at the cost of a log that is there."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.merge import import_logs, merge_logs
from tvmconv.logs.record import Record

W = tc.parse("conv2d:1x8x6x6,4x8x3x3,p1")
FIRST = Record(W, "tiling", {"tile": 1}, "cpu", "opencl", times=(1e-6,), timestamp=1.0)
AGAIN = replace(FIRST, times=(2e-6,), timestamp=2.0)  # the same config, measured once more
OTHER = replace(FIRST, config={"tile": 2})
SAMPLE = Path(__file__).parents[1] / "data/tophub-cuda.jsonl"


@pytest.fixture
def logs(tmp_path):
    paths = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, records in zip(paths, ([FIRST, AGAIN], [OTHER, FIRST]), strict=True):
        path.write_text("".join(f"{record.line()}\n" for record in records))
    return paths


def all_of(path):
    return list(read_records(path, InvalidLines()))


def test_merging_keeps_each_measurement_once_in_order(logs, tmp_path):
    out = tmp_path / "out.jsonl"
    assert merge_logs(logs, out, InvalidLines()) == (3, 1)
    assert all_of(out) == [FIRST, AGAIN, OTHER]
    out.chmod(0o640)
    merge_logs(logs, out, InvalidLines())  # a new log has the permissions of the one that it replaces
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


@pytest.mark.parametrize("link", [False, True])
def test_a_log_that_is_read_is_never_written(logs, tmp_path, link):
    before = logs[0].read_bytes()
    out = tmp_path / "link.jsonl" if link else logs[0]
    if link:
        out.symlink_to(logs[0])
    with pytest.raises(tc.Error, match="is also read"):
        merge_logs(logs, out, InvalidLines())
    assert logs[0].read_bytes() == before


def test_a_merge_that_fails_leaves_everything_as_it_was(logs, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(tc.Error, match=r"cannot read .*missing\.jsonl"):
        merge_logs([*logs, tmp_path / "missing.jsonl"], out, InvalidLines())
    assert out.read_text() == "precious\n"
    assert sorted(tmp_path.iterdir()) == sorted([*logs, out])


def test_what_is_no_regular_file_is_not_replaced(logs, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(tc.Error, match=r"^cannot write .*pipe: expected a regular file$"):
        merge_logs(logs, pipe, InvalidLines())
    assert pipe.is_fifo()


def test_a_link_beside_the_output_is_not_followed(logs, tmp_path):
    victim, out = tmp_path / "victim", tmp_path / "out.jsonl"
    victim.write_text("precious\n")
    planted = tmp_path / f".out.jsonl.{os.getpid()}"
    planted.symlink_to(victim)
    merge_logs(logs, out, InvalidLines())
    assert victim.read_text() == "precious\n"
    assert not out.is_symlink()
    assert all_of(out) == [FIRST, AGAIN, OTHER]
    assert sorted(tmp_path.iterdir()) == sorted([*logs, victim, out, planted])


def test_importing_rewrites_every_line_that_has_a_schedule(tmp_path):
    out, bad = tmp_path / "new.jsonl", InvalidLines()
    assert import_logs([SAMPLE], out, bad) == 29
    assert [kind.count for kind in bad.kinds.values()] == [3, 1]
    assert "conv2d_transpose_nchw.cuda" in str(bad)
    assert all_of(out) == all_of(SAMPLE)
    assert all('"workload": "conv2d:' in line for line in out.read_text().splitlines())
