"""Devices `rpc:KEY` of other hosts, which workers (`tvmconv worker`) offer through TVM's RPC tracker.

A worker is a TVM RPC server that registers a key with the tracker and serves one session at a time. TVM's own
`TrackerSession` waits for tracker and servers without a time limit. This module instead speaks the tracker's protocol
(`tvm.rpc.base`) itself, with time limits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from tvmconv import jsonfile
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.device import Device, get_first_line
from tvmconv.devices.opencl import OpenclDevice
from tvmconv.errors import DeviceError
from tvmconv.jsonfile import JsonError, JsonValue

DESCRIBE_FUNCTION = "tvmconv.describe"  # function of the worker that describes its device
TRACKER_SECONDS = 10.0
MAX_ANSWER_BYTES = 1 << 24  # limit for an answer of the tracker
_CHUNK_BYTES = 1 << 16
MAX_WAIT_SECONDS = 60.0  # time limit for a worker to become free; another search may be using it

Address = tuple[str, int]
T = TypeVar("T")


@dataclass(frozen=True)
class RPCDevice(Device):
    """A device of a worker, for which kernels are compiled locally and measured remotely."""

    key: str = field(kw_only=True)  # key under which the workers are registered
    tracker: Address = field(kw_only=True)  # host and port of the tracker

    def load(self, *_: Any) -> NoReturn:
        """Raise DeviceError, because only `tvmconv.measure.rpc` runs kernels on a worker."""
        raise DeviceError(f"{self.text} is to tune on: to run a kernel there, use tvmconv on that host")

    def create_benchmark(self, *_: Any) -> NoReturn:
        """Raise DeviceError, as `load` does."""
        self.load()


@dataclass(frozen=True)
class RPCCudaDevice(RPCDevice, CudaDevice):
    """An NVIDIA GPU on another host."""


@dataclass(frozen=True)
class RPCOpenclDevice(RPCDevice, OpenclDevice):
    """An OpenCL device on another host."""


_DEVICE_CLASSES = {"cuda": RPCCudaDevice, "opencl": RPCOpenclDevice}
_HOST_SPECIFIC_FIELDS = ("text", "index", "key", "tracker")  # fields that a description leaves out


def describe_device(device: Device) -> str:
    """Return the JSON with which a worker describes its device."""
    fields = dataclasses.asdict(device)
    return json.dumps({"kind": device.kind, **{n: v for n, v in fields.items() if n not in _HOST_SPECIFIC_FIELDS}})


def list_rpc_devices(key: str, tracker: Address | None = None) -> list[Device]:
    """Return one device per worker under a key, at least one; all workers must have the same kind of device.

    `tracker`: host and port; by default those of TVM_TRACKER_HOST and TVM_TRACKER_PORT.
    """
    tracker = tracker or parse_tracker_address()
    count = count_workers(tracker, key)
    if not count:
        host, port = tracker
        start = f"tvmconv worker --tracker {host}:{port} --key {key}"
        raise DeviceError(f"no worker under key {key!r} at the tracker {host}:{port}: start one with {start}")
    timeout = MAX_WAIT_SECONDS + TRACKER_SECONDS
    description = _call_with_timeout(timeout, lambda: read_description(connect_worker(tracker, key)))
    try:
        return [_make_device(description, key, tracker, index) for index in range(count)]
    except JsonError as error:
        reason = f"a worker of rpc:{key} sent an unknown description of its device ({error})"
        raise DeviceError(f"{reason}: have the same version of tvmconv on all hosts") from error


def _make_device(description: JsonValue, key: str, tracker: Address, index: int) -> Device:
    """Return the device of a worker's description; raises `JsonError` if it is invalid."""
    members = description.members()
    kind = _DEVICE_CLASSES.get(members.pop("kind").value)
    if kind is None:
        description["kind"].refuse(f"one of {', '.join(_DEVICE_CLASSES)}")
    for name, value in members.items():
        if type(value.value) in (int, float):
            value.decode_number(1 if name in ("max_threads_per_block", "shared_bytes_per_block") else 0)
    host_fields = {"text": f"rpc:{key}", "index": index, "key": key, "tracker": tracker}
    return JsonValue({name: value.value for name, value in members.items()}).decode(kind, host_fields)


def read_description(session: Any) -> JsonValue:
    """Return the result of `describe_device` at the other end of a session, an object with a kind and a name."""
    try:
        description = jsonfile.parse_json(str(session.get_function(DESCRIBE_FUNCTION)()))
        description["kind"].decode(str)
        description["name"].decode(str)
    except (RuntimeError, AttributeError, ValueError) as error:  # TVM's errors have no common base class
        raise DeviceError(f"the server is not a tvmconv worker: {get_first_line(error)}") from error
    return description


def parse_tracker_address(text: str | None = None) -> Address:
    """Return host and port of a tracker.

    `text`: "HOST:PORT"; by default the values of TVM_TRACKER_HOST and TVM_TRACKER_PORT.
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
    """Return the number of servers under a key, free or busy; raises `DeviceError`."""
    from tvm.rpc.base import TrackerCode

    with _translate_tracker_errors(tracker):
        servers = _request_tracker(tracker, [TrackerCode.SUMMARY], TRACKER_SECONDS)["server_info"].elements()
        keys = [server["key"].decode(str) for server in servers]
    return keys.count(f"server:{key}")


def connect_worker(tracker: Address, key: str) -> Any:
    """Open a TVM RPC session with a free worker, which ends when the returned object is deleted."""
    from tvm import rpc
    from tvm.rpc.base import TrackerCode

    with _translate_tracker_errors(tracker):
        answer = _request_tracker(tracker, [TrackerCode.REQUEST, key, "", 1], MAX_WAIT_SECONDS)
        answer.check(len(answer.elements()) == 3, "host, port and key of a worker")
        url, matchkey = (answer.elements()[index].decode(str) for index in (0, 2))
        port = answer.elements()[1].decode_integer(1, (1 << 16) - 1)
    try:
        return rpc.connect(url, port, matchkey)
    except RuntimeError as error:
        raise DeviceError(f"the worker {key!r} at {url}:{port} does not answer: {get_first_line(error)}") from error


def _call_with_timeout(seconds: float, function: Callable[[], T]) -> T:
    """Return a function's result, or raise DeviceError after a time limit.

    TVM's calls have no time limit and ignore Ctrl-C.
    """
    future = futures.Future[T]()

    def call() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # raised again in the caller's thread
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return future.result(seconds)
    except futures.TimeoutError:
        if future.done():  # the function itself timed out
            raise
        raise DeviceError(f"a worker has not answered for {seconds:g} s") from None


def _request_tracker(tracker: Address, request: list[Any], seconds: float) -> JsonValue:
    from tvm.rpc import base

    host, port = tracker
    try:
        with socket.create_connection(tracker, timeout=TRACKER_SECONDS) as connection:
            connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            if _receive_bytes(connection, 4, TRACKER_SECONDS) != struct.pack("<i", base.RPC_TRACKER_MAGIC):
                raise JsonError("it begins with other bytes")
            base.sendjson(connection, request)
            (size,) = struct.unpack("<i", _receive_bytes(connection, 4, seconds))
            if not 0 < size <= MAX_ANSWER_BYTES:
                raise JsonError(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, got {size}")
            answer = jsonfile.parse_json(_receive_bytes(connection, size, TRACKER_SECONDS))
    except TimeoutError as error:
        hint = ": no worker is free" if request[0] == base.TrackerCode.REQUEST else ""
        raise DeviceError(f"the tracker {host}:{port} has no answer within {seconds:g} s{hint}") from error
    except UnicodeError as error:
        raise DeviceError(f"the tracker's host name {host!r} is invalid: {get_first_line(error)}") from error
    except OSError as error:
        start = f"python -m tvm.exec.rpc_tracker --host {host} --port {port} --port-end {port + 1}"
        raise DeviceError(f"no tracker at {host}:{port} ({error.strerror or error}): start one with {start}") from error
    code, *values = answer.elements()[:2] or [answer]
    answer.check(code.value == base.TrackerCode.SUCCESS and bool(values), "a list of 0 and what was asked for")
    return values[0]


def _translate_tracker_errors(tracker: Address) -> AbstractContextManager[None]:
    """Translate a `JsonError` of a tracker request in the block to `DeviceError`."""
    message = "the server at {}:{} is not a TVM RPC tracker".format(*tracker)
    return jsonfile.translate_json_errors(message, DeviceError)


def _receive_bytes(connection: socket.socket, num_bytes: int, seconds: float) -> bytes:
    received_bytes = bytearray()
    deadline = time.monotonic() + seconds
    while len(received_bytes) < num_bytes:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        chunk = connection.recv(min(num_bytes - len(received_bytes), _CHUNK_BYTES))
        if not chunk:
            raise JsonError("it ended the connection")
        received_bytes += chunk
    return bytes(received_bytes)
