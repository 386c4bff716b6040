"""Inputs and references, computed by a thread of its own before they are asked for."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from tvmconv.verify import Problem
from tvmconv.workloads import Workload


class Problems:
    """Fresh problems for workloads; of those that were announced, the inputs and references are there already.

    A reference in float64 takes a second for a large convolution: it is computed while a search waits for builders and
    devices. The threads that compute never keep a process from ending.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[Workload, str], Future[Problem]] = {}
        self._last: Future[Problem] | None = None

    def prepare(self, workload: Workload, mode: str = "auto") -> None:
        """Announce that a problem will be wanted.

        Args:
            workload: what is computed.
            mode: whether all outputs are verified, or a sample; one of `tvmconv.verify.MODES`.
        """
        if (workload, mode) in self._prepared:
            return
        earlier, future = self._last, Future[Problem]()
        if earlier is None or earlier.done():
            earlier = None
            future.set_running_or_notify_cancel()
        self._last = self._prepared[workload, mode] = future
        threading.Thread(target=_compute, args=(workload, mode, future, earlier), name="problems", daemon=True).start()

    def take(self, workload: Workload, mode: str = "auto") -> Problem:
        """A problem that nobody else has; waits for one that is being prepared, but for none whose turn has not come.

        Arguments as for `prepare`.

        Raises:
            WorkloadError: inputs and reference do not fit in this machine's memory.
        """
        prepared = self._prepared.pop((workload, mode), None)
        return Problem(workload, mode=mode) if prepared is None or prepared.cancel() else prepared.result()


def _compute(workload: Workload, mode: str, future: Future[Problem], earlier: Future[Problem] | None) -> None:
    """Compute a problem once an earlier one was computed, unless somebody could not wait for that."""
    if earlier is not None:
        wait([earlier])
        if not future.set_running_or_notify_cancel():
            return
    try:
        problem = Problem(workload, mode=mode)
        _ = problem.expected
    except BaseException as error:  # `take` raises it
        future.set_exception(error)
    else:
        future.set_result(problem)
