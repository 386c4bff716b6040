"""`rpc:KEY`: devices of other hosts, behind TVM's RPC tracker and its servers (`tvmconv worker`).

A worker is one of TVM's RPC servers: it has registered a key with the tracker, and serves one session at a time. TVM's
own `TrackerSession` waits for tracker and servers without end; here the tracker is asked in TVM's protocol
(`tvm.rpc.base`), with a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from tvmconv import jsonfile
from tvmconv.devices.base import Device, first_line
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.opencl.device import OpenclDevice
from tvmconv.errors import DeviceError
from tvmconv.jsonfile import JsonError, Value

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program

DESCRIBE = "tvmconv.describe"  # the worker's function that tells its device
TRACKER_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 24  # of a tracker
_CHUNK_BYTES = 1 << 16
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
    description = _within(FREE_SECONDS + TRACKER_SECONDS, lambda: described(connect(tracker, key)))
    try:
        return [_device(description, key, tracker, index) for index in range(count)]
    except JsonError as error:
        reason = f"a worker of rpc:{key} tells of its device what is not known here ({error})"
        raise DeviceError(f"{reason}: have the same version of tvmconv on all hosts") from error


def _device(description: Value, key: str, tracker: Address, index: int) -> Device:
    """Return the device that a worker described; raises `JsonError` for what `describe` does not write."""
    members = description.members()
    kind = _KINDS.get(members.pop("kind").value)
    if kind is None:
        description["kind"].refuse(f"one of {', '.join(_KINDS)}")
    for name, value in members.items():
        if type(value.value) in (int, float):
            value.number(1 if name in ("max_threads_per_block", "shared_bytes_per_block") else 0)
    given = {"text": f"rpc:{key}", "index": index, "key": key, "tracker": tracker}
    return Value({name: value.value for name, value in members.items()}).decode(kind, given)


def described(session: Any) -> Value:
    """Return what `describe` told at the other end of a session, an object with a kind and a name.

    Raises:
        DeviceError: the other end is no worker of tvmconv.
    """
    try:
        description = jsonfile.parse(str(session.get_function(DESCRIBE)()))
        description["kind"].decode(str)
        description["name"].decode(str)
    except (RuntimeError, AttributeError, ValueError) as error:  # TVM's errors have no class of their own in common
        raise DeviceError(f"the server is no tvmconv worker: {first_line(error)}") from error
    return description


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

    with _of_a_tracker(tracker):
        servers = _ask(tracker, [TrackerCode.SUMMARY], TRACKER_SECONDS)["server_info"].elements()
        keys = [server["key"].decode(str) for server in servers]
    return keys.count(f"server:{key}")


def connect(tracker: Address, key: str) -> Any:
    """A session of TVM's RPC with a worker that is free, for as long as the object lives.

    Raises:
        DeviceError: none becomes free in `FREE_SECONDS`, or the one that the tracker names does not answer.
    """
    from tvm import rpc
    from tvm.rpc.base import TrackerCode

    with _of_a_tracker(tracker):
        answer = _ask(tracker, [TrackerCode.REQUEST, key, "", 1], FREE_SECONDS)
        answer.check(len(answer.elements()) == 3, "host, port and key of a worker")
        url, matchkey = (answer.elements()[place].decode(str) for place in (0, 2))
        port = answer.elements()[1].integer(1, (1 << 16) - 1)
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


def _ask(tracker: Address, request: list[Any], seconds: float) -> Value:
    """Ask a tracker, in the protocol of `tvm.rpc.base`.

    Args:
        tracker: host and port.
        request: what to ask, as the protocol has it.
        seconds: the most that the answer may take.

    Returns:
        What the tracker says to a request that it can serve; nothing of it is checked.

    Raises:
        DeviceError: there is no tracker, or it does not answer in time.
        JsonError: the answer is none of a tracker.
    """
    from tvm.rpc import base

    host, port = tracker
    try:
        with socket.create_connection(tracker, timeout=TRACKER_SECONDS) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            if _receive(connection, 4, TRACKER_SECONDS) != struct.pack("<i", base.RPC_TRACKER_MAGIC):
                raise JsonError("it begins with other bytes")
            base.sendjson(connection, request)
            (size,) = struct.unpack("<i", _receive(connection, 4, seconds))
            if not 0 < size <= MAX_ANSWER_BYTES:
                raise JsonError(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {size}")
            answer = jsonfile.parse(_receive(connection, size, TRACKER_SECONDS))
    except TimeoutError as error:
        free = ": no worker is free" if request[0] == base.TrackerCode.REQUEST else ""
        raise DeviceError(f"the tracker {host}:{port} has no answer within {seconds:g} s{free}") from error
    except UnicodeError as error:
        raise DeviceError(f"{host!r}, of the tracker's address, is no name of a host: {first_line(error)}") from error
    except OSError as error:
        start = f"python -m tvm.exec.rpc_tracker --host {host} --port {port} --port-end {port + 1}"
        raise DeviceError(f"no tracker at {host}:{port} ({error.strerror or error}): start one with {start}") from error
    code, *values = answer.elements()[:2] or [answer]
    answer.check(code.value == base.TrackerCode.SUCCESS and bool(values), "a list of 0 and what was asked for")
    return values[0]


@contextlib.contextmanager
def _of_a_tracker(tracker: Address) -> Iterator[None]:
    """Raise a `JsonError` of the block, in which a tracker is asked, as `DeviceError`."""
    host, port = tracker
    with jsonfile.refused(f"what listens at {host}:{port} is no tracker of TVM's RPC", DeviceError):
        yield


def _receive(connection: socket.socket, size: int, seconds: float) -> bytes:
    """Receive so many bytes.

    Raises:
        TimeoutError: they are not there after so many seconds, however many came one by one.
        JsonError: the connection ends before.
    """
    received = bytearray()
    end = time.monotonic() + seconds
    while len(received) < size:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        chunk = connection.recv(min(size - len(received), _CHUNK_BYTES))
        if not chunk:
            raise JsonError("it ended the connection")
        received += chunk
    return bytes(received)
