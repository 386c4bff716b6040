"""Turns of several processes at a GPU, so that the measurements of one are not disturbed by those of another.

The variable `TVMCONV_GPU_LOCK` names a file. A process that measures holds a lock of it, and the file has the time of
the last release, because a GPU that another process has just used keeps its clocks. Without the variable, nothing is
locked: a process that has the GPU for itself does not wait.
"""

from __future__ import annotations

import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOCK_VARIABLE = "TVMCONV_GPU_LOCK"
WAIT_SECONDS = 25.0  # time that a measurement may wait for its turn, which is added to its time limit
_FORMAT = "<d"  # seconds of `time.monotonic`, which all processes of a host share

_holds = threading.RLock()
_num_holds = 0
_turn_seconds: list[float] = []


def is_shared() -> bool:
    """Return whether processes take turns at the GPU."""
    return bool(os.environ.get(LOCK_VARIABLE))


@contextmanager
def hold_gpu() -> Iterator[None]:
    """Wait for the turn of this process, and keep it until the end of the block; blocks of a process can be nested."""
    global _num_holds
    path = os.environ.get(LOCK_VARIABLE)
    if not path:
        yield
        return
    with _holds:
        if _num_holds:
            _num_holds += 1
            try:
                yield
            finally:
                _num_holds -= 1
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _num_holds, started_at = 1, time.monotonic()
            try:
                yield
            finally:
                _num_holds = 0
                _turn_seconds.append(time.monotonic() - started_at)
                os.pwrite(descriptor, struct.pack(_FORMAT, time.monotonic()), 0)
        finally:
            os.close(descriptor)  # releases the lock, as the end of a killed process does


def take_turn_seconds() -> list[float]:
    """Return how long each turn of this process took since the last call."""
    seconds = [*_turn_seconds]
    _turn_seconds.clear()
    return seconds


def get_last_use() -> float:
    """Return the `time.monotonic` at which a process ended its turn at last; minus infinity if unknown."""
    path = os.environ.get(LOCK_VARIABLE)
    if not path:
        return -math.inf
    try:
        with open(path, "rb") as file:
            data = file.read(struct.calcsize(_FORMAT))
    except OSError:
        return -math.inf
    return struct.unpack(_FORMAT, data)[0] if len(data) == struct.calcsize(_FORMAT) else -math.inf
