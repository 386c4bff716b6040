"""Searches in tests without any measuring: a measurer that answers at once with made-up times."""

import json
import zlib
from dataclasses import replace

from tvmconv.logs.record import Record
from tvmconv.measure.pipeline import MeasureCandidate
from tvmconv.measure.results import ErrorKind, MeasureResult, RunnerResult


def measured(workload, schedule, config, device, *, failed=False):
    """A measurement whose time, up to a millisecond, is drawn from the config's spelling."""
    seconds = 1e-3 * (1 + zlib.crc32(json.dumps(config).encode())) / (1 << 32)
    outcome = RunnerResult(error=ErrorKind.RUNTIME, message="it fails") if failed else RunnerResult(times=(seconds,))
    return MeasureResult(workload, schedule, config, device, "opencl", outcome, seconds=0.0, timestamp=0.0)


def made_up(workload, schedule, config, device, **fields):
    """A record of such a measurement."""
    return replace(Record.from_measurement(measured(workload, schedule, config, device)), **fields)


class Clock:
    """A clock that goes on only when somebody sets it on; calling it tells the time.

    Attributes:
        now: the time, in seconds.
    """

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Instant:
    """Stands in for `Measurer`; configs end one at a time, in the order in which they were submitted.

    Attributes:
        measured: names of schedules and configs that any instance measured.
        failing: names of schedules whose configs all fail.
        seconds, error: what a trial takes, and how it ends, made of the trial and of what it would be else.
        milliseconds: by phase.
        clock: a `Clock` that goes on while results are waited for; None where trials take no time.
        duration: the seconds that a trial takes on that clock.
        lasts: after how many measurements the device is lost, with the error `loss`.
    """

    def __init__(self):
        self.measured = []
        self.failing = frozenset()
        self.lasts = 1_000_000
        self.loss = None
        self.seconds = self.error = lambda trial, otherwise: otherwise
        self.milliseconds = {"time": 1.0}
        self.clock = None
        self.duration = lambda trial: 1.0

    def __call__(self, workload, schedules, devices, workers=None, problem=None):
        return _Session(self, workload, devices[0].name)


class _Session:
    num_workers = 2

    def __init__(self, instant, workload, device):
        self._instant, self._workload, self._device = instant, workload, device
        self._waiting = []
        self._ended = []
        self._left = None  # seconds until the first that waits ends

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def num_pending(self):
        return len(self._waiting)

    @property
    def phase_means(self):
        return self._instant.milliseconds if self._instant.measured else {}

    @property
    def fastest_candidates(self):
        return [replace(trial, is_final=True) for _, trial in sorted(self._ended, key=lambda each: each[0])]

    def submit(self, configs, schedule=None):
        self.submit_candidates([MeasureCandidate(schedule, config) for config in configs])

    def submit_candidates(self, candidates):
        self._waiting += candidates

    def collect_results(self, timeout):
        if not self._waiting:
            return []
        if len(self._instant.measured) == self._instant.lasts:
            raise self._instant.loss
        if self._instant.clock:
            left = self._instant.duration(self._waiting[0]) if self._left is None else self._left
            self._instant.clock.now += min(timeout, left)
            self._left = left - timeout if left > timeout else None
            if self._left is not None:
                return []
        trial = self._waiting.pop(0)
        name = trial.schedule
        self._instant.measured.append((name, trial.config))
        made = measured(self._workload, name, trial.config, self._device, failed=name in self._instant.failing)
        error = self._instant.error(trial, made.runner_result.error)
        times = () if error else (self._instant.seconds(trial, made.cost),)
        made = replace(made, runner_result=replace(made.runner_result, error=error, times=times))
        if not trial.is_final and made.cost < float("inf"):
            self._ended.append((made.cost, trial))
        return [replace(made, is_final=trial.is_final)]
