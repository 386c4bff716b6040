"""The result of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from html import escape

from tvmconv.html import make_html_properties
from tvmconv.logs.record import Record
from tvmconv.measure.pipeline import MeasureCandidate
from tvmconv.search.progress import SearchProgress
from tvmconv.space import format_value


class SkippedPhase(Enum):
    """A phase that a search skipped for lack of time."""

    SEARCH = "search"
    BASELINE = "comparison with the naive schedule"
    FINAL_MEASUREMENTS = "last timings"


@dataclass(frozen=True)
class TuneResult:
    """The result of a search.

    Attributes:
        status: Status at the end; its best record is the fastest trial of the search.
        final: Best record of the log by the rule of `tvmconv.logs.ranking`: a final timing on fresh inputs if there is
            one, else the median trial; None if no config succeeded. If schedules were named, only their records count.
        phases: Mean milliseconds per trial of each phase in this session; empty if the session measured no config.
        seconds: Seconds from the first config to the last record of this session.
        reference: Record of the naive schedule that `final` is compared with: of the same final run if there is one,
            else its trial; None if it was not measured.
        omitted: Phases that were skipped for lack of time.
        built: Fastest configs, with the kernels that this session built.

    Examples:
        >>> import tvmconv as tc
        >>> result = tc.tune("conv2d:1x8x8x8,8x8x3x3,s1,p1", "direct", trials=4, log="my.jsonl")  # doctest: +SKIP
        >>> result.final.config, result.cost, result.speedup  # doctest: +SKIP
        >>> progress = tc.SearchProgress(max_trials=4, max_seconds=None)
        >>> tc.TuneResult(progress, final=None, phases={}, seconds=0.0).cost
        inf
    """

    status: SearchProgress
    final: Record | None
    phases: dict[str, float]
    seconds: float
    reference: Record | None = None
    omitted: frozenset[SkippedPhase] = frozenset()
    built: Sequence[MeasureCandidate] = field(default=(), repr=False)

    @property
    def speedup(self) -> float | None:
        """Time of the naive schedule divided by that of `final`; None if one of them is missing."""
        if self.final is None or self.reference is None or not self.reference.ok:
            return None
        return self.reference.cost / self.final.cost

    def __repr__(self) -> str:
        record = self.final or self.status.best
        if not record:
            return f"<TuneResult no config succeeded: {self.status}>"
        return f"<TuneResult {record.workload} by {record.schedule}: {record.cost * 1e6:.4g} µs, {self.status}>"

    def _repr_html_(self) -> str:
        best, reference = self.final or self.status.best, self.reference
        if best is None:
            return f"<pre>{escape(repr(self))}</pre>"
        values = {
            "schedule": best.schedule,
            "config": " ".join(f"{name}={format_value(value)}" for name, value in best.config.items()),
            "time": f"{best.cost * 1e6:,.4g} µs, {best.gflops:,.4g} GFLOP/s"
            + ("" if self.final else "; the median of its trials"),
            f"× {reference.schedule if reference else 'baseline'}": f"{self.speedup:.3g}" if self.speedup else "",
            "device": best.device,
            "configs": f"{self.status.num_trials:,}, {self.status.error_counts.total():,} of them failed",
        }
        return make_html_properties(best.workload.text, values)

    @property
    def stages(self) -> dict[str, float]:
        """`phases` under its name of version 0.1."""
        return self.phases

    @property
    def cost(self) -> float:
        """Seconds per launch of `final`; `math.inf` if no config succeeded."""
        return self.final.cost if self.final else math.inf


Tuned = TuneResult  # the former name
