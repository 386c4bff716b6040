"""How well a kernel's bounds, counted from its code, tell how long it takes: beside measured records of a log.

    python scripts/bound_agreement.py tuning_logs/*/*.jsonl.gz --schedule direct -o results \
        --workload conv2d:1x128x40x40,128x128x3x3,s1,p1 --workload conv2d:1x64x80x80,64x64x3x3,s1,p1

Of each workload so many configs are drawn, evenly over those that were measured, and built for the architecture of the
log's device. Writes DIR/bounds-SCHEDULE.json, .md and .png.
"""

from __future__ import annotations

import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvmconv as tc
from tvmconv.analysis.bounds import Bound, bounds
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.knowledge.features import Machine
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table, significant
from tvmconv.training import machine_of, measured
from tvmconv.version import VERSION

BEST = 0.1  # the share of the configs of which the fastest is looked for, and how near it has to be


def main(argv: Sequence[str] | None = None) -> int:
    """Build, count, print and write."""
    return guarded("bound_agreement", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="bound_agreement", description="How well bounds tell how long kernels take.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="also .gz")
    parser.add_argument("--workload", action="append", default=[], metavar="W", help="may be given several times")
    parser.add_argument("--schedule", default="direct", metavar="S", help="(default: %(default)s)")
    parser.add_argument("--configs", type=count, default=150, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)
    records: dict[str, list[Record]] = {tc.parse(text).text: [] for text in args.workload}
    for log in args.logs:
        for record in measured(log):
            if record.workload.text in records and record.schedule == args.schedule and record.ok:
                records[record.workload.text].append(record)
    for text in [text for text, own in records.items() if not own] or ([] if records else ["no workload"]):
        raise UsageError(f"the logs have no records of {args.schedule} for {text}")
    machine = machine_of(next(own[0] for own in records.values() if own))
    points: dict[str, list[dict[str, Any]]] = {}
    with progress_line("bounds: ") as show:
        for text, own in records.items():
            random.Random(0).shuffle(own)
            points[text] = []
            for record in own:
                if len(points[text]) == args.configs:
                    break
                show(f"{text}: {len(points[text])} of {args.configs}")
                points[text] += _point(record, machine)
    note = f"{machine.name}; tvmconv {VERSION}; `{shlex.join(['python', 'scripts/bound_agreement.py', *argv])}`"
    table = _table(points)
    print("\n".join([table.text(), note]))
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"bounds-{args.schedule}"
    text = json.dumps({"name": name, "provenance": note, "points": points}, ensure_ascii=False)
    (args.out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    (args.out / f"{name}.md").write_text(f"# {name}\n\n{table.markdown()}\n\n{note}\n", encoding="utf-8")
    _draw(points, args.out / f"{name}.png")
    return 0


def _point(record: Record, machine: Machine) -> list[dict[str, Any]]:
    """What is counted of a record's kernel, and what it took; nothing where it cannot be built or counted any more."""
    try:
        kernel = tc.build(record.workload, record.schedule, arch=machine.arch, config=record.config)
        units = bounds(kernel, machine)
        share = occupancy_of(kernel).share
    except Error:
        return []
    told = {unit.unit: unit.seconds for unit in units}
    return [{"measured": record.cost, "least": _least(units), "units": told, "occupancy": share}]


def _least(units: Sequence[Bound]) -> float:
    return max(unit.seconds for unit in units)


def _table(points: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for text, own in points.items():
        if not own:  # none can be built any more
            continue
        took, least = (np.array([each[name] for each in own]) for name in ("measured", "least"))
        first = np.argsort(least, kind="stable")[: max(1, round(BEST * len(own)))]
        rows.append(
            (text, str(len(own)), significant(_spearman(took, least)), significant(took.min() / took[first].min()))
        )
    headers = ("workload", "configs", "rank correlation", "best of the first tenth")
    return Table(headers, rows, left=frozenset({"workload"}))


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def _draw(points: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.8), layout="constrained")
    for text, own in points.items():
        took, least = (np.array([each[name] for each in own]) * 1e6 for name in ("measured", "least"))
        axes.scatter(least, took, s=8, alpha=0.6, label=text)
    axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="at least, by the code [µs]", ylabel="measured [µs]")
    axes.legend(fontsize=7)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
