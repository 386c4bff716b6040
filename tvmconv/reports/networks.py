"""Networks side by side: what each takes with our kernels and with a library's, in every dtype, layout and batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tvmconv.experiments.run import TUNED
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.suite import Total, suite_info
from tvmconv.reports.tables import NOTHING, Table, significant
from tvmconv.workloads import Conv, dtypes

MIXED = "mixed"


@dataclass(frozen=True)
class Kind:
    """What all convolutions of a network have in common, as workloads' texts have it; `MIXED` where they differ.

    Attributes:
        dtype: such as `f16`.
        layout: such as `nhwc`.
        batch: images at a time.
    """

    dtype: str
    layout: str
    batch: str


def networks(sweeps: Sequence[Sweep]) -> Table:
    """One line a network and library, by name, dtype, layout and batch; filters, which are no network, are left out."""
    lines = []
    for sweep in sweeps:
        info = suite_info("", sweep)
        if info and all(isinstance(result.workload, Conv) for result in sweep.results):
            kind = kind_of(sweep)
            for total in info.totals:
                lines.append((order(sweep, kind), _line(suite_name(sweep, kind), kind, total)))
    lines.sort(key=lambda line: line[0])
    headers = ("suite", *(each.name for each in fields(Kind)), "beside", "layers", "slower", "× geometric mean")
    times = ("network [µs]", "beside it [µs]", "×")
    return Table(
        (*headers, *times), [line for _, line in lines], left=frozenset({"suite", "dtype", "layout", "beside"})
    )


def _line(name: str, kind: Kind, total: Total) -> tuple[str, ...]:
    layers = str(total.layers), str(total.slower), _shown(total.mean)
    micros = [seconds and seconds * 1e6 for seconds in (total.ours, total.theirs)]
    return (name, kind.dtype, kind.layout, kind.batch, total.name, *layers, *map(_shown, (*micros, total.speedup)))


def _shown(value: float | None) -> str:
    return significant(value) if value else NOTHING


def kind_of(sweep: Sweep) -> Kind:
    """What all its convolutions have in common."""
    workloads: list[Any] = [result.workload for result in sweep.results]  # of operators' dataclasses
    found = (
        {dtypes.DTYPES[w.dtype].text for w in workloads},
        {w.layout for w in workloads},
        {str(w.N) for w in workloads},
    )
    return Kind(*(each.pop() if len(each) == 1 else MIXED for each in found))


def suite_name(sweep: Sweep, kind: Kind) -> str:
    """The sweep's name without what the columns behind it say."""
    said = {TUNED, kind.dtype, kind.layout, f"b{kind.batch}"}
    own, *words = sweep.name.split("-")
    return "-".join([own, *(word for word in words if word not in said)])


def order(sweep: Sweep, kind: Kind) -> tuple[str, int, str, int]:
    """By suite, then from float32 to 16 bits, then by batch; what is mixed comes first."""
    dtype = [*dtypes.BY_TEXT].index(kind.dtype) if kind.dtype != MIXED else -1
    return suite_name(sweep, kind), dtype, kind.layout, int(kind.batch) if kind.batch != MIXED else 0
