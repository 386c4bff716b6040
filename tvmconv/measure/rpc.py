"""Measurement on other hosts: the runner for a worker there, and the worker, a TVM RPC server with packed functions."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import NoReturn

from tvmconv import workloads
from tvmconv.devices import Device, rpc
from tvmconv.devices.device import get_first_line
from tvmconv.errors import DeviceError
from tvmconv.measure import serialization
from tvmconv.measure.results import RunnerResult
from tvmconv.measure.runner import LocalRunner, ProcessRunner
from tvmconv.measure.workers.process import set_parent_death_signal
from tvmconv.measure.workers.supervisor import ExitCause, ExitInfo, SupervisedWorker, WorkerLimits
from tvmconv.tempdir import ProcessTempDir
from tvmconv.verification import Problem

START_SECONDS = rpc.MAX_WAIT_SECONDS + 60.0  # a worker must become free and compute inputs and reference
ANSWER_SECONDS = 30.0  # beyond the limit of the executable; the worker may have to restart its runner process
TIMEOUT_MESSAGE = "it has not answered for {limit:g} s"
EXIT_MESSAGES = {
    ExitCause.CRASH: "the process with its connection ended",
    ExitCause.START_TIMEOUT: TIMEOUT_MESSAGE,
    ExitCause.JOB_TIMEOUT: TIMEOUT_MESSAGE,
}
POLL_SECONDS = 0.05


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


class WorkerSession:
    """Functions of a worker; TVM forks a process with its own runner for each session."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runner: LocalRunner | None = None

    def describe(self) -> str:
        """Return the description of the device; see `rpc.describe_device`."""
        return rpc.describe_device(self._device)

    def open(self, request_text: str) -> None:
        """Start a runner process for an encoded `serialization.SessionRequest`."""
        request = serialization.SessionRequest.decode(request_text)
        problem = Problem(workloads.parse(request.workload), request.seed, mode=request.verification_mode)
        self._runner = LocalRunner(self._device, problem, request.timeout_seconds, request.memory_limit_bytes)

    def measure(self, header: str, code: bytes) -> str:
        """Measure an executable (`serialization.encode_executable`) and return its encoded result."""
        runner = self._runner
        if runner is None:
            raise DeviceError("no session: call tvmconv.open first")
        executable, best_seconds = serialization.decode_executable(header, bytes(code))
        results: list[tuple[int, RunnerResult]] = []
        while not runner.num_free_slots:
            results += runner.poll()
            wait(runner.wait_handles(), POLL_SECONDS)
        runner.submit(0, executable, best_seconds)
        while not results:
            wait(runner.wait_handles(), POLL_SECONDS)
            results += runner.poll()
        return serialization.encode_result(results[0][1])


def serve_sessions(
    device: Device, key: str, tracker: rpc.Address, host: str, port: int, on_listening: Callable[[int], None]
) -> NoReturn:
    """Serve sessions until the process ends.

    `host`: address to bind to. Every host that can reach it can run code here, because TVM's RPC has no password.
    `on_listening`: function that is called with the port once the server listens.
    """
    import tvm_ffi
    from tvm.rpc.server import PopenRPCServerState

    rpc.count_workers(tracker, key)  # TVM would silently retry a missing tracker for a minute
    session = WorkerSession(device)
    functions = {
        rpc.DESCRIBE_FUNCTION: session.describe,
        serialization.OPEN_FUNCTION: session.open,
        serialization.MEASURE_FUNCTION: session.measure,
    }
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)
    # TVM creates a directory for each session and leaves it behind when it is killed.
    temp_dir = ProcessTempDir("tvmconv-worker-")
    tempfile.tempdir = str(temp_dir.path)
    os.register_at_fork(after_in_child=functools.partial(set_parent_death_signal, os.getpid()))
    # The listener thread ends with an error if a session crashes or the tracker is gone for a minute; it is restarted.
    threading.excepthook = lambda error: None
    working_folder, listening_port = os.getcwd(), None
    while True:
        # `rpc.Server` would start another process, which would not have the functions above.
        try:
            server = PopenRPCServerState(host, port, port + 100, tracker_addr=tracker, key=key, silent=True)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceError(f"cannot listen on {host}:{port}: {error}") from error
        if server.port != listening_port:
            on_listening(server.port)
        listening_port = server.port
        server.thread.join()
        server.sock.close()
        os.chdir(working_folder)  # leave the directory of the crashed session
