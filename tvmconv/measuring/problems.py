"""Inputs and references, computed by a thread of its own before they are asked for."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from tvmconv.verify import Problem
from tvmconv.workloads import Workload


class Problems:
    """Fresh problems for workloads; of those that were announced, the inputs and references are there already.

    A reference in float64 takes a second for a large convolution: it is computed while a search waits for builders and
    devices.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "problems")
        self._prepared: dict[Workload, Future[Problem]] = {}

    def prepare(self, workload: Workload) -> None:
        """Announce that a problem will be wanted."""
        if workload not in self._prepared:
            self._prepared[workload] = self._thread.submit(_computed, workload)

    def take(self, workload: Workload) -> Problem:
        """A problem that nobody else has; waits for one that is being prepared.

        Raises:
            WorkloadError: inputs and reference do not fit in this machine's memory.
        """
        prepared = self._prepared.pop(workload, None)
        return prepared.result() if prepared else Problem(workload)


def _computed(workload: Workload) -> Problem:
    problem = Problem(workload)
    _ = problem.reference
    return problem
