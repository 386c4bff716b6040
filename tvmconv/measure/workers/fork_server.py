"""A process from which builders are forked: it has loaded TVM, all schedules and the compilers, as each would have to.

That takes seconds of a core; where many do it at once, several times as long. A fork is safe as long as no other thread
may hold a lock: TVM and NVRTC compile in the thread that calls them, BLAS sees to its own, and CUDA's driver is not
loaded.
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
    """The process, as its parent sees it; may be used from several threads.

    The kernel ends it together with the thread that started it, and with it all that was forked from it.
    """

    def __init__(self) -> None:
        self._child = WorkerProcess(FORK_SERVER_MODULE)
        self._lock = threading.Lock()
        self._live_pids: set[int] = set()
        self._is_open = True

    def fork(self, module: str, descriptor: int) -> ForkedProcess:
        """A process that runs `main` of a module; waits until everything is loaded.

        Args:
            module: the module's full name.
            descriptor: its end of a pipe.

        Raises:
            Error: the process is no more.
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
        """End a process that was forked, if it has not ended; its exit status."""
        with self._lock:
            try:
                self._child.connection.send((END_COMMAND, pid))
                return self._child.connection.recv()
            except (EOFError, OSError):
                return -signal.SIGKILL  # it went with the zygote
            finally:
                self._live_pids.discard(pid)
                self._close_if_unused()

    def stop_loading(self) -> None:
        """End it now if nothing that was forked from it is alive; a `fork` that waits for it raises Error."""
        if not self._live_pids:  # without the lock, which that `fork` holds
            os.kill(self._child.pid, signal.SIGKILL)  # alive, or waited for by nobody yet

    def close(self) -> None:
        """End it, as soon as nothing that was forked from it is alive."""
        with self._lock:
            self._is_open = False
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._is_open and not self._live_pids:
            self._child.kill()


class ForkedProcess:
    """A process that was forked; see `tvmconv.measure.workers.process.ProcessHandle`."""

    def __init__(self, fork_server: BuilderForkServer, pid: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._status: int | None = None

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._status is None:
            self._status = self._fork_server.end_process(self.pid)

    def wait(self) -> int:
        """Its exit status; ends it first."""
        self.kill()
        assert self._status is not None
        return self._status


def main(connection: Connection) -> None:
    """Serve: fork, or end what was forked."""
    from tvmconv.measure.builder import (
        preload_compilers,  # not before: to start this process shall take its parent nothing
    )

    preload_compilers()
    gc.collect()
    gc.freeze()  # pages that are shared stay shared
    own_pid = os.getpid()
    while True:
        command, argument = connection.recv()
        if command == END_COMMAND:
            os.kill(argument, signal.SIGKILL)  # alive, or waited for by nobody yet
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
