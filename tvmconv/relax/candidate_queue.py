"""The configs of a workload in the order in which they are built, with the errors of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvmconv.cost_model.predict import Prediction
from tvmconv.devices import Device
from tvmconv.errors import CompileError, Error, ScheduleError
from tvmconv.logs.candidates import PREDICTED, Candidate, iterate_candidates
from tvmconv.logs.ranking import RecordIndex
from tvmconv.registry import find_schedule
from tvmconv.workloads import Workload

MIN_PREDICTED_SPEEDUP = 1.25  # with which a prediction is clearly faster than a measured config
MAX_CANDIDATES = 8  # configs of a workload that may fail to build


class CandidateQueue:
    """The candidates of a workload, of which the next is tried when one fails."""

    def __init__(
        self,
        logs: RecordIndex,
        workload: Workload,
        device: Device,
        predictions: Sequence[Prediction] | None = None,
        *,
        prefers_clear_prediction: bool = False,
    ) -> None:
        self.workload, self._device = workload, device
        self._candidates = iterate_candidates(logs, workload, device, predictions)
        if prefers_clear_prediction and predictions:
            self._candidates = prefer_if_clearly_faster(predictions[0], workload, self._candidates)
        self._errors: list[Error] = []
        self._refused_schedules: set[str] = set()
        self._refusal: Error | None = None
        self.candidate: Candidate

    def advance(self) -> bool:
        """Make the next candidate the current one, and return whether there is one."""
        if len(self._errors) >= MAX_CANDIDATES:
            return False
        try:
            candidate = next((c for c in self._candidates if c.schedule.name not in self._refused_schedules), None)
        except Error as error:  # no schedule computes the workload on the device
            self._errors.append(error)
            return False
        if candidate is None:
            return False
        self.candidate = candidate
        return True

    def add_failure(self, error: Error) -> None:
        """Store why the current candidate failed."""
        self._errors.append(error)

    def refuse_schedule(self, reason: str) -> None:
        """Leave out further candidates of the current one's schedule, and store the reason."""
        self._refused_schedules.add(self.candidate.schedule.name)
        self._refusal = self._refusal or CompileError(reason)

    @property
    def error(self) -> Error:
        """The error of the best candidate."""
        message = f"no schedule computes {self.workload} on {self._device.text}"
        return self._refusal or (self._errors[0] if self._errors else ScheduleError(message))

    @property
    def config_source(self) -> str:
        """Source of the current candidate's config, with the error of a better candidate."""
        has_failed = bool(self._errors or self._refusal)
        note = f"; a better one failed: {self.error}" if has_failed else ""
        return self.candidate.config_source + note


def prefer_if_clearly_faster(
    prediction: Prediction, workload: Workload, candidates: Iterator[Candidate]
) -> Iterator[Candidate]:
    """Yield a predicted config before the measured ones if it is clearly faster, and the others in their order. A
    search that has ended after a few trials may not have measured it.
    """
    first = next(candidates, None)
    if first is not None and first.seconds is not None and prediction.seconds < first.seconds / MIN_PREDICTED_SPEEDUP:
        schedule = find_schedule(workload, prediction.schedule)
        yield Candidate(schedule, prediction.config, PREDICTED, prediction.seconds)
    if first is not None:
        yield first
    yield from candidates
