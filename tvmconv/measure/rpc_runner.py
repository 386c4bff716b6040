"""A worker of another host as a runner: a process of its own holds the connection, and is ended when that hangs."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

from tvmconv.compiler.executable import Executable
from tvmconv.devices import rpc
from tvmconv.devices.device import get_first_line
from tvmconv.errors import DeviceError
from tvmconv.measure import serialization
from tvmconv.measure.results import RunnerResult
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, Job, SupervisedWorker, WorkerLimits
from tvmconv.verification import Problem

START_SECONDS = rpc.MAX_WAIT_SECONDS + 60.0  # for a worker to be free, and to compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond a program's own limit: the worker may have to start its device process anew
TIMEOUT_MESSAGE = "it has not answered for {limit:g} s"
EXIT_MESSAGES = {
    ExitCause.CRASH: "the process with its connection ended",
    ExitCause.START_TIMEOUT: TIMEOUT_MESSAGE,
    ExitCause.JOB_TIMEOUT: TIMEOUT_MESSAGE,
}


class RPCRunner:
    """A worker, as the search sees it; see `tvmconv.measure.runner.Runner`.

    The worker verifies and times like the host that it is, with a device process that a kernel may take down. When it
    is gone, `poll` raises, and what it had is for another runner.

    Args:
        device: where the tracker is, and what the worker's device must be.
        problem: what to verify and to time on; the worker draws the same inputs from its seed.
        timeout_seconds: seconds for one program.
        memory_limit_bytes: bytes of host memory that the worker's device process may hold.
    """

    def __init__(
        self, device: rpc.RPCDevice, problem: Problem, timeout_seconds: float, memory_limit_bytes: int
    ) -> None:
        self.device = device
        request = serialization.SessionRequest(
            problem.workload.text, problem.seed, timeout_seconds, memory_limit_bytes, problem.mode
        )
        limits = WorkerLimits(START_SECONDS, timeout_seconds + ANSWER_SECONDS)
        self._process = SupervisedWorker("tvmconv.measure.rpc_runner", lambda: (device, request), limits, EXIT_MESSAGES)

    @property
    def num_free_slots(self) -> int:
        """How many more programs to submit now; see `Runner.num_free_slots`."""
        return self._process.num_free_slots

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue a program; see `Runner.submit`."""
        self._process.submit(Job(tag, (executable, best_seconds)))

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """What has ended; see `Runner.poll`."""
        answers = self._process.poll()
        results = [(job.tag, answer) for job, answer in answers if not isinstance(answer, ExitInfo)]
        if self._process.exit_info and not results:
            raise DeviceError(f"a worker of {self.device.text} is lost: {self._process.exit_info.reason}")
        return results

    def wait_handles(self) -> Sequence[Connection]:
        """The process's pipe."""
        return self._process.wait_handles()

    def close(self) -> None:
        """End the connection, and with it what the worker is doing for it."""
        self._process.close()


def main(connection: Connection) -> None:
    """The process with the connection: programs in, outcomes out; a text tells what ended it."""
    device, request = connection.recv()
    try:
        session = rpc.connect_worker(device.tracker, device.key)
        description = rpc.read_description(session)
        kind, name = description["kind"].value, description["name"].value
        if (kind, name) != (device.kind, device.name):
            raise DeviceError(f"its device is {name}, not {device.name}: use a key for each kind of device")
        session.get_function(serialization.OPEN_FUNCTION)(request.encode())
        measure_remotely = session.get_function(serialization.MEASURE_FUNCTION)
        connection.send(None)
        while True:
            executable, best_seconds = connection.recv()
            connection.send(
                serialization.decode_result(
                    measure_remotely(*serialization.encode_executable(executable, best_seconds))
                )
            )
    except (DeviceError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        connection.send(get_first_line(error))
