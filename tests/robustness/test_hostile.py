"""`tvmconv tune` where the host lacks something: it works all the same, or refuses with one line and records nothing.

The most telling environment runs always; `pytest -m slow tests/robustness/test_hostile.py` runs the others.
"""

import pytest
from hostile import ENVIRONMENTS, no_namespace, run_in
from processes import GONE_SECONDS, processes_of, wait_for

from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records

WORKLOAD, TRIALS = "conv2d:1x8x14x14,8x8x3x3,s1,p1", 3
HOW = ("--schedule=tiling", "--tuner=random", "--workers=1", "--device=opencl:0", f"--trials={TRIALS}", "--log", "LOG")
ALWAYS = ("largest file 8 KiB",)
STATUSES = {"works": {0}, "refuses": {2}, "either": {0, 2}}


def records(ended):
    """The records of the log; fails if it has what is no record."""
    bad = InvalidLines()
    found = list(read_records(ended.log, bad))
    assert bad.count == 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in ENVIRONMENTS]
)
def test_a_hostile_environment_is_recorded_nowhere(tmp_path, name):
    environment, expected = ENVIRONMENTS[name]
    if "mount" in environment and (reason := no_namespace()):
        pytest.skip(reason)
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    ended = run_in(hostile, environment, ["tune", WORKLOAD, *HOW])
    print(f"{name}: status {ended.status}: {ended.err.splitlines()[-1:]}")
    if expected != "any":
        assert ended.status in STATUSES[expected], ended.err
    assert "Traceback" not in ended.err
    refusals = [line for line in ended.err.splitlines() if line.startswith("tvmconv: ")]
    assert len(refusals) == (ended.status == 2)
    before = records(ended)
    assert all(record.ok for record in before)

    healthy = tmp_path / "healthy"
    (healthy / "log").mkdir(parents=True)
    (healthy / "log" / "log.jsonl").write_bytes(ended.log.read_bytes())
    ended = run_in(healthy, ":", ["tune", WORKLOAD, *HOW])
    assert ended.status == 0, ended.err
    after = records(ended)
    assert after[: len(before)] == before
    trials = [record for record in after if record.schedule == "tiling" and not record.final]
    assert len({record.identity for record in trials}) == len(trials) == TRIALS
    assert all(record.ok for record in after)
    for folder in (hostile, healthy):
        wait_for(lambda folder=folder: not processes_of(folder / "tmp"), GONE_SECONDS)
    wait_for(lambda: not list((healthy / "tmp").iterdir()), GONE_SECONDS)
