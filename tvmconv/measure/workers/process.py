"""Child processes: spoken to over a private pipe, and gone with their parent.

They are not forked from this process (threads, TVM's compilers and CUDA do not survive it) but start from scratch, or
are forked from a `tvmconv.measure.workers.fork_server`, in which nothing has happened yet. They do not import the
parent's main module, so that a script without an `if __name__ == "__main__"` can tune.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tvmconv.errors import Error, HostError
from tvmconv.tempdir import ProcessTempDir

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class CancelPending:
    """A message to a child: those before it, of which it has not begun any, count no more."""


@dataclass(frozen=True)
class FinalMessage:
    """A child's last message: it ends after it, and what it was sent meanwhile is not to blame."""

    message: Any


class ProcessHandle(Protocol):
    """A process that was started; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its number."""

    def kill(self) -> None:
        """End it, if it has not ended."""

    def wait(self) -> int:
        """Its exit status once it has ended, or a signal's number with a minus."""


class ForkServer(Protocol):
    """What processes can be forked from."""

    def fork(self, module: str, descriptor: int) -> ProcessHandle:
        """A process that runs `serve` with `main` of a module and its own copy of a file descriptor."""


class WorkerProcess:
    """A process that runs `main(connection)` of a module, as its parent sees it.

    The kernel ends it together with the thread that started it, even when that is killed: start it in a thread that
    stays.

    Args:
        module: the module's full name.
        environment: environment variables beside those of this process.
        temp_dir_variable: the variable for a directory that is there as long as the process; None for no directory.
        fork_server: forks it, with its own environment; None for a process that starts from scratch.

    What it writes to its standard error is kept, as far as it fits into a pipe: libraries say there why they abort.

    Attributes:
        is_used: whether anybody has given it something to do.

    Raises:
        HostError: the process does not start.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        temp_dir_variable: str | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.is_used = False
        self._stderr = -1
        with contextlib.ExitStack() as cleanup, _translate_os_errors():
            self._temp_dir = ProcessTempDir("tvmconv-") if temp_dir_variable else None
            temp_environment: dict[str, str] = {}
            if temp_dir_variable and self._temp_dir:
                cleanup.callback(self._temp_dir.close)
                temp_environment = {temp_dir_variable: str(self._temp_dir.path)}
            self.connection, child_connection = Pipe()
            cleanup.callback(self.connection.close)
            with child_connection:
                if fork_server:
                    self._process: ProcessHandle = fork_server.fork(module, child_connection.fileno())
                else:
                    self._process = self._start_process(
                        module, child_connection.fileno(), {**os.environ, **(environment or {}), **temp_environment}
                    )
            self._start_sender()
            cleanup.pop_all()

    def _start_process(self, module: str, descriptor: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start the process from scratch."""
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
            f"from {module} import main; serve(main, {descriptor}, {os.getpid()})"
        )
        self._stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # a full pipe shall not stop the process
        try:
            return subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[descriptor],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which decides what becomes of its children
            )
        except BaseException:
            os.close(self._stderr)
            raise
        finally:
            os.close(stderr)

    def _start_sender(self) -> None:
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def resident_bytes(self) -> int:
        """Its memory in RAM; 0 when it has ended."""
        try:
            with open(f"/proc/{self._process.pid}/statm") as statm:
                return int(statm.read().split()[1]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 0

    def send(self, message: object) -> None:
        """Queue a message; never waits, and says nothing if the process has ended."""
        self._outbox.put(pickle.dumps(message))

    def receive_messages(self) -> list[Any]:
        """The messages that have come in.

        Raises:
            EOFError: there is none, and the process has ended.
        """
        messages: list[Any] = []
        try:
            while self.connection.poll():
                messages.append(self.connection.recv())
        except (EOFError, OSError) as error:
            if not messages:
                raise EOFError from error
        return messages

    def kill(self) -> str:
        """End the process, if it has not ended; how it ended, such as "was killed by SIGSEGV"."""
        self._process.kill()
        status = self._process.wait()
        reason = self._read_error_line()
        self._outbox.put(b"")
        self._sender.join()  # at once: nobody reads any more
        self.connection.close()
        if self._temp_dir:
            self._temp_dir.close()
        ending = f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"{ending}: {reason}" if reason else ending

    def _read_error_line(self) -> str:
        """Return the line of the process's standard error that names an error, or its last line; "" if there is none.

        Reads it once, at the process's end.
        """
        if self._stderr < 0:
            return ""
        try:
            text = os.read(self._stderr, 1 << 16).decode(errors="replace")
        except OSError:  # BlockingIOError: a process that this one started has the pipe, and it is empty
            text = ""
        os.close(self._stderr)
        self._stderr = -1
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        error_lines = [line for line in lines if re.search(r"error|fatal|terminate called", line, re.IGNORECASE)]
        if any(line.startswith("Traceback (") for line in lines):  # Python's, whose last line has the error
            error_lines = []
        line = (error_lines or lines[-1:] or [""])[0][:_MAX_REASON_CHARACTERS]
        return "".join(character if character.isprintable() else " " for character in line)

    def _send_all(self) -> None:
        while message := self._outbox.get():
            try:
                self.connection.send_bytes(message)
            except (OSError, ValueError):  # it has ended, which `receive_messages` tells
                return


@contextlib.contextmanager
def _translate_os_errors() -> Iterator[None]:
    """Raise what the operating system says against another process as an HostError of one line."""
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot start a process: {error.strerror or error}") from error
    except RuntimeError as error:  # Python's, of a thread; HostError is one, too
        if isinstance(error, Error):
            raise
        raise HostError(f"cannot start a process: {error}") from error


def iterate_messages(connection: Connection) -> Iterator[Any]:
    """In a child: what the parent sends, one after another, without what it says to forget."""
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
    """Run `main` in a child: die with the parent, leave Ctrl-C to it, and leave no core file."""
    set_parent_death_signal(parent_pid)
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    try:
        main(Connection(descriptor))
        status = 0
    except (EOFError, BrokenPipeError):  # the parent is done with it
        status = 0
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)  # without the destructors of the libraries, which may hang, and nobody needs any more


def set_parent_death_signal(parent_pid: int) -> None:
    """Have the kernel end this process together with the thread that started it, even when that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the line above
        os._exit(1)
