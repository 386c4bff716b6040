"""`tvmconv tune` ended a hundred times at random moments: nothing that was measured is lost, repeated or wrong.

`pytest -m slow tests/robustness/test_kills.py` tries all, in a quarter of an hour on two
cores. The log of each round is that of a search that was ended ten times and then came to its end.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from processes import GONE_SECONDS, children, processes_of, wait_for
from tuning import Searches, once

WORKLOAD = "conv2d:1x8x14x14,8x8x3x3,s1,p1"
ENDLESS = "--trials=50000"
QUICK, ROUNDS = (0, 3), [(seed, 10) for seed in range(10)]  # seeds and numbers of kills
LONGEST_LIFE = 7.0  # seconds: a search starts in about two
IMPORT_SECONDS = 1.0  # in which Ctrl-C interrupts Python's imports, before the command can handle it


def end(process, way, moment):
    """End a search, or one of its processes."""
    if way == "a child":  # as the kernel does where memory is short; the search goes on, and is ended later
        started = sorted(filter(_is_python, children(process.pid)))
        if started:
            os.kill(moment.choice(started), signal.SIGKILL)
        time.sleep(moment.uniform(0.0, 2.0))
        os.killpg(process.pid, signal.SIGKILL)
    elif way == "the process alone":
        process.kill()
    else:
        os.killpg(process.pid, way)
        try:
            return process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            # CPython loses an interrupt that comes up in a weak reference's callback, as imports have them.
            assert way is signal.SIGINT
            os.killpg(process.pid, way)
    return process.communicate(timeout=60)


def _is_python(pid):
    """Whether a process is one of ours, and not the shell that removes a temporary folder."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, "the process alone", "a child")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in ROUNDS)])
def test_search_ended_at_any_moment_loses_and_repeats_nothing(tmp_path, seed, kills):
    searches, moment = Searches(tmp_path), random.Random(seed)
    before = []
    try:
        for kill in range(kills):
            process = searches.start(ENDLESS, workload=WORKLOAD)
            life = moment.uniform(0.0, LONGEST_LIFE)
            time.sleep(life)
            assert process.poll() is None, process.communicate()
            _, err = end(process, WAYS[kill % len(WAYS)], moment)
            assert "Traceback" not in err or life < IMPORT_SECONDS
            wait_for(lambda: not processes_of(searches.folder), GONE_SECONDS)
            now = searches.lines()
            assert now[: len(before)] == before
            assert all(record.ok for record in searches.trials(WORKLOAD))
            before = now
        wanted = len(searches.trials(WORKLOAD)) + 3
        process = searches.start(f"--trials={wanted}", workload=WORKLOAD)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        trials = searches.trials(WORKLOAD)
        assert len(trials) == wanted
        assert once(trials)
        assert all(record.ok for record in [*trials, *searches.finals(WORKLOAD)])
        assert [record.elapsed for record in trials] == sorted(record.elapsed for record in trials)
        assert searches.finals(WORKLOAD)
        assert searches.nothing_left()
        print(f"round {seed}: {kills} kills, {len(trials)} trials")
    finally:
        searches.close()
