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
    """The options of a search.

    Attributes:
        tuner: Search algorithm: "gp", "ga", "random" or "grid".
        trials: Number of records of all schedules, those in the log included. The default is
            `tvmconv.search.search.DEFAULT_MAX_TRIALS` without `seconds`, else no limit.
        seconds: Time limit in seconds of wall-clock time, with final timings and earlier sessions included; see
            `tvmconv.deadline`.
        log: File of records that is read first and then appended to.
        seed: Seed of the tuner, not negative.
        patience: Number of consecutive records without improvement after which the search ends.
        transfer_logs: Logs, or folders of logs, of other workloads that the gp tuner also learns from.
        workers: Number of builder processes. The default is the number of processors minus one.
        measure_baseline: Whether the naive schedule is measured once, if the log does not have it and a launch takes
            at most one second (`tvmconv.naive_cost`).
        remeasure_best: Whether the fastest configs are measured again at the end, on fresh inputs.
        started_at: Value of `time.monotonic` from which `seconds` counts. The default is the call of the search.
        verify: Outputs of a kernel that are verified, one of `tvmconv.verification.VERIFICATION_MODES`.
        hard_deadline: Time at which the search is cut off in any state, in addition to the limit of `seconds`.
        waits_for_first_trials: Whether the search waits beyond `seconds` for all configs of its first submission, two
            for each builder process, and not only for the first config.

    Raises:
        TuningError: A value is out of its range, or has the wrong type.
    """

    tuner: str = "gp"
    trials: int | None = None
    seconds: float | None = None
    log: str | os.PathLike[str] = "tuning.jsonl"
    seed: int = 0
    patience: int | None = None
    transfer_logs: Iterable[str | os.PathLike[str]] = ()
    workers: int | None = None
    measure_baseline: bool = True
    remeasure_best: bool = True
    started_at: float | None = None
    verify: str = "auto"
    hard_deadline: Deadline = field(default_factory=Deadline)
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
        """Check that the tuner exists and supports the options.

        Raises:
            TunerError: There is no such tuner.
            TuningError: `transfer_logs` has logs, but the tuner does not learn from other workloads.
            Error: A log of `transfer_logs` does not exist.
        """
        can_transfer = issubclass(tuners.find_tuner(self.tuner), BayesianTuner)
        if list_log_files(self.transfer_logs) and not can_transfer:
            raise TuningError(f"tuner {self.tuner} does not learn from other workloads: expected gp")


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
