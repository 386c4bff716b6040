"""The options of a search, which do not depend on the workload, the schedules and the device."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvmconv.deadline import Deadline
from tvmconv.errors import TuningError
from tvmconv.logs.ranking import list_log_files
from tvmconv.search import tuners
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.verification import VERIFICATION_MODES
from tvmconv.workloads.text import quote

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TuneOptions:
    """The options of a search."""

    tuner: str = "gp"  # search algorithm: "gp", "ga", "random" or "grid"
    # Number of records of all schedules, those in the log included. The default is
    # `tvmconv.search.search.DEFAULT_MAX_TRIALS` without `seconds`, else no limit.
    trials: int | None = None
    # Time limit in seconds of wall-clock time, with final timings and earlier sessions included; see
    # `tvmconv.deadline`.
    seconds: float | None = None
    log: str | os.PathLike[str] = "tuning.jsonl"  # file of records that is read first and then appended to
    seed: int = 0  # seed of the tuner, not negative
    patience: int | None = None  # number of consecutive records without improvement after which the search ends
    # Logs, or folders of logs, of other workloads that the gp tuner also learns from.
    transfer_logs: Iterable[str | os.PathLike[str]] = ()
    workers: int | None = None  # Number of builder processes. The default is the number of processors minus one.
    # Whether the naive schedule is measured once, if the log does not have it and a launch takes at most one second
    # (`tvmconv.naive_cost`).
    measure_baseline: bool = True
    remeasure_best: bool = True  # whether the fastest configs are measured again at the end, on fresh inputs
    # Value of `time.monotonic` from which `seconds` counts. The default is the call of the search.
    started_at: float | None = None
    verify: str = "auto"  # outputs of a kernel that are verified, one of `tvmconv.verification.VERIFICATION_MODES`
    # Time at which the search is cut off in any state, in addition to the limit of `seconds`.
    hard_deadline: Deadline = field(default_factory=Deadline)
    # Whether the search waits beyond `seconds` for all configs of its first submission, two for each builder process,
    # and not only for the first config.
    waits_for_first_trials: bool = True

    def __post_init__(self) -> None:
        if self.verify not in VERIFICATION_MODES:
            raise TuningError(f"verify={quote(self.verify)}: expected one of {', '.join(VERIFICATION_MODES)}")
        for name in ("trials", "seconds", "patience", "workers"):
            value = getattr(self, name)
            if value is None:
                continue
            if _is_number(value) and not value > 0:
                raise TuningError(f"{name} has to be positive, not {value}")
            if name == "seconds" and not (_is_number(value) and value < math.inf):
                raise TuningError(f"seconds has to be a finite number, not {quote(value)}")
            if name != "seconds" and not (_is_integer(value) and value <= MAX_COUNT):
                raise TuningError(f"{name} has to be an integer of at most {MAX_COUNT}, not {quote(value)}")
        if not (_is_integer(self.seed) and self.seed >= 0):
            raise TuningError(f"seed has to be an integer that is not negative, not {quote(self.seed)}")
        if not isinstance(self.log, (str, os.PathLike)):
            raise TuningError(f"log has to be the path of a file, not {quote(self.log)}")
        if not isinstance(self.transfer_logs, (str, os.PathLike, Iterable)):
            raise TuningError(f"transfer_logs has to be the path of a log, or several, not {quote(self.transfer_logs)}")
        if not isinstance(self.transfer_logs, (str, os.PathLike)):  # a search iterates over the logs more than once
            object.__setattr__(self, "transfer_logs", tuple(self.transfer_logs))

    def check_tuner(self) -> None:
        """Check that the tuner exists and supports the options."""
        can_transfer = issubclass(tuners.find_tuner(self.tuner), BayesianTuner)
        if list_log_files(self.transfer_logs) and not can_transfer:
            raise TuningError(f"tuner {self.tuner} does not learn from other workloads: expected gp")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
