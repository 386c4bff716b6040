"""A worker: one of TVM's RPC servers, with functions that measure programs on a device of this host."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import NoReturn

from tvmconv import workloads
from tvmconv.devices import Device, rpc
from tvmconv.errors import DeviceError
from tvmconv.measuring import wire
from tvmconv.measuring.child import end_with_parent
from tvmconv.measuring.local import LocalRunner
from tvmconv.measuring.outcome import Outcome
from tvmconv.scratch import Scratch
from tvmconv.verify import Problem

POLL_SECONDS = 0.05


class Session:
    """What a worker's functions do; TVM forks a process for each session, and each has a runner of its own.

    Args:
        device: to measure on.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runner: LocalRunner | None = None

    def describe(self) -> str:
        """What the device is; see `rpc.describe`."""
        return rpc.describe(self._device)

    def open(self, order: str) -> None:
        """Start a device process for a `wire.Order`."""
        told = wire.Order.decode(order)
        problem = Problem(workloads.parse(told.workload), told.seed, mode=told.verify)
        self._runner = LocalRunner(self._device, problem, told.timeout, told.memory_limit)

    def measure(self, header: str, code: bytes) -> str:
        """Measure a program (`wire.encode_program`); its outcome (`wire.encode_outcome`)."""
        runner = self._runner
        if runner is None:
            raise DeviceError("no session: call tvmconv.open first")
        program, best = wire.decode_program(header, bytes(code))
        outcomes: list[tuple[int, Outcome]] = []
        while not runner.free:
            outcomes += runner.poll()
            wait(runner.waitables(), POLL_SECONDS)
        runner.submit(0, program, best)
        while not outcomes:
            wait(runner.waitables(), POLL_SECONDS)
            outcomes += runner.poll()
        return wire.encode_outcome(outcomes[0][1])


def serve(
    device: Device, key: str, tracker: rpc.Address, host: str, port: int, told: Callable[[int], None]
) -> NoReturn:
    """Serve sessions until the process is ended.

    Args:
        device: to measure on.
        key: to register under.
        tracker: where to register.
        host: the address to bind to. Whoever reaches it can run code on this machine: TVM's RPC asks for no password.
        port: the first port to try, of a hundred.
        told: is called with the port once the server listens.

    Raises:
        DeviceError: no port is free, or the address is none of this host.
    """
    import tvm_ffi
    from tvm.rpc.server import PopenRPCServerState

    rpc.count_workers(tracker, key)  # TVM would try to reach a tracker that is not there for a minute, in silence
    session = Session(device)
    functions = {rpc.DESCRIBE: session.describe, wire.OPEN: session.open, wire.MEASURE: session.measure}
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)
    # TVM makes a directory for each session, and leaves it behind when it is killed.
    scratch = Scratch("tvmconv-worker-")
    tempfile.tempdir = str(scratch.path)
    os.register_at_fork(after_in_child=functools.partial(end_with_parent, os.getpid()))
    # The listener ends with an error when a session crashes, or the tracker is gone for a minute. It is replaced.
    threading.excepthook = lambda error: None
    folder, listening = os.getcwd(), None
    while True:
        # `rpc.Server` would start a process more, to which the functions above would have to be sent.
        try:
            server = PopenRPCServerState(host, port, port + 100, tracker_addr=tracker, key=key, silent=True)
        except (OSError, OverflowError, ValueError) as error:
            raise DeviceError(f"cannot listen on {host}:{port}: {error}") from error
        if server.port != listening:
            told(server.port)
        listening = server.port
        server.thread.join()
        server.sock.close()
        os.chdir(folder)  # out of the crashed session's directory
