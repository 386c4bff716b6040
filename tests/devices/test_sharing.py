"""Turns of processes at a GPU, with two processes that hold the lock of a file."""

import math
import subprocess
import sys
import time

import pytest

from tvmconv.devices import sharing

HOLDER = """
import sys
from tvmconv.devices import sharing
with sharing.hold_gpu():
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv(sharing.LOCK_VARIABLE, str(tmp_path / "lock"))


def test_a_process_waits_for_its_turn(lock):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert sharing.get_last_use() == -math.inf
        started_at = time.monotonic()
        other.stdin.write("\n")
        other.stdin.flush()
        with sharing.hold_gpu():
            assert sharing.get_last_use() >= started_at


def test_turns_of_a_process_can_be_nested(lock):
    with sharing.hold_gpu(), sharing.hold_gpu():
        assert sharing.get_last_use() == -math.inf
    first = sharing.get_last_use()
    with sharing.hold_gpu():
        pass
    assert time.monotonic() >= sharing.get_last_use() > first


def test_without_the_variable_nothing_is_locked(monkeypatch):
    monkeypatch.delenv(sharing.LOCK_VARIABLE, raising=False)
    with sharing.hold_gpu():
        assert not sharing.is_shared()
    assert sharing.get_last_use() == -math.inf
