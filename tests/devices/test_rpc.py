import contextlib
import json
import socket
import struct
import threading

import pytest

from tvmconv import jsonfile
from tvmconv.devices import opencl, rpc
from tvmconv.errors import DeviceError


@pytest.fixture
def listener():
    """A socket that listens, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.parametrize(
    "text", ["", "localhost", ":9190", "host:port", "host:0", "host:65536", "host:-1", "host:", "host:" + "9" * 5000]
)
def test_a_malformed_tracker_is_quoted(text):
    with pytest.raises(DeviceError, match="HOST:PORT") as caught:
        rpc.parse_tracker_address(text)
    assert repr(text) in str(caught.value)


def test_an_absent_tracker_tells_how_to_start_one(listener):
    host, port = listener.getsockname()
    listener.close()
    with pytest.raises(DeviceError, match=f"rpc_tracker --host {host} --port {port}"):
        rpc.list_rpc_devices("key", (host, port))


@pytest.mark.parametrize("host", [".example", "a" * 64 + ".example"])
def test_a_tracker_on_what_is_no_name_of_a_host_is_told_so(host):
    with pytest.raises(DeviceError, match=f"host name '{host}' is invalid"):
        rpc.list_rpc_devices("key", (host, 9190))


def test_a_tracker_that_is_silent_is_not_waited_for_without_end(listener, monkeypatch):
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.1)
    with pytest.raises(DeviceError, match="no answer"):
        rpc.list_rpc_devices("key", listener.getsockname())


def test_a_worker_that_is_silent_is_not_waited_for_without_end(listener, monkeypatch):
    monkeypatch.setattr(rpc, "MAX_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.1)
    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "_request_tracker", lambda *request: jsonfile.JsonValue([*listener.getsockname(), "key"]))
    with pytest.raises(DeviceError, match="a worker has not answered"):
        rpc.list_rpc_devices("key", ("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "metal"}, "the same version of tvmconv"),
        ({"cores": 3}, "the same version of tvmconv"),
        ({"max_threads_per_block": -1}, "max_threads_per_block"),
        ({"name": 5}, "name"),
        ({"l2_bytes": "x"}, "l2_bytes"),
        ({"has_float16": 1}, "has_float16"),
    ],
)
def test_a_worker_with_an_unknown_device_is_refused(monkeypatch, change, message):
    told = {**json.loads(rpc.describe_device(opencl.list_opencl_devices()[0])), **change}
    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "connect_worker", lambda tracker, key: None)
    monkeypatch.setattr(rpc, "read_description", lambda session: jsonfile.JsonValue(told))
    with pytest.raises(DeviceError, match=f"a worker of rpc:key .*{message}"):
        rpc.list_rpc_devices("key", ("127.0.0.1", 1))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_while_a_worker_is_asked_is_raised_at_once(monkeypatch):
    def refuse(tracker, key):
        raise KeyError("no reason")

    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "connect_worker", refuse)
    with pytest.raises(KeyError, match="no reason"):
        rpc.list_rpc_devices("key", ("127.0.0.1", 1))


def encoded(answer):
    """An answer as a tracker sends it: its length, then JSON."""
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return struct.pack("<i", len(data)) + data


@pytest.fixture
def serve(listener):
    """Have a fake tracker send some bytes for each connection, after the protocol's greeting; give its address."""

    def start(*answers):
        def answer():
            for data in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"HTTP" if data is None else connection.recv(4) + data)
                    connection.settimeout(5)
                    with contextlib.suppress(OSError):  # until the other side has read it
                        while connection.recv(1024):
                            pass

        threading.Thread(target=answer, daemon=True).start()
        return listener.getsockname()

    return start


SUMMARY_ANSWERS = {
    "empty list": encoded([]),
    "another greeting": None,
    "empty object": encoded([0, {}]),
    "servers that are numbers": encoded([0, {"server_info": [1, 2]}]),
    "server without a key": encoded([0, {"server_info": [{}]}]),
    "failure": encoded([-1, "no"]),
    "length below zero": struct.pack("<i", -5),
    "length of 2 GiB": struct.pack("<i", (1 << 31) - 1),
    "no UTF-8": encoded(b"\xff\xfe[]"),
    "no JSON": encoded(b"["),
    "deep": encoded(b"[" * 100_000),
    "400 digits": encoded(b"9" * 400),
    "cut off": encoded([0, {}])[:6],
}


@pytest.mark.parametrize("data", SUMMARY_ANSWERS.values(), ids=SUMMARY_ANSWERS)
def test_summary_that_no_tracker_sends_is_refused(serve, monkeypatch, data):
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 2.0)
    address = serve(data)
    if data == SUMMARY_ANSWERS["cut off"]:
        monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.2)
        with pytest.raises(DeviceError, match="no answer within"):
            rpc.count_workers(address, "k")
    else:
        with pytest.raises(DeviceError, match=f"the server at .*:{address[1]} is not a TVM RPC tracker"):
            rpc.count_workers(address, "k")


@pytest.mark.parametrize("answer", [[0], [0, ["h"]], [0, ["h", 0, "key"]], [0, ["h", 1 << 16, "key"]], [0, [5, 6, 7]]])
def test_request_answer_that_no_tracker_sends_is_refused(serve, answer):
    with pytest.raises(DeviceError, match="is not a TVM RPC tracker"):
        rpc.connect_worker(serve(encoded(answer)), "k")


def test_answer_that_dribbles_has_a_time_limit(listener, monkeypatch):
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.3)

    def dribble():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(connection.recv(4) + struct.pack("<i", 1000))
            for _ in range(100):
                connection.sendall(b" ")
                threading.Event().wait(0.1)

    threading.Thread(target=dribble, daemon=True).start()
    with pytest.raises(DeviceError, match="no answer within"):
        rpc.count_workers(listener.getsockname(), "k")
