"""What measures built kernels: the protocol behind which a device of this host and a remote one look alike.

`tvmconv.measure.local_runner.LocalRunner` keeps a device process on this host. A runner of another kind needs the same
five methods; the `Measurer` deals programs to whichever of its runners is free.
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
    """Verifies and times programs for one workload, one after another, on one device.

    No method waits for a program. Every program that was submitted comes back from `poll` exactly once, whatever
    becomes of it: a runner notices hangs and crashes itself, goes on with the programs that were queued behind, and
    raises `DeviceError` from `poll` only when the device is lost for all of them. All calls come from one thread.
    """

    @property
    def device(self) -> Device:
        """What the programs are built for; its `name` goes into the records."""

    @property
    def num_free_slots(self) -> int:
        """How many more programs it takes now, so that the device is never idle; 0 while it starts."""

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue a program.

        Args:
            tag: comes back with the outcome.
            executable: built for `device`.
            best_seconds: the best time so far, in seconds a launch; one far above it is not measured to the last digit.
                None for a last timing, which takes longer.
        """

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """What has ended since the last call, by tag; called often, at least every 50 ms.

        Raises:
            DeviceError: the device is lost.
        """

    def wait_handles(self) -> Sequence[Connection | int]:
        """File descriptors or objects with a `fileno()` that become readable when `poll` has something to tell."""

    def close(self) -> None:
        """Stop everything, within a second; may be called twice."""
