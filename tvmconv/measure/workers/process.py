"""Child processes that communicate over a private pipe and end with their parent.

They are started from scratch or forked from a fork server, but never from this process, because threads, TVM's
compilers and CUDA do not survive a fork. They do not import the parent's main module, so that a script without
`if __name__ == "__main__"` can tune.

The fork server is a process with loaded TVM, schedules and compilers, from which builders are forked. Loading takes
seconds of a core, and several times as long if many processes do it at once. Forking is safe if no other thread may
hold a lock: TVM and NVRTC compile in the calling thread, BLAS handles forks itself, and the CUDA driver is not loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from typing import Any

from tvmconv.errors import Error, HostError

FORKED_MODULE = "tvmconv.measure.builder"  # module whose `main` runs in forked processes, after `preload_compilers`
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class CancelPending:
    """A message to a child that cancels all earlier messages that it has not begun to process."""


@dataclass(frozen=True)
class FinalMessage:
    """The last message of a child before it ends, so that its queued jobs are not blamed for the end."""

    message: Any


class WorkerProcess:
    """Parent's handle of a process that runs `main(connection)` of a module.

    The operating system ends the process together with the thread that started it, so that thread must live as long.
    Standard error of the process is kept as far as it fits into a pipe, because libraries report there why they abort.

    `fork_server`: server that forks the process, for `FORKED_MODULE`; by default it is started from scratch.
    """

    def __init__(self, module: str, fork_server: BuilderForkServer | None = None) -> None:
        self.is_used = False  # whether the process has been given work
        self._stderr = -1
        with contextlib.ExitStack() as cleanup, _translate_os_errors():
            self.connection, child_connection = Pipe()
            cleanup.callback(self.connection.close)
            with child_connection:
                descriptor = child_connection.fileno()
                self._process = fork_server.fork(descriptor) if fork_server else self._start_process(module, descriptor)
            self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
            self._sender = threading.Thread(target=self._send_all, daemon=True)
            self._sender.start()
            cleanup.pop_all()

    def _start_process(self, module: str, descriptor: int) -> subprocess.Popen[bytes]:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
            f"from {module} import main; serve(main, {descriptor}, {os.getpid()})"
        )
        self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a full pipe must not block the process
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[descriptor],
                start_new_session=True,  # only the parent receives Ctrl-C
            )
        except BaseException:
            os.close(self._stderr)
            raise
        finally:
            os.close(stderr)

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes; 0 when it has ended."""
        try:
            with open(f"/proc/{self._process.pid}/statm") as statm:
                return int(statm.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def send(self, message: object) -> None:
        """Queue a message without waiting; a process that has ended is ignored."""
        self._outbox.put(pickle.dumps(message))

    def receive_messages(self) -> list[Any]:
        """Return the received messages."""
        messages: list[Any] = []
        try:
            while self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError) as error:
            if not messages:
                raise EOFError from error
        return messages

    def kill(self) -> str:
        """End the process if it is alive, and return how it ended, such as "was killed by SIGSEGV"."""
        self._process.kill()
        status = self._process.wait()
        reason = self._read_error_line()
        self._outbox.put(b"")
        self._sender.join()  # returns immediately, because the process no longer reads
        self.connection.close()
        ending = f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending

    def _read_error_line(self) -> str:
        """Return the line with an error in the process's standard error, its last line, or "" if there is none.

        It is read once, after the end of the process.
        """
        if self._stderr < 0:
            return ""
        try:
            text = os.read(self._stderr, 1 << 16).decode(errors="replace")
        except OSError:  # BlockingIOError: a grandchild keeps the empty pipe open
            text = ""
        os.close(self._stderr)
        self._stderr = -1
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        error_lines = [line for line in lines if re.search(r"error|fatal|terminate called", line, re.IGNORECASE)]
        if any(line.startswith("Traceback (") for line in lines):  # the last line of a Python traceback has the error
            error_lines = []
        line = (error_lines or lines[-1:] or [""])[0][:_MAX_REASON_CHARACTERS]
        return "".join(character if character.isprintable() else " " for character in line)

    def _send_all(self) -> None:
        while message := self._outbox.get():
            try:
                self.connection.send_bytes(message)
            except (OSError, ValueError):  # the process has ended, which `receive_messages` reports
                return


class _ForkedProcess:
    """A forked process, with the methods of `subprocess.Popen`; waiting for it ends it."""

    def __init__(self, fork_server: BuilderForkServer, pid: int) -> None:
        self.pid = pid
        self._fork_server = fork_server
        self._status: int | None = None

    def kill(self) -> None:
        self.wait()

    def wait(self) -> int:
        if self._status is None:
            self._status = self._fork_server.end_process(self.pid)
        return self._status


class BuilderForkServer:
    """Parent's handle of the fork server, which is thread-safe.

    The operating system ends the server and all forked processes together with the thread that started it.
    """

    def __init__(self) -> None:
        self._child = WorkerProcess(__name__)
        self._lock = threading.Lock()
        self._live_pids: set[int] = set()
        self._is_open = True

    def fork(self, descriptor: int) -> _ForkedProcess:
        """Fork a process with its own copy of a file descriptor, its end of a pipe, after everything is loaded."""
        with self._lock:
            try:
                self._child.connection.send(sys.path)
                reduction.send_handle(self._child.connection, descriptor, self._child.pid)
                pid = self._child.connection.recv()
            except (EOFError, OSError) as error:
                raise Error("the process that builders are forked from has ended") from error
            self._live_pids.add(pid)
            return _ForkedProcess(self, pid)

    def end_process(self, pid: int) -> int:
        """End a forked process if it is alive, and return its exit status."""
        with self._lock:
            try:
                self._child.connection.send(pid)
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


def main(connection: Connection) -> None:
    """Run the fork server: end the process of each PID that it receives, and fork one for each search path."""
    forked = importlib.import_module(FORKED_MODULE)
    forked.preload_compilers()
    gc.collect()
    gc.freeze()  # keeps memory pages shared after forks
    own_pid = os.getpid()
    while True:
        message = connection.recv()
        if isinstance(message, int):
            os.kill(message, signal.SIGKILL)  # alive, or a zombie whose PID is still reserved
            connection.send(os.waitstatus_to_exitcode(os.waitpid(message, 0)[1]))
            continue
        descriptor = reduction.recv_handle(connection)
        pid = os.fork()
        if not pid:
            connection.close()
            os.setsid()
            sys.path[:] = message
            serve(forked.main, descriptor, own_pid)
        os.close(descriptor)
        connection.send(pid)


@contextlib.contextmanager
def _translate_os_errors() -> Iterator[None]:
    """Translate errors of the operating system at a process start to a one-line HostError."""
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot start a process: {error.strerror or error}") from error
    except RuntimeError as error:  # Python raises it for threads; HostError is a subclass too
        if isinstance(error, Error):
            raise
        raise HostError(f"cannot start a process: {error}") from error


def iterate_messages(connection: Connection) -> Iterator[Any]:
    """Yield the messages of the parent in a child, without cancelled ones."""
    pending: deque[Any] = deque()
    while True:
        while not pending or connection.poll():
            message = connection.recv()
            if isinstance(message, CancelPending):
                pending.clear()
            else:
                pending.append(message)
        yield pending.popleft()


def serve(main: Any, descriptor: int, parent_pid: int) -> None:
    """Run `main` in a child that ends with its parent, ignores Ctrl-C and leaves no core file."""
    set_parent_death_signal(parent_pid)
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        main(Connection(descriptor))
        status = 0
    except (EOFError, BrokenPipeError):  # the parent has closed the connection
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)  # skips the destructors of libraries, which may hang


def set_parent_death_signal(parent_pid: int) -> None:
    """Let the operating system end this process with the thread that started it, even if that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call above
        os._exit(1)
