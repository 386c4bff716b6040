"""A time limit: when work shall be done, and when what is still under way is cut off.

A limit of S seconds counts from the begin of the call, or of the command. Work is planned to end within S. What is
under way then, such as one build or one timing, may take `SLACK_FRACTION` of S and `SLACK_SECONDS` more before it is
cut off.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

SLACK_FRACTION, SLACK_SECONDS = 0.15, 4.0  # beyond a limit; a second more is left for ending processes
MAX_START_SECONDS = 30.0  # seconds from a process's begin to its command; an older one was doing something else


@dataclass(frozen=True)
class Deadline:
    """When something shall be done, as `time.monotonic` tells the time.

    Attributes:
        end_time: the time; infinite where there is no limit.
        slack_seconds: seconds after it at which what is under way is cut off.
    """

    end_time: float = math.inf
    slack_seconds: float = 0.0

    @classmethod
    def after(cls, seconds: float | None, started_at: float | None = None) -> Deadline:
        """The deadline of a limit.

        Args:
            seconds: the limit; None for none.
            started_at: when the clock began to run; by default now.
        """
        if seconds is None:
            return cls()
        return cls(
            (time.monotonic() if started_at is None else started_at) + seconds,
            SLACK_FRACTION * max(seconds, 0) + SLACK_SECONDS,
        )

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the end; 0 once it has passed."""
        return max(self.end_time - time.monotonic(), 0.0)

    @property
    def has_passed(self) -> bool:
        """Whether the end has come."""
        return self.remaining_seconds == 0

    @property
    def cut_off(self) -> Deadline:
        """When what is under way is cut off, as a deadline without slack."""
        return Deadline(self.end_time + self.slack_seconds)

    def shift_earlier(self, seconds: float) -> Deadline:
        """The deadline of what has to leave some seconds for what follows it, cut off so much earlier as well."""
        return Deadline(self.end_time - seconds, self.slack_seconds)

    def reserve_seconds(self, seconds: float) -> Deadline:
        """The deadline, without slack, of what has to leave some seconds for what follows it."""
        return Deadline(self.end_time - seconds)


def find_earliest(*deadlines: Deadline) -> Deadline:
    """The deadline that ends first."""
    return min(deadlines, key=lambda deadline: deadline.end_time)


def get_process_start() -> float:
    """When this process was begun, as `time.monotonic` would have told it; now, if that was for something else."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5): starttime
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, ValueError, IndexError):  # not on Linux
        return now
    return now - age if age < MAX_START_SECONDS else now
