"""Prefetching of inputs and references in a background thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from tvmconv.verification import Problem
from tvmconv.workloads import Workload


class ProblemPrefetcher:
    """Source of new problems for workloads, which computes announced ones in advance.

    The float64 reference of a large convolution takes a second, during which a search can wait for builders and
    devices. The threads are daemons and never delay the end of the process.
    """

    def __init__(self) -> None:
        self._futures: dict[tuple[Workload, str], Future[Problem]] = {}
        self._last_future: Future[Problem] | None = None

    def prefetch(self, workload: Workload, mode: str = "auto") -> None:
        """Start the computation of a problem.

        `mode`: verification mode, one of `tvmconv.verification.VERIFICATION_MODES`.
        """
        if (workload, mode) in self._futures:
            return
        previous, future = self._last_future, Future[Problem]()
        if previous is None or previous.done():
            previous = None
            future.set_running_or_notify_cancel()
        self._last_future = self._futures[workload, mode] = future
        arguments = workload, mode, future, previous
        threading.Thread(target=_compute_problem, args=arguments, name="problems", daemon=True).start()

    def get(self, workload: Workload, mode: str = "auto") -> Problem:
        """Return a new problem; wait for a computation in progress, but not for one that is still queued.

        The arguments are those of `prefetch`.
        """
        future = self._futures.pop((workload, mode), None)
        return Problem(workload, mode=mode) if future is None or future.cancel() else future.result()


def _compute_problem(workload: Workload, mode: str, future: Future[Problem], previous: Future[Problem] | None) -> None:
    """Compute a problem after the previous one, unless its future was cancelled meanwhile."""
    if previous is not None:
        wait([previous])
        if not future.set_running_or_notify_cancel():
            return
    try:
        problem = Problem(workload, mode=mode)
        _ = problem.expected_output
    except BaseException as error:  # `get` raises it
        future.set_exception(error)
    else:
        future.set_result(problem)
