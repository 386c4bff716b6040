"""Runner for a worker on another host, whose connection is held by a process that can be killed."""

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

START_SECONDS = rpc.MAX_WAIT_SECONDS + 60.0  # a worker must become free and compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond the limit of the executable; the worker may have to restart its runner process
TIMEOUT_MESSAGE = "it has not answered for {limit:g} s"
EXIT_MESSAGES = {
    ExitCause.CRASH: "the process with its connection ended",
    ExitCause.START_TIMEOUT: TIMEOUT_MESSAGE,
    ExitCause.JOB_TIMEOUT: TIMEOUT_MESSAGE,
}


class RPCRunner:
    """Local handle of a worker; see `tvmconv.measure.runner.Runner`.

    The worker verifies and times in its own runner process. If the worker is lost, `poll` raises, and other runners
    take its executables.

    `device`: device of the worker, with the address of the tracker.
    `problem`: inputs and reference; the worker generates the same inputs from its seed.
    `memory_limit_bytes`: host memory that the worker's runner process may use, in bytes.
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
        """Number of executables that can be submitted now; see `Runner.num_free_slots`."""
        return self._process.num_free_slots

    def submit(self, tag: int, executable: Executable, best_seconds: float | None) -> None:
        """Queue an executable; see `Runner.submit`."""
        self._process.submit(Job(tag, (executable, best_seconds)))

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return finished results; see `Runner.poll`."""
        answers = self._process.poll()
        results = [(job.tag, answer) for job, answer in answers if not isinstance(answer, ExitInfo)]
        if self._process.exit_info and not results:
            raise DeviceError(f"a worker of {self.device.text} is lost: {self._process.exit_info.reason}")
        return results

    def wait_handles(self) -> Sequence[Connection]:
        """Return the connection to the process."""
        return self._process.wait_handles()

    def close(self) -> None:
        """Close the connection, which also ends the session of the worker."""
        self._process.close()


def main(connection: Connection) -> None:
    """Run the process with the connection: answer executables with results, and end with an error text."""
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
            answer = measure_remotely(*serialization.encode_executable(executable, best_seconds))
            connection.send(serialization.decode_result(answer))
    except (DeviceError, RuntimeError) as error:  # TVM's errors have no common base class
        connection.send(get_first_line(error))
