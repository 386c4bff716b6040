"""Where a search stands, counted record by record."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from tvmconv.logs.record import ErrorKind, Record

RATE_SECONDS = 20.0  # over how long the rate is taken


@dataclass
class Status:
    """Where a search stands.

    Attributes:
        asked: how many records there will be in the end, earlier ones included; None where only time ends it.
        seconds: how long it may take, earlier sessions included; None where only the number of records ends it.
        done: records there are, earlier ones included.
        resumed: of these, those of earlier sessions.
        elapsed: seconds that it took, earlier sessions included.
        best: the fastest record; None before one succeeded.
        reference: the record of the naive schedule, if it was measured.
        errors: how many records failed, by kind.
        messages: how many records failed, by message.
        since_best: records since the best one.
    """

    asked: int | None
    seconds: float | None
    done: int = 0
    resumed: int = 0
    elapsed: float = 0.0
    best: Record | None = None
    reference: Record | None = None
    errors: Counter[ErrorKind] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    since_best: int = 0
    _arrivals: deque[float] = field(default_factory=deque)  # `elapsed` when each of the latest records came in

    def __repr__(self) -> str:
        asked = f" of {self.asked}" if self.asked is not None else ""
        best = f", best {self.best.cost * 1e6:.4g} µs by {self.best.schedule}" if self.best else ""
        failed = f", {self.errors.total()} failed" if self.errors else ""
        return f"<Status {self.done}{asked} configs in {self.elapsed:.1f} s{failed}{best}>"

    def count(self, record: Record, *, earlier: bool = False) -> None:
        """Take notice of a record, perhaps of an earlier session."""
        self.done += 1
        self.since_best += 1
        if not record.ok:
            self.errors[record.error] += 1
            self.messages[record.message] += 1
        elif self.best is None or record.cost < self.best.cost:
            self.best, self.since_best = record, 0
        if earlier:
            self.resumed += 1
            self.elapsed = max(self.elapsed, record.elapsed or 0.0)
        else:
            self._arrivals.append(self.elapsed)
            while self._arrivals[0] < self.elapsed - RATE_SECONDS:
                self._arrivals.popleft()

    @property
    def rate(self) -> float:
        """Records a second, of late; 0 before there are any."""
        if len(self._arrivals) < 2 or self._arrivals[0] == self.elapsed:
            return 0.0
        return (len(self._arrivals) - 1) / (self.elapsed - self._arrivals[0])

    @property
    def seconds_left(self) -> float | None:
        """How long it will go on at this rate, at most; None where that is not known."""
        by_time = math.inf if self.seconds is None else self.seconds - self.elapsed
        by_count = (self.asked - self.done) / self.rate if self.asked is not None and self.rate else math.inf
        left = min(by_time, by_count)
        return max(left, 0.0) if math.isfinite(left) else None

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the naive schedule the best record is; None where one of them is missing."""
        if self.best is None or self.reference is None or not self.reference.ok:
            return None
        return self.reference.cost / self.best.cost
