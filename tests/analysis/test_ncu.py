"""Nsight Compute's answers are read as numbers, and what it cannot do is told in a line."""

import pytest

from tvmconv.analysis.nsight.ncu import profile_command
from tvmconv.errors import DeviceError

METRICS = {"read": "dram__bytes_read.sum", "stall": "smsp__stall.ratio", "unknown": "no__such_metric.sum"}
ANSWER = """==PROF== Connected to process 42
"ID","Kernel Name","dram__bytes_read.sum","smsp__stall.ratio","no__such_metric.sum"
"","","byte","warp",""
"0","main_kernel","1,048,576","2.50","n/a"
"1","main_kernel","32","0","n/a"
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Put a stand-in for ncu on the PATH, which keeps what it was asked, prints an answer and exits."""

    def install(answer="", status=0, complaint=""):
        script = tmp_path / "ncu"
        (tmp_path / "answer").write_text(answer)
        script.write_text(
            f'#!/bin/sh\necho "$@" >{tmp_path}/asked\ncat {tmp_path}/answer\necho "{complaint}" >&2\nexit {status}\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "asked"

    return install


def test_each_launch_has_its_metrics_by_name(ncu):
    ncu(ANSWER)
    assert list(profile_command(["program"], METRICS)) == [{"read": 1048576, "stall": 2.5}, {"read": 32, "stall": 0}]


def test_ncu_is_asked_for_the_metrics_of_a_command(ncu):
    asked = ncu(ANSWER)
    list(profile_command(["program", "--option"], METRICS))
    words = asked.read_text().split()
    assert words[-2:] == ["program", "--option"]
    assert words[words.index("--metrics") + 1] == ",".join(METRICS.values())


def test_a_failure_is_told_by_ncus_last_line(ncu):
    ncu(status=1, complaint="ERR_NVGPUCTRPERM: no permission to read the counters")
    with pytest.raises(DeviceError, match="ncu failed: ERR_NVGPUCTRPERM: no permission"):
        list(profile_command(["program"], METRICS))


def test_where_ncu_is_missing_the_remedy_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="install Nsight Compute"):
        list(profile_command(["program"], METRICS))
