"""Inputs and references, computed by a thread of its own before they are asked for."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from tvmconv.verification import Problem
from tvmconv.workloads import Workload


class ProblemPrefetcher:
    """Fresh problems for workloads; of those that were announced, the inputs and references are there already.

    A reference in float64 takes a second for a large convolution: it is computed while a search waits for builders and
    devices. The threads that compute never keep a process from ending.
    """

    def __init__(self) -> None:
        self._futures: dict[tuple[Workload, str], Future[Problem]] = {}
        self._last_future: Future[Problem] | None = None

    def prefetch(self, workload: Workload, mode: str = "auto") -> None:
        """Announce that a problem will be wanted.

        Args:
            workload: what is computed.
            mode: whether all outputs are verified, or a sample; one of `tvmconv.verification.VERIFICATION_MODES`.
        """
        if (workload, mode) in self._futures:
            return
        previous, future = self._last_future, Future[Problem]()
        if previous is None or previous.done():
            previous = None
            future.set_running_or_notify_cancel()
        self._last_future = self._futures[workload, mode] = future
        threading.Thread(
            target=_compute_problem, args=(workload, mode, future, previous), name="problems", daemon=True
        ).start()

    def get(self, workload: Workload, mode: str = "auto") -> Problem:
        """A problem that nobody else has; waits for one that is being prepared, but for none whose turn has not come.

        Arguments as for `prefetch`.

        Raises:
            WorkloadError: inputs and reference do not fit in this machine's memory.
        """
        future = self._futures.pop((workload, mode), None)
        return Problem(workload, mode=mode) if future is None or future.cancel() else future.result()


def _compute_problem(workload: Workload, mode: str, future: Future[Problem], previous: Future[Problem] | None) -> None:
    """Compute a problem once an earlier one was computed, unless somebody could not wait for that."""
    if previous is not None:
        wait([previous])
        if not future.set_running_or_notify_cancel():
            return
    try:
        problem = Problem(workload, mode=mode)
        _ = problem.expected_output
    except BaseException as error:  # `take` raises it
        future.set_exception(error)
    else:
        future.set_result(problem)
