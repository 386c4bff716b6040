"""The status of a search, updated record by record."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from tvmconv.logs.record import ErrorKind, Record

RATE_SECONDS = 20.0  # window of time over which the rate is measured


@dataclass
class SearchProgress:
    """The status of a search.

    Attributes:
        max_trials: Limit of records, those of earlier sessions included; None without a limit.
        max_seconds: Limit of time in seconds, earlier sessions included; None without a limit.
        num_trials: Number of records, those of earlier sessions included.
        num_resumed: Number of records of earlier sessions.
        elapsed_seconds: Seconds that the search has taken, earlier sessions included.
        best: Fastest record; None before a config succeeded.
        reference: Record of the naive schedule, if it was measured.
        error_counts: Number of failed records by kind of error.
        message_counts: Number of failed records by error message.
        trials_since_best: Number of records since the best one.

    Examples:
        >>> import tvmconv as tc
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> progress = tc.SearchProgress(max_trials=64, max_seconds=None)
        >>> progress.count_record(tc.Record(w, "tiling", {}, "NVIDIA H200", "cuda", times=(2e-6,)))
        >>> progress.num_trials, progress.best.cost
        (1, 2e-06)
    """

    max_trials: int | None
    max_seconds: float | None
    num_trials: int = 0
    num_resumed: int = 0
    elapsed_seconds: float = 0.0
    best: Record | None = None
    reference: Record | None = None
    error_counts: Counter[ErrorKind] = field(default_factory=Counter)
    message_counts: Counter[str] = field(default_factory=Counter)
    trials_since_best: int = 0
    # `elapsed_seconds` at the arrival of each record of the last `RATE_SECONDS`.
    _arrival_seconds: deque[float] = field(default_factory=deque)

    def __repr__(self) -> str:
        max_text = f" of {self.max_trials}" if self.max_trials is not None else ""
        best_text = f", best {self.best.cost * 1e6:.4g} µs by {self.best.schedule}" if self.best else ""
        failed_text = f", {self.error_counts.total()} failed" if self.error_counts else ""
        counts_text = f"{self.num_trials}{max_text} configs in {self.elapsed_seconds:.1f} s"
        return f"<SearchProgress {counts_text}{failed_text}{best_text}>"

    def count_record(self, record: Record, *, is_resumed: bool = False) -> None:
        """Count a record.

        Args:
            record: Record of the searched workload.
            is_resumed: Whether the record is of an earlier session.
        """
        self.num_trials += 1
        self.trials_since_best += 1
        if not record.ok:
            self.error_counts[record.error] += 1
            self.message_counts[record.message] += 1
        elif self.best is None or record.cost < self.best.cost:
            self.best, self.trials_since_best = record, 0
        if is_resumed:
            self.num_resumed += 1
            self.elapsed_seconds = max(self.elapsed_seconds, record.elapsed or 0.0)
        else:
            self._arrival_seconds.append(self.elapsed_seconds)
            while self._arrival_seconds[0] < self.elapsed_seconds - RATE_SECONDS:
                self._arrival_seconds.popleft()

    @property
    def trials_per_second(self) -> float:
        """Records per second in the last `RATE_SECONDS`; 0 before there are two records."""
        if len(self._arrival_seconds) < 2 or self._arrival_seconds[0] == self.elapsed_seconds:
            return 0.0
        return (len(self._arrival_seconds) - 1) / (self.elapsed_seconds - self._arrival_seconds[0])

    @property
    def remaining_seconds(self) -> float | None:
        """Upper limit of the remaining seconds at the present rate; None if it is not known."""
        seconds_by_time = math.inf if self.max_seconds is None else self.max_seconds - self.elapsed_seconds
        seconds_by_trials = (
            (self.max_trials - self.num_trials) / self.trials_per_second
            if self.max_trials is not None and self.trials_per_second
            else math.inf
        )
        remaining = min(seconds_by_time, seconds_by_trials)
        return max(remaining, 0.0) if math.isfinite(remaining) else None

    @property
    def speedup(self) -> float | None:
        """Time of the naive schedule divided by that of the best record; None if one of them is missing."""
        if self.best is None or self.reference is None or not self.reference.ok:
            return None
        return self.reference.cost / self.best.cost


Status = SearchProgress  # the former name
