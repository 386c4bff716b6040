"""A worker of another host as a runner: a process of its own holds the connection, and is ended when that hangs."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from tvmconv.compiler.program import Program
from tvmconv.devices import rpc
from tvmconv.devices.base import first_line
from tvmconv.errors import DeviceError
from tvmconv.measuring import wire
from tvmconv.measuring.outcome import Outcome
from tvmconv.measuring.supervised import Cause, End, Job, Limits, Supervised
from tvmconv.verify import Problem

START_SECONDS = rpc.FREE_SECONDS + 60.0  # for a worker to be free, and to compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond a program's own limit: the worker may have to start its device process anew
SILENT = "it has not answered for {limit:g} s"
TEXTS = {Cause.CRASH: "the process with its connection ended", Cause.START: SILENT, Cause.TIME: SILENT}


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
        order = wire.Order(problem.workload.text, problem.seed, timeout, memory_limit, problem.mode)
        limits = Limits(START_SECONDS, timeout + ANSWER_SECONDS)
        self._process = Supervised("tvmconv.measuring.remote", lambda: (device, order), limits, TEXTS)

    @property
    def free(self) -> int:
        """How many more programs to submit now; see `Runner.free`."""
        return self._process.room

    def submit(self, tag: int, program: Program, best: float | None) -> None:
        """Queue a program; see `Runner.submit`."""
        self._process.submit(Job(tag, (program, best)))

    def poll(self) -> list[tuple[int, Outcome]]:
        """What has ended; see `Runner.poll`."""
        answers = self._process.poll()
        ended = [(job.tag, answer) for job, answer in answers if not isinstance(answer, End)]
        if self._process.end and not ended:
            raise DeviceError(f"a worker of {self.device.text} is lost: {self._process.end.reason}")
        return ended

    def waitables(self) -> Sequence[Connection]:
        """The process's pipe."""
        return self._process.waitables()

    def close(self) -> None:
        """End the connection, and with it what the worker is doing for it."""
        self._process.close()


def main(connection: Connection) -> None:
    """The process with the connection: programs in, outcomes out; a text tells what ended it."""
    device, order = connection.recv()
    try:
        session = rpc.connect(device.tracker, device.key)
        there = rpc.described(session)
        kind, name = there["kind"].value, there["name"].value
        if (kind, name) != (device.kind, device.name):
            raise DeviceError(f"its device is {name}, not {device.name}: use a key for each kind of device")
        session.get_function(wire.OPEN)(order.encode())
        measure = session.get_function(wire.MEASURE)
        connection.send(None)
        while True:
            program, best = connection.recv()
            connection.send(wire.decode_outcome(measure(*wire.encode_program(program, best))))
    except (DeviceError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        connection.send(first_line(error))
