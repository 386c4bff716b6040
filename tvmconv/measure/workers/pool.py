"""Processes that outlive a search: those that one has done with stand ready for the next."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tvmconv.errors import Error, HostError
from tvmconv.measure.workers.fork_server import BuilderForkServer
from tvmconv.measure.workers.process import CancelPending, WorkerProcess

FORKED_MODULES = (
    "tvmconv.measure.builder",
)  # modules whose processes are forked, from one that has loaded what they need
POLL_SECONDS = 0.05  # between two looks at what is beginning


class _IdleWorkerPool:
    """The processes that nobody has at the moment; one for all threads of this process.

    The kernel ends a child with the thread that started it, which for a search is a thread of its own. Those that may
    stand longer are started by a thread that stays as long as this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_contexts = 0
        self._idle_workers: dict[str, list[WorkerProcess | Future[WorkerProcess]]] = {}
        self._fork_server: BuilderForkServer | None = None
        self._start_executor = ThreadPoolExecutor(1, "starter")

    def enter_context(self) -> None:
        """One block of `count_idle` more."""
        with self._lock:
            self._num_contexts += 1

    def exit_context(self) -> None:
        """One block less; after the last nothing stands."""
        with self._lock:
            self._num_contexts -= 1
            if self._num_contexts:
                return
            idle_workers, self._idle_workers = self._idle_workers, {}
        children = [child for workers in idle_workers.values() for child in workers]
        started = [child for child in children if not (isinstance(child, Future) and child.cancel())]
        starting = [child for child in started if isinstance(child, Future) and not child.done()]
        for child in started:
            if child not in starting:
                _kill_worker(child)
        for child in starting:
            while not child.done():
                if self._fork_server:
                    self._fork_server.stop_loading()  # which takes seconds, and what is beginning waits for it
                wait([child], POLL_SECONDS)
            _kill_worker(child)
        self._start_executor.submit(int).result()  # until all that was to begin has begun
        with self._lock:
            if self._num_contexts:
                return
            fork_server, self._fork_server = self._fork_server, None
        if fork_server:
            fork_server.close()

    def start_worker(
        self, module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None
    ) -> WorkerProcess:
        """A new process, which may stand later if that is wanted now."""
        if not self._num_contexts:
            return WorkerProcess(module, environment, temp_dir_variable)
        return self._start_executor.submit(self._start_in_thread, module, environment, temp_dir_variable).result()

    def _start_in_thread(
        self, module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None
    ) -> WorkerProcess:
        """In the starter's thread: a new process, forked where that is possible."""
        if module not in FORKED_MODULES or environment or temp_dir_variable:
            return WorkerProcess(module, environment, temp_dir_variable)
        with contextlib.suppress(Error):  # it has ended: then without it
            return WorkerProcess(module, fork_server=self._get_fork_server())
        return WorkerProcess(module)

    def _get_fork_server(self) -> BuilderForkServer:
        """In the starter's thread: what is forked from, begun if it is not there."""
        self._fork_server = self._fork_server or BuilderForkServer()
        return self._fork_server

    def prestart_fork_server(self) -> None:
        """Begin the process that others will be forked from."""
        self._start_executor.submit(self._get_fork_server)

    def prestart(self, pool_key: str, module: str, first_message: object) -> None:
        """Let a process that nobody had yet stand, as soon as it is there."""

        def start() -> WorkerProcess:
            child = self._start_in_thread(module, None, None)
            if first_message is not None:
                child.send(first_message)
            return child

        with self._lock:
            self._idle_workers.setdefault(pool_key, []).append(self._start_executor.submit(start))

    def wait_for_worker(self, pool_key: str, timeout: float) -> bool:
        """Wait until one process of this kind is there; False if none is after so many seconds."""
        with self._lock:
            children = list(self._idle_workers.get(pool_key, ()))
        starting = [child for child in children if isinstance(child, Future)]
        if len(starting) < len(children):
            return True
        return bool(wait(starting, timeout, FIRST_COMPLETED).done)

    def count_idle(self, pool_key: str) -> int:
        """How many processes of this kind stand."""
        with self._lock:
            return len(self._idle_workers.get(pool_key, ()))

    def acquire(self, pool_key: str) -> WorkerProcess | None:
        """The process of this kind that was handed on last, if there is any."""
        with self._lock:
            children = self._idle_workers.get(pool_key)
            child = children.pop() if children else None
        with contextlib.suppress(HostError):  # it did not start: whoever needs one starts another
            return _await_worker(child) if child else None
        return None

    def release(self, pool_key: str, child: WorkerProcess) -> bool:
        """Let a process stand; False if nobody wants it to."""
        with self._lock:
            if self._num_contexts:
                child.send(CancelPending())
                self._idle_workers.setdefault(pool_key, []).append(child)
            return self._num_contexts > 0


def _await_worker(child: WorkerProcess | Future[WorkerProcess]) -> WorkerProcess:
    """A process, once it is there."""
    return child.result() if isinstance(child, Future) else child


def _kill_worker(child: WorkerProcess | Future[WorkerProcess]) -> None:
    """End a process; one that did not start needs no end."""
    with contextlib.suppress(HostError):
        _await_worker(child).kill()


_pool = _IdleWorkerPool()


def _reset_after_fork() -> None:
    """In a process that was forked: the children are those of its parent, and the thread is not there."""
    global _pool
    _pool = _IdleWorkerPool()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextlib.contextmanager
def keep_workers_alive() -> Iterator[None]:
    """Within the block, processes that a `Measurer` is done with stand ready for the next one; at its end they end.

    To load TVM takes seconds, and to bring up a device another: worth it around searches that follow one another.
    Blocks may lie within each other and in several threads; what stands ends with the last of them, or with this
    process, even when that is killed. Without a block no process outlives its `Measurer`.
    """
    pool = _pool
    pool.enter_context()
    try:
        yield
    finally:
        if pool is _pool:  # else this process was forked within the block
            pool.exit_context()


def prestart(module: str, pool_key: str, num_workers: int, first_message: object = None) -> None:
    """Have so many processes stand ready, or nearly so; within a block of `keep_workers_alive` only.

    Args:
        module: whose `main` runs in them.
        pool_key: which processes can do the same, as for `release`.
        num_workers: how many there shall be, those that stand already included.
        first_message: a message to each; None for none.
    """
    for _ in range(num_workers - _pool.count_idle(pool_key)):
        _pool.prestart(pool_key, module, first_message)


def wait_for_worker(pool_key: str, timeout: float) -> bool:
    """Wait until one of the processes that stand, or were begun, is there; False if none is after so many seconds.

    Args:
        pool_key: which processes can do the same, as for `release`.
        timeout: in seconds.
    """
    return _pool.wait_for_worker(pool_key, timeout)


def prestart_fork_server() -> None:
    """Begin the process that others are forked from, before any of them is wanted; within a block of
    `keep_workers_alive`.
    """
    _pool.prestart_fork_server()


def start_worker(module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None) -> WorkerProcess:
    """A new process; its arguments are those of `WorkerProcess`."""
    return _pool.start_worker(module, environment, temp_dir_variable)


def acquire(pool_key: str) -> WorkerProcess | None:
    """A process that stands ready, or is about to: it may still be at what it did for another. None if there is none.

    Args:
        pool_key: what `release` was told.
    """
    return _pool.acquire(pool_key)


def release(pool_key: str, child: WorkerProcess) -> bool:
    """Let a process stand ready for whoever comes next; False if it is to be ended instead.

    Args:
        pool_key: which processes can do the same.
        child: is ready, or will be once it has done what it is doing; its queue is forgotten.
    """
    return _pool.release(pool_key, child)
