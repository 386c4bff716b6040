"""Protocol of runners, which measure executables on a local or remote device.

`tvmconv.measure.local_runner.LocalRunner` manages a runner process on this host. A custom runner implements the same
methods, and the `Measurer` submits executables to its free runners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tvmconv.measure.results import RunnerResult

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tvmconv.compiler.executable import Executable
    from tvmconv.devices import Device


class Runner(Protocol):
    """Runner that verifies and times executables for one workload on one device, one after another.

    No method waits for an executable. `poll` returns each submitted one exactly once, whatever its outcome. A runner
    detects hangs and crashes itself and continues with the queued executables. `poll` raises `DeviceError` only if the
    device is lost for all of them. All calls come from one thread.
    """

    @property
    def device(self) -> Device:
        """Device that executables are built for; its `name` is written to the records."""

    @property
    def num_free_slots(self) -> int:
        """Number of executables to submit now so that the device is never idle; 0 during the start."""

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue an executable.

        `best_seconds`: best time so far in seconds per launch, far above which less time is spent on a measurement.
            None requests a final timing, which takes longer.
        """

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return tags and results since the last call; the measurer calls this at least every 50 ms."""

    def wait_handles(self) -> Sequence[Connection | int]:
        """Return file descriptors, or objects with a `fileno()`, that become readable when `poll` has results."""

    def close(self) -> None:
        """Stop all work within a second; a second call has no effect."""
