"""Runner for a worker on another host, whose connection is held by a process that can be killed."""

from __future__ import annotations

from multiprocessing.connection import Connection

from tvmconv.devices import rpc
from tvmconv.devices.device import get_first_line
from tvmconv.errors import DeviceError
from tvmconv.measure import serialization
from tvmconv.measure.results import RunnerResult
from tvmconv.measure.runner import ProcessRunner
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, SupervisedWorker, WorkerLimits
from tvmconv.verification import Problem

START_SECONDS = rpc.MAX_WAIT_SECONDS + 60.0  # a worker must become free and compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond the limit of the executable; the worker may have to restart its runner process
TIMEOUT_MESSAGE = "it has not answered for {limit:g} s"
EXIT_MESSAGES = {
    ExitCause.CRASH: "the process with its connection ended",
    ExitCause.START_TIMEOUT: TIMEOUT_MESSAGE,
    ExitCause.JOB_TIMEOUT: TIMEOUT_MESSAGE,
}


class RPCRunner(ProcessRunner):
    """Runner for a worker on another host; the worker verifies and times in its own runner process.

    If the worker is lost, `poll` raises, and other runners take its executables.
    """

    def __init__(
        self, device: rpc.RPCDevice, problem: Problem, timeout_seconds: float, memory_limit_bytes: int
    ) -> None:
        request = serialization.SessionRequest(
            problem.workload.text, problem.seed, timeout_seconds, memory_limit_bytes, problem.mode
        )
        limits = WorkerLimits(START_SECONDS, timeout_seconds + ANSWER_SECONDS)
        super().__init__(device, SupervisedWorker(__name__, lambda: (device, request), limits, EXIT_MESSAGES))

    def poll(self) -> list[tuple[int, RunnerResult]]:
        """Return finished results; raise DeviceError if the worker is lost."""
        results = [(job.tag, answer) for job, answer in self._process.poll() if not isinstance(answer, ExitInfo)]
        if self._process.exit_info and not results:
            raise DeviceError(f"a worker of {self.device.text} is lost: {self._process.exit_info.reason}")
        return results


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
