"""A tracker of TVM's RPC and workers on this host, for tests."""

import os
import signal
import socket
import subprocess
import sys

from processes import GONE_SECONDS, processes_of, wait_for

from tvmconv.devices import rpc


class Tracker:
    """A tracker in a session of its own.

    Attributes:
        address: host and port.
    """

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = free.getsockname()
        host, port = self.address
        words = (f"--host={host}", f"--port={port}", f"--port-end={port + 1}", "--silent")
        self._process = start("tvm.exec.rpc_tracker", *words, environment=os.environ)
        wait_for(self._listens)

    def close(self):
        """End it; TVM's tracker leaves a process behind."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _listens(self):
        with socket.socket() as client:
            return client.connect_ex(self.address) == 0


class Farm:
    """Workers of a tracker, each in a session of its own.

    Attributes:
        folder: for the workers' temporary files.
        tracker: host and port.
        workers: processes of `tvmconv worker`.
    """

    def __init__(self, folder, tracker):
        self.folder = folder
        self.tracker = tracker.address
        self.workers = []
        self._keys = set()

    def lend(self, key):
        """Start a worker, and wait until it is registered."""
        there = rpc.count_workers(self.tracker, key)
        host, port = self.tracker
        words = ("worker", f"--tracker={host}:{port}", f"--key={key}", "--device=opencl:0")
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        self._keys.add(key)
        self.workers.append(start("tvmconv", *words, environment=environment))
        wait_for(lambda: rpc.count_workers(self.tracker, key) > there)

    def close(self):
        """End the workers; their own processes have to go by themselves."""
        for worker in self.workers:
            worker.terminate()
            worker.wait()
        wait_for(lambda: not any(rpc.count_workers(self.tracker, key) for key in self._keys), GONE_SECONDS)
        wait_for(lambda: not processes_of(self.folder), GONE_SECONDS)


def start(module, *words, environment):
    """Run a module in a session of its own."""
    command = [sys.executable, "-m", module, *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
