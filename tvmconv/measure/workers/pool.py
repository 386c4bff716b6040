"""Pool of idle worker processes that successive searches reuse."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from tvmconv.errors import Error, HostError
from tvmconv.measure.workers.fork_server import BuilderForkServer
from tvmconv.measure.workers.process import CancelPending, WorkerProcess

FORKED_MODULES = ("tvmconv.measure.builder",)  # modules whose processes are forked from the fork server
POLL_SECONDS = 0.05  # interval of checks for starting processes


class _IdleWorkerPool:
    """Idle worker processes of all threads of this process.

    The operating system ends a child with the thread that started it, and a search has its own thread. Processes of the
    pool are therefore started by a thread that lives as long as this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_contexts = 0
        self._idle_workers: dict[str, list[WorkerProcess | Future[WorkerProcess]]] = {}
        self._fork_server: BuilderForkServer | None = None
        self._start_executor = ThreadPoolExecutor(1, "starter")

    def enter_context(self) -> None:
        """Enter a block of `keep_workers_alive`."""
        with self._lock:
            self._num_contexts += 1

    def exit_context(self) -> None:
        """Leave a block; the last one ends all idle processes."""
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
                    self._fork_server.stop_loading()  # the starting process waits for this loading
                wait([child], POLL_SECONDS)
            _kill_worker(child)
        self._start_executor.submit(int).result()  # waits for all queued starts
        with self._lock:
            if self._num_contexts:
                return
            fork_server, self._fork_server = self._fork_server, None
        if fork_server:
            fork_server.close()

    def start_worker(
        self, module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None
    ) -> WorkerProcess:
        """Start a process, which can be pooled later if a block is active."""
        if not self._num_contexts:
            return WorkerProcess(module, environment, temp_dir_variable)
        return self._start_executor.submit(self._start_in_thread, module, environment, temp_dir_variable).result()

    def _start_in_thread(
        self, module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None
    ) -> WorkerProcess:
        """Start a process in the starter thread, forked if possible."""
        if module not in FORKED_MODULES or environment or temp_dir_variable:
            return WorkerProcess(module, environment, temp_dir_variable)
        with contextlib.suppress(Error):  # the fork server has ended
            return WorkerProcess(module, fork_server=self._get_fork_server())
        return WorkerProcess(module)

    def _get_fork_server(self) -> BuilderForkServer:
        """Return the fork server, started if necessary; runs in the starter thread."""
        self._fork_server = self._fork_server or BuilderForkServer()
        return self._fork_server

    def prestart_fork_server(self) -> None:
        """Start the fork server."""
        self._start_executor.submit(self._get_fork_server)

    def prestart(self, pool_key: str, module: str, first_message: object) -> None:
        """Start a process and add it to the pool."""

        def start() -> WorkerProcess:
            child = self._start_in_thread(module, None, None)
            if first_message is not None:
                child.send(first_message)
            return child

        with self._lock:
            self._idle_workers.setdefault(pool_key, []).append(self._start_executor.submit(start))

    def wait_for_worker(self, pool_key: str, timeout: float) -> bool:
        """Wait for a pooled process with a key, and return whether there is one within the timeout in seconds."""
        with self._lock:
            children = list(self._idle_workers.get(pool_key, ()))
        starting = [child for child in children if isinstance(child, Future)]
        if len(starting) < len(children):
            return True
        return bool(wait(starting, timeout, FIRST_COMPLETED).done)

    def count_idle(self, pool_key: str) -> int:
        """Return the number of pooled processes with a key."""
        with self._lock:
            return len(self._idle_workers.get(pool_key, ()))

    def acquire(self, pool_key: str) -> WorkerProcess | None:
        """Take the most recently released process with a key from the pool; None if there is none."""
        with self._lock:
            children = self._idle_workers.get(pool_key)
            child = children.pop() if children else None
        with contextlib.suppress(HostError):  # it did not start; the caller starts another
            return _await_worker(child) if child else None
        return None

    def release(self, pool_key: str, child: WorkerProcess) -> bool:
        """Add a process to the pool; return False if no block is active."""
        with self._lock:
            if self._num_contexts:
                child.send(CancelPending())
                self._idle_workers.setdefault(pool_key, []).append(child)
            return self._num_contexts > 0


def _await_worker(child: WorkerProcess | Future[WorkerProcess]) -> WorkerProcess:
    """Wait for the start of a process and return it."""
    return child.result() if isinstance(child, Future) else child


def _kill_worker(child: WorkerProcess | Future[WorkerProcess]) -> None:
    """End a process; ignore one that did not start."""
    with contextlib.suppress(HostError):
        _await_worker(child).kill()


_pool = _IdleWorkerPool()


def _reset_after_fork() -> None:
    """Reset the pool in a forked process, which has neither its parent's children nor the starter thread."""
    global _pool
    _pool = _IdleWorkerPool()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextlib.contextmanager
def keep_workers_alive() -> Iterator[None]:
    """Keep the processes of closed `Measurer`s for reuse by the next one until the end of the block.

    Loading TVM takes seconds and initializing a device takes one more, which matters for successive searches. Blocks
    can be nested and used in several threads. The pooled processes end with the last block or with this process, even
    if it is killed. Without a block, no process outlives its `Measurer`.
    """
    pool = _pool
    pool.enter_context()
    try:
        yield
    finally:
        if pool is _pool:  # otherwise this process was forked within the block
            pool.exit_context()


def prestart(module: str, pool_key: str, num_workers: int, first_message: object = None) -> None:
    """Start processes for the pool; call it only within a block of `keep_workers_alive`.

    `num_workers`: required number of pooled processes, including existing ones.
    `first_message`: first message to each process; None for no message.
    """
    for _ in range(num_workers - _pool.count_idle(pool_key)):
        _pool.prestart(pool_key, module, first_message)


def wait_for_worker(pool_key: str, timeout: float) -> bool:
    """Wait until a pooled process is started, and return whether there is one within the timeout."""
    return _pool.wait_for_worker(pool_key, timeout)


def prestart_fork_server() -> None:
    """Start the fork server in advance; call it only within a block of `keep_workers_alive`."""
    _pool.prestart_fork_server()


def start_worker(module: str, environment: Mapping[str, str] | None, temp_dir_variable: str | None) -> WorkerProcess:
    """Start a process with the arguments of `WorkerProcess`."""
    return _pool.start_worker(module, environment, temp_dir_variable)


def acquire(pool_key: str) -> WorkerProcess | None:
    """Take a process from the pool, which may still be busy with a job of its previous owner; None if there is none."""
    return _pool.acquire(pool_key)


def release(pool_key: str, child: WorkerProcess) -> bool:
    """Return a process to the pool; the result is False if the caller must end it instead.

    `child`: process that was started; its queued jobs are cancelled.
    """
    return _pool.release(pool_key, child)
