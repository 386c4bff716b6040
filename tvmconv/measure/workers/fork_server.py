"""Fork server: a process with loaded TVM, schedules and compilers, from which builders are forked.

Loading takes seconds of a core, and several times as long if many processes do it at once. Forking is safe if no other
thread may hold a lock: TVM and NVRTC compile in the calling thread, BLAS handles forks itself, and the CUDA driver is
not loaded.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from multiprocessing import reduction
from multiprocessing.connection import Connection

from tvmconv.errors import Error
from tvmconv.measure.workers.process import WorkerProcess, serve

FORK_SERVER_MODULE = "tvmconv.measure.workers.fork_server"
FORK_COMMAND, END_COMMAND = "fork", "end"


class BuilderForkServer:
    """Parent's handle of the fork server, which is thread-safe.

    The operating system ends the server and all forked processes together with the thread that started it.
    """

    def __init__(self) -> None:
        self._child = WorkerProcess(FORK_SERVER_MODULE)
        self._lock = threading.Lock()
        self._live_pids: set[int] = set()
        self._is_open = True

    def fork(self, module: str, descriptor: int) -> ForkedProcess:
        """Fork a process that runs `main` of a module, after everything is loaded.

        `descriptor`: file descriptor of the process's end of a pipe.
        """
        with self._lock:
            try:
                self._child.connection.send((FORK_COMMAND, (module, sys.path)))
                reduction.send_handle(self._child.connection, descriptor, self._child.pid)
                pid = self._child.connection.recv()
            except (EOFError, OSError) as error:
                raise Error("the process that builders are forked from has ended") from error
            self._live_pids.add(pid)
            return ForkedProcess(self, pid)

    def end_process(self, pid: int) -> int:
        """End a forked process if it is alive, and return its exit status."""
        with self._lock:
            try:
                self._child.connection.send((END_COMMAND, pid))
                return self._child.connection.recv()
            except (EOFError, OSError):
                return -signal.SIGKILL  # it ended with the fork server
            finally:
                self._live_pids.discard(pid)
                self._close_if_unused()

    def stop_loading(self) -> None:
        """End the server now if no forked process is alive; a waiting `fork` then raises Error."""
        if not self._live_pids:  # without the lock, which the waiting `fork` holds
            os.kill(self._child.pid, signal.SIGKILL)  # alive, or a zombie whose PID is still reserved

    def close(self) -> None:
        """End the server as soon as no forked process is alive."""
        with self._lock:
            self._is_open = False
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._is_open and not self._live_pids:
            self._child.kill()


class ForkedProcess:
    """A forked process; see `tvmconv.measure.workers.process.ProcessHandle`."""

    def __init__(self, fork_server: BuilderForkServer, pid: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._status: int | None = None

    def kill(self) -> None:
        """End the process if it is alive."""
        self.wait()

    def wait(self) -> int:
        """End the process and return its exit status."""
        if self._status is None:
            self._status = self._fork_server.end_process(self.pid)
        return self._status


def main(connection: Connection) -> None:
    """Serve requests to fork processes and to end them."""
    from tvmconv.measure.builder import preload_compilers  # not imported in the parent, which need not load it

    preload_compilers()
    gc.collect()
    gc.freeze()  # keeps memory pages shared after forks
    own_pid = os.getpid()
    while True:
        command, argument = connection.recv()
        if command == END_COMMAND:
            os.kill(argument, signal.SIGKILL)  # alive, or a zombie whose PID is still reserved
            connection.send(os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1]))
            continue
        descriptor = reduction.recv_handle(connection)
        pid = os.fork()
        if not pid:
            connection.close()
            os.setsid()
            module, sys.path[:] = argument
            serve(importlib.import_module(module).main, descriptor, own_pid)
        os.close(descriptor)
        connection.send(pid)
