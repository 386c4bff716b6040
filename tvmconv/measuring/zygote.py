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
from tvmconv.measuring.child import Child, serve

ZYGOTE = "tvmconv.measuring.zygote"
FORK, END = "fork", "end"


class Zygote:
    """The process, as its parent sees it; may be used from several threads.

    The kernel ends it together with the thread that started it, and with it all that was forked from it.
    """

    def __init__(self) -> None:
        self._child = Child(ZYGOTE)
        self._lock = threading.Lock()
        self._alive: set[int] = set()
        self._wanted = True

    def fork(self, module: str, descriptor: int) -> Forked:
        """A process that runs `main` of a module; waits until everything is loaded.

        Args:
            module: the module's full name.
            descriptor: its end of a pipe.

        Raises:
            Error: the process is no more.
        """
        with self._lock:
            try:
                self._child.connection.send((FORK, (module, sys.path)))
                reduction.send_handle(self._child.connection, descriptor, self._child.pid)
                pid = self._child.connection.recv()
            except (EOFError, OSError) as error:
                raise Error("the process that builders are forked from has ended") from error
            self._alive.add(pid)
            return Forked(self, pid)

    def end(self, pid: int) -> int:
        """End a process that was forked, if it has not ended; its exit status."""
        with self._lock:
            try:
                self._child.connection.send((END, pid))
                return self._child.connection.recv()
            except (EOFError, OSError):
                return -signal.SIGKILL  # it went with the zygote
            finally:
                self._alive.discard(pid)
                self._close_if_alone()

    def stop_loading(self) -> None:
        """End it now if nothing that was forked from it is alive; a `fork` that waits for it raises Error."""
        if not self._alive:  # without the lock, which that `fork` holds
            os.kill(self._child.pid, signal.SIGKILL)  # alive, or waited for by nobody yet

    def close(self) -> None:
        """End it, as soon as nothing that was forked from it is alive."""
        with self._lock:
            self._wanted = False
            self._close_if_alone()

    def _close_if_alone(self) -> None:
        if not self._wanted and not self._alive:
            self._child.kill()


class Forked:
    """A process that was forked; see `tvmconv.measuring.child.Process`."""

    def __init__(self, origin: Zygote, pid: int) -> None:
        self.pid = pid
        self._origin = origin
        self._status: int | None = None

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._status is None:
            self._status = self._origin.end(self.pid)

    def wait(self) -> int:
        """Its exit status; ends it first."""
        self.kill()
        assert self._status is not None
        return self._status


def main(connection: Connection) -> None:
    """Serve: fork, or end what was forked."""
    from tvmconv.measuring.builder import load  # not before: to start this process shall take its parent nothing

    load()
    gc.collect()
    gc.freeze()  # pages that are shared stay shared
    this = os.getpid()
    while True:
        what, argument = connection.recv()
        if what == END:
            os.kill(argument, signal.SIGKILL)  # alive, or waited for by nobody yet
            connection.send(os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1]))
            continue
        descriptor = reduction.recv_handle(connection)
        pid = os.fork()
        if not pid:
            connection.close()
            os.setsid()
            module, sys.path[:] = argument
            serve(importlib.import_module(module).main, descriptor, this)
        os.close(descriptor)
        connection.send(pid)
