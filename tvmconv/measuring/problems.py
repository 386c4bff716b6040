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
        self._prepared: dict[tuple[Workload, str], Future[Problem]] = {}

    def prepare(self, workload: Workload, mode: str = "auto") -> None:
        """Announce that a problem will be wanted.

        Args:
            workload: what is computed.
            mode: whether all outputs are verified, or a sample; one of `tvmconv.verify.MODES`.
        """
        if (workload, mode) not in self._prepared:
            self._prepared[workload, mode] = self._thread.submit(_computed, workload, mode)

    def take(self, workload: Workload, mode: str = "auto") -> Problem:
        """A problem that nobody else has; waits for one that is being prepared. Arguments as for `prepare`.

        Raises:
            WorkloadError: inputs and reference do not fit in this machine's memory.
        """
        prepared = self._prepared.pop((workload, mode), None)
        return prepared.result() if prepared else Problem(workload, mode=mode)


def _computed(workload: Workload, mode: str) -> Problem:
    problem = Problem(workload, mode=mode)
    _ = problem.expected
    return problem
