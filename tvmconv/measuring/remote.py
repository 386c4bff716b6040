"""A worker of another host as a runner: a process of its own holds the connection, and is ended when that hangs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from tvmconv.compiler.program import Program
from tvmconv.devices import rpc
from tvmconv.devices.base import first_line
from tvmconv.errors import DeviceError
from tvmconv.measuring import wire
from tvmconv.measuring.child import Child
from tvmconv.measuring.runner import Outcome
from tvmconv.verify import Problem

DEPTH = 2  # programs at the connection: one that runs, and the next
START_SECONDS = rpc.FREE_SECONDS + 60.0  # for a worker to be free, and to compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond a program's own limit: the worker may have to start its device process anew


class RemoteRunner:
    """A worker, as the search sees it; see `tvmconv.measuring.runner.Runner`.

    The worker verifies and times like the host that it is, with a device process that a kernel may take down. When it
    is gone, `poll` raises, and what it had is for another runner.

    Args:
        device: where the tracker is, and what the worker's device must be.
        problem: what to verify and to time on; the worker draws the same inputs from its seed.
        timeout: seconds for one program.
        memory_limit: bytes of host memory that the worker's device process may hold.
    """

    def __init__(self, device: rpc.Remote, problem: Problem, timeout: float, memory_limit: int) -> None:
        self.device = device
        self._timeout = timeout
        self._tags: deque[int] = deque()  # of the programs at the connection, the one that runs first
        self._ready = False
        self._lost: str | None = None
        self._since = time.monotonic()
        self._child = Child("tvmconv.measuring.remote")
        order = wire.Order(problem.workload.text, problem.seed, timeout, memory_limit)
        self._child.send((device, order))

    @property
    def free(self) -> int:
        """How many more programs to submit now; see `Runner.free`."""
        return DEPTH - len(self._tags) if self._ready else 0

    def submit(self, tag: int, program: Program, best: float) -> None:
        """Queue a program; see `Runner.submit`."""
        if not self._tags:
            self._since = time.monotonic()
        self._tags.append(tag)
        self._child.send((program, best))

    def poll(self) -> list[tuple[int, Outcome]]:
        """What has ended; see `Runner.poll`."""
        ended: list[tuple[int, Outcome]] = []
        if self._lost is None:
            try:
                ended = self._receive()
            except EOFError:
                self._lost = "the process with its connection ended"
        if self._lost is not None and not ended:
            raise DeviceError(f"a worker of {self.device.text} is lost: {self._lost}")
        return ended

    def waitables(self) -> Sequence[Connection]:
        """The process's pipe."""
        return [self._child.connection]

    def close(self) -> None:
        """End the connection, and with it what the worker is doing for it."""
        self._child.kill()

    def _receive(self) -> list[tuple[int, Outcome]]:
        """What has come in; sets `_lost` if the worker is."""
        ended: list[tuple[int, Outcome]] = []
        for message in self._child.received():
            if isinstance(message, str):
                self._lost = message
            elif isinstance(message, Outcome):
                ended.append((self._tags.popleft(), message))
            self._ready = True
            self._since = time.monotonic()
        limit = self._timeout + ANSWER_SECONDS if self._ready else START_SECONDS
        if (self._tags or not self._ready) and time.monotonic() - self._since > limit:
            self._lost = f"it has not answered for {limit:g} s"
        return ended


def main(connection: Connection) -> None:
    """The process with the connection: programs in, outcomes out; a text tells what ended it."""
    device, order = connection.recv()
    try:
        session = rpc.connect(device.tracker, device.key)
        there = rpc.described(session)
        if (there["kind"], there["name"]) != (device.kind, device.name):
            raise DeviceError(f"its device is {there['name']}, not {device.name}: use a key for each kind of device")
        session.get_function(wire.OPEN)(order.encode())
        measure = session.get_function(wire.MEASURE)
        connection.send(None)
        while True:
            program, best = connection.recv()
            connection.send(wire.decode_outcome(measure(*wire.encode_program(program, best))))
    except (DeviceError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        connection.send(first_line(error))
