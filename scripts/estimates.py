"""How well the estimates of schedules, formulas over their tiles, tell how long kernels take: beside measured records.

    python scripts/estimates.py tuning_logs/sampled/*.jsonl.gz -o tuning_logs/nvidia-h200/estimates.md

Of each layer, the configs of a schedule that were measured on one device; nothing is built.
"""

from __future__ import annotations

import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from tvmconv import gpu, library
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count
from tvmconv.errors import KnobError, ScheduleError
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table, significant
from tvmconv.training import measured
from tvmconv.version import VERSION
from tvmconv.workloads import Workload

BEST = 0.1  # the share of the configs of which the fastest is looked for
LEGEND = (
    "Of each layer, Spearman's rank correlation ρ of estimated and measured times, and how many times as long as the "
    "fastest config the fastest of the tenth takes that is estimated to be. Least, median, most: over the layers."
)

Costs = dict[tuple[tuple[str, object], ...], float]  # of configs, in seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Read, print, and write."""
    return guarded("estimates", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="estimates", description="How well schedules' estimates tell how long kernels take.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="also .gz")
    parser.add_argument(
        "--least", type=count, default=30, metavar="N", help="configs of a layer (default: %(default)s)"
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="FILE", help="write the table to this page")
    args = parser.parse_args(argv)
    table = _table(_layers(record for log in args.logs for record in measured(log)), args.least)
    if not table.rows:
        raise UsageError(f"no layer has {args.least} configs of a schedule that estimates")
    print(table.text())
    if args.out:
        command = f"tvmconv {VERSION}, `{shlex.join(['python', 'scripts/estimates.py', *argv])}`"
        args.out.write_text(f"{table.markdown()}\n\n{LEGEND}\n\n{command}\n", encoding="utf-8")
    return 0


def _layers(records: Iterable[Record]) -> Mapping[tuple[str, str, Workload], Costs]:
    """The configs that were measured, by schedule, device and layer."""
    found: dict[tuple[str, str, Workload], Costs] = defaultdict(dict)
    for record in records:
        own = found[record.schedule, record.device, record.workload]
        config = tuple(sorted(record.config.items(), key=lambda item: item[0]))
        own[config] = min(record.cost, own.get(config, record.cost))
    return found


def _table(layers: Mapping[tuple[str, str, Workload], Costs], least: int) -> Table:
    """A line a schedule and device."""
    agreements: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for (name, device, workload), costs in layers.items():
        if len(costs) >= least and (agreement := _agreement(name, workload, costs, least)):
            agreements[name, device].append(agreement)
    rows = []
    for (name, device), found in sorted(agreements.items()):
        configs, correlations, times = zip(*found, strict=True)
        counts = (f"{len(found)}", f"{sum(configs):,}")
        rows.append((name, device, *counts, *map(_three, (correlations, times))))
    headers = ("schedule", "device", "layers", "configs", "ρ: least, median, most", "best tenth: least, median, most")
    return Table(headers, rows, left=frozenset({"schedule", "device"}))


def _agreement(name: str, workload: Workload, costs: Costs, least: int) -> tuple[int, float, float] | None:
    """How many configs a layer has, the correlation, and how much longer the best of the first tenth takes."""
    from scipy.stats import spearmanr

    try:
        space = library.find(workload, name).space(workload, gpu.limits("sm_90"))
    except ScheduleError:
        return None
    points, took = [], []
    for config, seconds in costs.items():
        try:
            points.append(space.point(dict(config)))
        except KnobError:  # no longer searched
            continue
        took.append(seconds)
    usage = space.usage(np.stack(points)) if len(points) >= least else None
    if usage is None or usage.estimate is None:
        return None
    first = np.argsort(usage.estimate, kind="stable")[: max(1, round(BEST * len(took)))]
    return len(took), float(spearmanr(usage.estimate, took).statistic), min(took[i] for i in first) / min(took)


def _three(values: Sequence[float]) -> str:
    return " ".join(
        significant(value) if value > 0 else f"{value:.3f}" for value in np.percentile(values, [0, 50, 100])
    )


if __name__ == "__main__":
    sys.exit(main())
