"""Time limits with slack for work in progress.

A limit of S seconds counts from the beginning of the call or command. Work is planned to end within S. A build or a
timing that is in progress then may take `SLACK_FRACTION` of S and `SLACK_SECONDS` more before it is aborted.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

SLACK_FRACTION, SLACK_SECONDS = 0.15, 4.0  # beyond a limit; ending the processes takes up to a second more
MAX_START_SECONDS = 30.0  # longest plausible time from the start of a process to its command


@dataclass(frozen=True)
class Deadline:
    """Point in time, by `time.monotonic`, at which work should end."""

    end_time: float = math.inf  # time in seconds; infinite without a limit
    slack_seconds: float = 0.0  # seconds after `end_time` until work in progress is aborted

    @classmethod
    def after(cls, seconds: float | None, started_at: float | None = None) -> Deadline:
        """Return the deadline of a time limit.

        `started_at`: time by `time.monotonic` from which the limit counts; now by default.
        """
        if seconds is None:
            return cls()
        start = time.monotonic() if started_at is None else started_at
        return cls(start + seconds, SLACK_FRACTION * max(seconds, 0) + SLACK_SECONDS)

    @property
    def remaining_seconds(self) -> float:
        """Seconds until `end_time`, at least 0."""
        return max(self.end_time - time.monotonic(), 0.0)

    @property
    def has_passed(self) -> bool:
        """Whether `end_time` has passed."""
        return self.remaining_seconds == 0

    @property
    def cut_off(self) -> Deadline:
        """Deadline without slack at which work in progress is aborted."""
        return Deadline(self.end_time + self.slack_seconds)

    def shift_earlier(self, seconds: float) -> Deadline:
        """Return a deadline that is some seconds earlier, with the same slack."""
        return Deadline(self.end_time - seconds, self.slack_seconds)

    def reserve_seconds(self, seconds: float) -> Deadline:
        """Return a deadline without slack that leaves some seconds for later work."""
        return Deadline(self.end_time - seconds)


def find_earliest(*deadlines: Deadline) -> Deadline:
    """Return the earliest of some deadlines."""
    return min(deadlines, key=lambda deadline: deadline.end_time)


def get_process_start() -> float:
    """Return the start of this process by `time.monotonic`, or the current time if it started long ago."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5): starttime
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return now
    return now - age if age < MAX_START_SECONDS else now
