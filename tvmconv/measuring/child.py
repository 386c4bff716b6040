"""Child processes: spoken to over a private pipe, and gone with their parent.

They are not forked from this process (threads, TVM's compilers and CUDA do not survive it) but start from scratch, or
are forked from a `tvmconv.measuring.zygote`, in which nothing has happened yet. They do not import the parent's main
module, so that a script without an `if __name__ == "__main__"` can tune.
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
from tvmconv.scratch import Scratch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Forget:
    """A message to a child: those before it, of which it has not begun any, count no more."""


@dataclass(frozen=True)
class Last:
    """A child's last message: it ends after it, and what it was sent meanwhile is not to blame."""

    message: Any


class Process(Protocol):
    """A process that was started; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its number."""

    def kill(self) -> None:
        """End it, if it has not ended."""

    def wait(self) -> int:
        """Its exit status once it has ended, or a signal's number with a minus."""


class Origin(Protocol):
    """What processes can be forked from."""

    def fork(self, module: str, descriptor: int) -> Process:
        """A process that runs `serve` with `main` of a module and its own copy of a file descriptor."""


class Child:
    """A process that runs `main(connection)` of a module, as its parent sees it.

    The kernel ends it together with the thread that started it, even when that is killed: start it in a thread that
    stays.

    Args:
        module: the module's full name.
        environment: environment variables beside those of this process.
        scratch: the variable for a directory that is there as long as the process; None for no directory.
        origin: forks it, with its own environment; None for a process that starts from scratch.

    What it writes to its standard error is kept, as far as it fits into a pipe: libraries say there why they abort.

    Attributes:
        used: whether anybody has given it something to do.

    Raises:
        HostError: the process does not start.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        scratch: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.used = False
        self._stderr = -1
        with contextlib.ExitStack() as started, _as_fault():
            self._scratch = Scratch("tvmconv-") if scratch else None
            place: dict[str, str] = {}
            if scratch and self._scratch:
                started.callback(self._scratch.close)
                place = {scratch: str(self._scratch.path)}
            self.connection, theirs = Pipe()
            started.callback(self.connection.close)
            with theirs:
                if origin:
                    self._process: Process = origin.fork(module, theirs.fileno())
                else:
                    self._process = self._popen(module, theirs.fileno(), {**os.environ, **(environment or {}), **place})
            self._begin_sending()
            started.pop_all()

    def _popen(self, module: str, descriptor: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
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

    def _begin_sending(self) -> None:
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

    def received(self) -> list[Any]:
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
        reason = self._said()
        self._outbox.put(b"")
        self._sender.join()  # at once: nobody reads any more
        self.connection.close()
        if self._scratch:
            self._scratch.close()
        how = f"ended with exit status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"{how}: {reason}" if reason else how

    def _said(self) -> str:
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
        named = [line for line in lines if re.search(r"error|fatal|terminate called", line, re.IGNORECASE)]
        if any(line.startswith("Traceback (") for line in lines):  # Python's, whose last line has the error
            named = []
        line = (named or lines[-1:] or [""])[0][:_MAX_REASON_CHARACTERS]
        return "".join(character if character.isprintable() else " " for character in line)

    def _send_all(self) -> None:
        while message := self._outbox.get():
            try:
                self.connection.send_bytes(message)
            except (OSError, ValueError):  # it has ended, which `received` tells
                return


@contextlib.contextmanager
def _as_fault() -> Iterator[None]:
    """Raise what the operating system says against another process as an HostError of one line."""
    try:
        yield
    except OSError as error:
        raise HostError(f"cannot start a process: {error.strerror or error}") from error
    except RuntimeError as error:  # Python's, of a thread; HostError is one, too
        if isinstance(error, Error):
            raise
        raise HostError(f"cannot start a process: {error}") from error


def messages(connection: Connection) -> Iterator[Any]:
    """In a child: what the parent sends, one after another, without what it says to forget."""
    waiting: deque[Any] = deque()
    while True:
        while not waiting or connection.poll():
            message = connection.recv()
            if isinstance(message, Forget):
                waiting.clear()
            else:
                waiting.append(message)
        yield waiting.popleft()


def serve(main: Any, descriptor: int, parent: int) -> None:
    """Run `main` in a child: die with the parent, leave Ctrl-C to it, and leave no core file."""
    end_with_parent(parent)
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


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process together with the thread that started it, even when that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
