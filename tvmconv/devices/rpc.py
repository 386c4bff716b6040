"""`rpc:KEY`: devices of other hosts, behind TVM's RPC tracker and its servers (`tvmconv worker`).

A worker is one of TVM's RPC servers: it has registered a key with the tracker, and serves one session at a time. TVM's
own `TrackerSession` waits for tracker and servers without end; here the tracker is asked in TVM's protocol
(`tvm.rpc.base`), with a time limit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tvmconv.devices.base import Device, first_line
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.opencl.device import OpenclDevice
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program

DESCRIBE = "tvmconv.describe"  # the worker's function that tells its device
TRACKER_SECONDS = 10.0
FREE_SECONDS = 60.0  # for a worker to be free: another search may be using it

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True)
class Remote(Device):
    """A worker's device, to be compiled for here and measured on there.

    Attributes:
        key: under which its workers are registered.
        tracker: host and port of the tracker.
    """

    key: str
    tracker: Address

    def load(self, program: Program) -> NoReturn:
        """Refuse: kernels are measured there, by `tvmconv.measuring.remote`, and run nowhere else."""
        self._refuse()

    def bench(self, inputs: Sequence[Any], reference: Any) -> NoReturn:
        """Refuse, as `load` does."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise DeviceError(f"{self.text} is to tune on: to run a kernel there, use tvmconv on that host")


@dataclass(frozen=True)
class RemoteCuda(Remote, CudaDevice):
    """An NVIDIA GPU of another host."""


@dataclass(frozen=True)
class RemoteOpencl(Remote, OpenclDevice):
    """An OpenCL device of another host."""


_KINDS = {"cuda": RemoteCuda, "opencl": RemoteOpencl}
_OWN = ("text", "index", "key", "tracker")  # what each host has its own of


def describe(device: Device) -> str:
    """What a worker tells of its device, as JSON."""
    known = {name: value for name, value in dataclasses.asdict(device).items() if name not in _OWN}
    return json.dumps({"kind": device.kind, **known})


def devices(key: str, tracker: Address | None = None) -> list[Device]:
    """One device for each worker that is registered under a key, at least one; all are taken to be of one kind.

    Args:
        key: the workers' key.
        tracker: host and port; those of TVM_TRACKER_HOST and TVM_TRACKER_PORT by default.

    Raises:
        DeviceError: there is no tracker or no worker, or none becomes free; with the remedy.
    """
    tracker = tracker or tracker_address()
    count = count_workers(tracker, key)
    if not count:
        host, port = tracker
        start = f"tvmconv worker --tracker {host}:{port} --key {key}"
        raise DeviceError(f"no worker under key {key!r} at the tracker {host}:{port}: start one with {start}")
    told = _within(FREE_SECONDS + TRACKER_SECONDS, lambda: described(connect(tracker, key)))
    try:
        remote = _KINDS[told.pop("kind")]
        return [remote(text=f"rpc:{key}", index=index, key=key, tracker=tracker, **told) for index in range(count)]
    except (LookupError, TypeError, AttributeError) as error:
        reason = f"a worker of rpc:{key} tells of its device what is not known here ({first_line(error)})"
        raise DeviceError(f"{reason}: have the same version of tvmconv on all hosts") from error


def described(session: Any) -> dict[str, Any]:
    """What `describe` told at the other end of a session; raises `DeviceError`."""
    try:
        return json.loads(session.get_function(DESCRIBE)())
    except (RuntimeError, AttributeError, ValueError) as error:  # TVM's errors have no class of their own in common
        raise DeviceError(f"the server is no tvmconv worker: {first_line(error)}") from error


def tracker_address(text: str | None = None) -> Address:
    """Host and port of a tracker.

    Args:
        text: "HOST:PORT"; by default what TVM_TRACKER_HOST and TVM_TRACKER_PORT say.

    Raises:
        DeviceError: the text is no such thing, or the environment says nothing.
    """
    if text is None:
        host, port = os.environ.get("TVM_TRACKER_HOST"), os.environ.get("TVM_TRACKER_PORT", "9190")
        if not host:
            raise DeviceError("no tracker: name it with --tracker HOST:PORT, or in TVM_TRACKER_HOST and _PORT")
        text = f"{host}:{port}"
    host, _, port = text.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise DeviceError(f"expected a tracker as HOST:PORT, such as 127.0.0.1:9190, not {text!r}")
    return host, int(port)


def count_workers(tracker: Address, key: str) -> int:
    """How many servers are registered under a key, free or taken; raises `DeviceError`."""
    from tvm.rpc.base import TrackerCode

    summary = _ask(tracker, [TrackerCode.SUMMARY], TRACKER_SECONDS)
    return sum(server.get("key") == f"server:{key}" for server in summary["server_info"])


def connect(tracker: Address, key: str) -> Any:
    """A session of TVM's RPC with a worker that is free, for as long as the object lives.

    Raises:
        DeviceError: none becomes free in `FREE_SECONDS`, or the one that the tracker names does not answer.
    """
    from tvm import rpc
    from tvm.rpc.base import TrackerCode

    url, port, matchkey = _ask(tracker, [TrackerCode.REQUEST, key, "", 1], FREE_SECONDS)
    try:
        return rpc.connect(url, port, matchkey)
    except RuntimeError as error:
        raise DeviceError(f"the worker {key!r} at {url}:{port} does not answer: {first_line(error)}") from error


def _within(seconds: float, function: Callable[[], T]) -> T:
    """What a function returns, or a DeviceError after a while: TVM's calls have no time limit and no ear for Ctrl-C."""
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((True, function()))
        except Exception as error:  # whoever waits is told of any
            answers.put((False, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        good, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise DeviceError(f"a worker has not answered for {seconds:g} s") from None
    if not good:
        raise answer
    return answer


def _ask(tracker: Address, request: list[Any], seconds: float) -> Any:
    """The tracker's answer to one request."""
    from tvm.rpc import base

    host, port = tracker
    try:
        with socket.create_connection(tracker, timeout=TRACKER_SECONDS) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            if base.recvall(connection, 4) != struct.pack("<i", base.RPC_TRACKER_MAGIC):
                raise DeviceError(f"what listens at {host}:{port} is no tracker of TVM's RPC")
            connection.settimeout(seconds)
            base.sendjson(connection, request)
            _, answer = base.recvjson(connection)
            return answer
    except TimeoutError as error:
        raise DeviceError(f"the tracker {host}:{port} has no answer within {seconds:g} s: no worker is free") from error
    except UnicodeError as error:
        raise DeviceError(f"{host!r}, of the tracker's address, is no name of a host: {first_line(error)}") from error
    except OSError as error:
        start = f"python -m tvm.exec.rpc_tracker --host {host} --port {port}"
        raise DeviceError(f"no tracker at {host}:{port} ({error.strerror or error}): start one with {start}") from error
