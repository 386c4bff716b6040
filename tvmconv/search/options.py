"""The options of a search, which do not depend on the workload, the schedules and the device."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tvmconv.deadline import Deadline
from tvmconv.errors import TuningError
from tvmconv.logs.ranking import list_log_files
from tvmconv.measure.results import NUM_FINALISTS
from tvmconv.search import tuners
from tvmconv.search.tuners.bayesian import BayesianTuner
from tvmconv.space import Config
from tvmconv.verification import VERIFICATION_MODES
from tvmconv.workloads.text import quote

MAX_COUNT = 2**31 - 1


@dataclass(frozen=True)
class TuneOptions:
    """The options of a search; `tvmconv.search.tune.tune` describes those that are not described here."""

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
    started_at: float | None = None  # `time.monotonic` from which `seconds` counts; by default, that of the search
    verify: str = "auto"
    hard_deadline: Deadline = field(default_factory=Deadline)  # cuts off the search in any state, besides `seconds`
    # Whether the search waits beyond `seconds` for all configs of its first submission, two for each builder process,
    # and not only for the first ones, as many as half of the builder processes.
    waits_for_first_trials: bool = True
    max_finalists: int = NUM_FINALISTS  # number of fastest configs that are timed again at the end
    # Whether `seconds` counts from the time at which a builder process is ready, instead of from `started_at`.
    counts_from_ready_workers: bool = False
    first_configs: Sequence[tuple[str, Config]] = ()  # names of schedules and configs that are proposed before others

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
