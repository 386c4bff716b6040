"""A tracker of TVM's RPC and workers on this host, for tests."""

import os
import signal
import socket
import subprocess
import sys

from processes import processes_of, wait_for

from tvmconv.devices import rpc


class Farm:
    """A tracker and workers, each in a session of its own.

    Attributes:
        folder: for the workers' temporary files.
        tracker: host and port.
        workers: processes of `tvmconv worker`.
    """

    def __init__(self, folder):
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.tracker = free.getsockname()
        host, port = self.tracker
        words = (f"--host={host}", f"--port={port}", f"--port-end={port + 1}", "--silent")
        self._tracker = self._start("tvm.exec.rpc_tracker", *words, environment=os.environ)
        wait_for(self._listens)
        self.workers = []

    def lend(self, key):
        """Start a worker, and wait until it is registered."""
        there = rpc.count_workers(self.tracker, key)
        host, port = self.tracker
        words = ("worker", f"--tracker={host}:{port}", f"--key={key}", "--device=opencl:0")
        environment = {**os.environ, "TMPDIR": str(self.folder)}
        self.workers.append(self._start("tvmconv", *words, environment=environment))
        wait_for(lambda: rpc.count_workers(self.tracker, key) > there)

    def close(self):
        """End everything; the workers' own processes have to go by themselves."""
        for worker in self.workers:
            worker.terminate()
            worker.wait()
        os.killpg(self._tracker.pid, signal.SIGKILL)  # TVM's tracker leaves a process behind
        self._tracker.wait()
        wait_for(lambda: not processes_of(self.folder), 5)

    def _start(self, module, *words, environment):
        command = [sys.executable, "-m", module, *words]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env=environment, start_new_session=True, **quiet)

    def _listens(self):
        with socket.socket() as client:
            return client.connect_ex(self.tracker) == 0
