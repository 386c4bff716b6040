import json
import socket
import threading

import pytest

from tvmconv.devices import find, rpc
from tvmconv.devices.opencl import device as opencl
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
        rpc.tracker_address(text)
    assert repr(text) in str(caught.value)


def test_the_tracker_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("TVM_TRACKER_HOST", "here")
    monkeypatch.setenv("TVM_TRACKER_PORT", "1234")
    assert rpc.tracker_address() == ("here", 1234)


def test_a_tracker_that_is_named_nowhere_is_asked_for(monkeypatch):
    monkeypatch.delenv("TVM_TRACKER_HOST", raising=False)
    with pytest.raises(DeviceError, match="--tracker HOST:PORT"):
        find("rpc:key")


def test_an_absent_tracker_tells_how_to_start_one(listener):
    host, port = listener.getsockname()
    listener.close()
    with pytest.raises(DeviceError, match=f"rpc_tracker --host {host} --port {port}"):
        rpc.devices("key", (host, port))


@pytest.mark.parametrize("host", [".example", "a" * 64 + ".example"])
def test_a_tracker_on_what_is_no_name_of_a_host_is_told_so(host):
    with pytest.raises(DeviceError, match=f"'{host}'.* is no name of a host"):
        rpc.devices("key", (host, 9190))


def test_something_else_than_a_tracker_is_told_so(listener):
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP")

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(DeviceError, match="is no tracker"):
        rpc.devices("key", listener.getsockname())


def test_a_tracker_that_is_silent_is_not_waited_for_without_end(listener, monkeypatch):
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.1)
    with pytest.raises(DeviceError, match="no answer"):
        rpc.devices("key", listener.getsockname())


def test_a_remote_device_is_described_as_the_device_that_it_is():
    local = opencl.devices()[0]
    remote = rpc.RemoteOpencl(**{**vars(local), "text": "rpc:key"}, key="key", tracker=("here", 1))
    assert rpc.describe(remote) == rpc.describe(local)


def test_a_remote_device_runs_no_kernel_here():
    remote = rpc.RemoteOpencl(**vars(opencl.devices()[0]), key="key", tracker=("here", 1))
    with pytest.raises(DeviceError, match="to tune on"):
        remote.load(None)


def test_a_worker_that_is_silent_is_not_waited_for_without_end(listener, monkeypatch):
    monkeypatch.setattr(rpc, "FREE_SECONDS", 0.1)
    monkeypatch.setattr(rpc, "TRACKER_SECONDS", 0.1)
    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "_ask", lambda *request: (*listener.getsockname(), "key"))
    with pytest.raises(DeviceError, match="a worker has not answered"):
        rpc.devices("key", ("127.0.0.1", 1))


@pytest.mark.parametrize("change", [{"kind": "metal"}, {"cores": 3}])
def test_a_worker_of_another_version_is_told_so(monkeypatch, change):
    told = {**json.loads(rpc.describe(opencl.devices()[0])), **change}
    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "connect", lambda tracker, key: None)
    monkeypatch.setattr(rpc, "described", lambda session: told)
    with pytest.raises(DeviceError, match=r"a worker of rpc:key .*the same version of tvmconv"):
        rpc.devices("key", ("127.0.0.1", 1))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_raised_while_a_worker_is_asked_is_raised_at_once(monkeypatch):
    def refuse(tracker, key):
        raise KeyError("no reason")

    monkeypatch.setattr(rpc, "count_workers", lambda tracker, key: 1)
    monkeypatch.setattr(rpc, "connect", refuse)
    with pytest.raises(KeyError, match="no reason"):
        rpc.devices("key", ("127.0.0.1", 1))
