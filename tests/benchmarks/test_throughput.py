"""`tvmconv bench throughput`: rates side by side, and what is said where MetaSchedule cannot run."""

import json

import pytest

from tvmconv.baselines.metaschedule import MetaScheduleResult
from tvmconv.benchmarks import throughput
from tvmconv.errors import Error

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"
OURS, THEIRS = MetaScheduleResult(2000, 1900, 50.0, 1.2e-5), MetaScheduleResult(64, 60, 80.0, 2.3e-5)
STAGES = {"lower": 20.0, "time": 3.0}


@pytest.fixture
def measured(bench, monkeypatch, tmp_path, capsys):
    """Run the script with figures for both searches; its status, what it printed, and its JSON."""

    def run(ours=OURS, theirs=THEIRS):
        def measure_theirs(*args):
            if isinstance(theirs, Error):
                raise theirs
            return theirs

        monkeypatch.setattr(throughput, "measure_ours", lambda *args: (ours, STAGES))
        monkeypatch.setattr(throughput, "measure_metaschedule", measure_theirs)
        status = bench([SMALL, "--device", "opencl:0", "-o", str(tmp_path)])
        return status, capsys.readouterr().out, json.loads((tmp_path / "throughput.json").read_text())

    return run


def test_both_rates_and_their_ratio_are_told(measured):
    status, out, data = measured()
    assert status == 0
    rates = {line.split()[0]: line.split()[4] for line in out.splitlines()[3:5]}
    assert rates == {"tvmconv": "40.0", "MetaSchedule": "0.800"}
    assert "50.0 × the trials per second of MetaSchedule, and 50.7 × the successful ones" in out
    assert data["searches"]["MetaSchedule"]["succeeded"] == 60


def test_the_page_has_the_stages_and_where_it_comes_from(measured, tmp_path):
    measured()
    page = (tmp_path / "throughput.md").read_text()
    assert "| lower | 20.0 |" in page
    assert "tvmconv bench throughput" in page
    assert "TVM 0." in page


def test_a_failure_of_metaschedule_leaves_our_figures(measured):
    status, out, data = measured(theirs=Error("MetaSchedule ended with status 1"))
    assert (status, list(data["searches"])) == (1, ["tvmconv"])
    assert "MetaSchedule ended with status 1." in out


def test_metaschedule_without_a_time_has_no_ratio(measured):
    status, out, _ = measured(theirs=MetaScheduleResult(64, 0, 80.0, None))
    assert status == 1
    assert "—" in out
    assert "×" not in out.split("stage of a trial")[1]


@pytest.mark.usefixtures("shared_processes")
def test_on_opencl_tvmconv_is_measured_alone(bench, tmp_path, capsys):
    status = bench([SMALL, "--trials", "3", "--device", "opencl:0", "-o", str(tmp_path)])
    out = capsys.readouterr().out
    data = json.loads((tmp_path / "throughput.json").read_text())
    assert (status, list(data["searches"]), data["searches"]["tvmconv"]["trials"]) == (0, ["tvmconv"], 3)
    assert "TVM's wheel has no OpenCL runtime" in out
    assert not (tmp_path / "metaschedule.log").exists()
