"""Pool of idle worker processes that successive searches reuse."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tvmconv.errors import Error, HostError
from tvmconv.measure.workers.process import FORKED_MODULE, BuilderForkServer, CancelPending, WorkerProcess

if TYPE_CHECKING:
    from tvmconv.devices import Device

BUILDER_MODULE, RUNNER_MODULE = FORKED_MODULE, "tvmconv.measure.runner"
POLL_SECONDS = 0.05  # interval of checks for starting processes


class WorkerPool:
    """Idle worker processes of all threads of this process, by a key that interchangeable processes share.

    The operating system ends a child with the thread that started it, and a search has its own thread. Processes of the
    pool are therefore started by a thread that lives as long as this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_contexts = 0
        self._idle_workers: dict[str, list[Future[WorkerProcess]]] = {}
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
        for worker in [worker for workers in idle_workers.values() for worker in workers if not worker.cancel()]:
            while not worker.done():
                if self._fork_server:
                    self._fork_server.stop_loading()  # the starting process waits for this loading
                wait([worker], POLL_SECONDS)
            with contextlib.suppress(HostError):  # it did not start
                worker.result().kill()
        self._start_executor.submit(int).result()  # waits for all queued starts
        with self._lock:
            if self._num_contexts:
                return
            fork_server, self._fork_server = self._fork_server, None
        if fork_server:
            fork_server.close()

    def start_worker(self, module: str) -> WorkerProcess:
        """Start a process that runs `main` of a module, and that can be pooled later if a block is active."""
        if not self._num_contexts:
            return WorkerProcess(module)
        return self._start_executor.submit(self._start, module).result()

    def prestart(self, module: str, pool_key: str, num_workers: int, first_message: object = None) -> None:
        """Start processes within a block until `num_workers` with a key are idle, and send each the first message."""
        with self._lock:
            workers = self._idle_workers.setdefault(pool_key, [])
            for _ in range(num_workers - len(workers)):
                workers.append(self._start_executor.submit(self._start, module, first_message))

    def prestart_fork_server(self) -> None:
        """Start the fork server within a block."""
        self._start_executor.submit(self._get_fork_server)

    def wait_for_worker(self, pool_key: str, timeout: float) -> bool:
        """Wait until an idle process is started, and return whether there is one within the timeout in seconds."""
        with self._lock:
            workers = list(self._idle_workers.get(pool_key, ()))
        return bool(wait(workers, timeout, FIRST_COMPLETED).done)

    def acquire(self, pool_key: str) -> WorkerProcess | None:
        """Take the last process, which may still be busy with a job of its previous owner; None if there is none."""
        with self._lock:
            workers = self._idle_workers.get(pool_key)
            worker = workers.pop() if workers else None
        with contextlib.suppress(HostError):  # it did not start; the caller starts another
            return worker.result() if worker else None
        return None

    def release(self, pool_key: str, process: WorkerProcess) -> bool:
        """Add a process and cancel its queued jobs; return False, for the caller to end it, if no block is active."""
        worker: Future[WorkerProcess] = Future()
        worker.set_result(process)
        with self._lock:
            if self._num_contexts:
                process.send(CancelPending())
                self._idle_workers.setdefault(pool_key, []).append(worker)
            return self._num_contexts > 0

    def _start(self, module: str, first_message: object = None) -> WorkerProcess:
        """Start a process, forked if possible; this runs in the starter thread."""
        process = None
        if module == FORKED_MODULE:
            with contextlib.suppress(Error):  # the fork server has ended
                process = WorkerProcess(module, self._get_fork_server())
        process = process or WorkerProcess(module)
        if first_message is not None:
            process.send(first_message)
        return process

    def _get_fork_server(self) -> BuilderForkServer:
        """Return the fork server, started if necessary; this runs in the starter thread."""
        self._fork_server = self._fork_server or BuilderForkServer()
        return self._fork_server


shared = WorkerPool()  # the pool of this process


def _reset_after_fork() -> None:
    """Reset the pool in a forked process, which has neither its parent's children nor the starter thread."""
    global shared
    shared = WorkerPool()


os.register_at_fork(after_in_child=_reset_after_fork)


@contextlib.contextmanager
def keep_workers_alive(*, starts_fork_server: bool = False) -> Iterator[None]:
    """Keep the processes of closed `Measurer`s for reuse by the next one until the end of the block.

    Loading TVM takes seconds and initializing a device takes one more, which matters for successive searches. Blocks
    can be nested and used in several threads. The pooled processes end with the last block or with this process, even
    if it is killed. Without a block, no process outlives its `Measurer`.

    `starts_fork_server`: whether the fork server starts with the block, so that it loads TVM while this process finds
        devices and imports TVM.
    """
    pool = shared
    pool.enter_context()
    try:
        if starts_fork_server:
            pool.prestart_fork_server()
        yield
    finally:
        if pool is shared:  # otherwise this process was forked within the block
            pool.exit_context()


def resolve_num_workers(num_workers: int | None) -> int:
    """Return `num_workers` or, if it is None, one less than the number of processors available to this process."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if num_workers is None else num_workers


def prestart_workers(num_builders: int | None, devices: Iterable[Device]) -> None:
    """Start builder processes and the runner processes of local GPUs before they are needed.

    Call it within `keep_workers_alive`. The number of builders is that of a `Measurer` by default.
    """
    for device in devices:  # first, because builders have to wait for the loading of TVM
        if device.kind == "cuda" and not device.text.startswith("rpc:"):
            shared.prestart(RUNNER_MODULE, device.text, 1, device.text)  # the first message initializes the device
    shared.prestart(BUILDER_MODULE, BUILDER_MODULE, resolve_num_workers(num_builders))
