"""Child processes: spoken to over a private pipe, and gone with their parent.

They are not forked from this process (threads, TVM's compilers and CUDA do not survive it) but start from scratch, or
are forked from a `tvmconv.measuring.zygote`, in which nothing has happened yet. They do not import the parent's main
module, so that a script without an `if __name__ == "__main__"` can tune.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
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

from tvmconv.scratch import Scratch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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

    Attributes:
        used: whether anybody has given it something to do.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        scratch: str | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.used = False
        self._scratch = Scratch("tvmconv-") if scratch else None
        place = {scratch: str(self._scratch.path)} if scratch and self._scratch else {}
        self.connection, theirs = Pipe()
        with theirs:
            descriptor = theirs.fileno()
            if origin:
                self._process: Process = origin.fork(module, descriptor)
                self._begin_sending()
                return
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
                f"from {module} import main; serve(main, {descriptor}, {os.getpid()})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                env={**os.environ, **(environment or {}), **place},
                start_new_session=True,  # Ctrl-C is for the parent, which decides what becomes of its children
            )
        self._begin_sending()

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
        self._outbox.put(b"")
        self._sender.join()  # at once: nobody reads any more
        self.connection.close()
        if self._scratch:
            self._scratch.close()
        if status >= 0:
            return f"ended with exit status {status}"
        return f"was killed by {signal.Signals(-status).name}"

    def _send_all(self) -> None:
        while message := self._outbox.get():
            try:
                self.connection.send_bytes(message)
            except (OSError, ValueError):  # it has ended, which `received` tells
                return


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
    finally:
        os._exit(status)  # without the destructors of the libraries, which may hang, and nobody needs any more


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process together with the thread that started it, even when that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
