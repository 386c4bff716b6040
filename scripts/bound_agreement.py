"""How well what is counted of a kernel's code tells how long it takes: beside measured records of a log.

    python scripts/bound_agreement.py tuning_logs/*/*.jsonl.gz --schedule direct -o results \
        --workload conv2d:1x128x40x40,128x128x3x3,s1,p1 --held-out conv2d:1x256x20x20,256x256x3x3,s1,p1
    python scripts/bound_agreement.py --again results/bounds-direct.json -o results

Of each workload so many configs are drawn, evenly over those that were measured, and built for the architecture of the
log's device. Beside their times stand the longest of the units' least times (tvmconv.analysis.bounds) and the predicted
time (tvmconv.analysis.predicted_time). The one constant of this that is fitted, `OVERLAP`, is fitted on the workloads
given by --workload and on none of those by --held-out; the script prints what it finds. Writes to the directory
bounds-SCHEDULE.json, .md and .png; the first of these has all counts, so that with --again nothing needs to be built.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvmconv as tc
from tvmconv.analysis.bounds import bounds
from tvmconv.analysis.occupancy import occupancy_of
from tvmconv.analysis.predicted_time import OVERLAP, predict
from tvmconv.analysis.work import Work, work
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.knowledge.features import Machine
from tvmconv.logs.lines import in_one_line
from tvmconv.logs.record import Record
from tvmconv.reports.tables import NOTHING, Table, significant, with_section
from tvmconv.training import machine_of, measured
from tvmconv.version import VERSION

BEST = 0.1  # the share of the configs of which the fastest is looked for
LEGEND = (
    "ρ: Spearman's rank correlation with the measured times, of the longest least time and of the predicted time. "
    "Best: the fastest of all configs over the fastest of the tenth that is told to be fastest. Last the quartiles of "
    "measured over predicted."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Build, count, print and write."""
    return guarded("bound_agreement", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="bound_agreement", description="How well what is counted tells how long kernels take.")
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="also .gz")
    parser.add_argument("--workload", action="append", default=[], metavar="W", help="may be given several times")
    parser.add_argument("--held-out", action="append", default=[], metavar="W", help="on which nothing is fitted")
    parser.add_argument("--schedule", default="direct", metavar="S", help="(default: %(default)s)")
    parser.add_argument("--configs", type=count, default=150, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--held-configs", type=count, default=50, metavar="N", help="of those (default: %(default)s)")
    parser.add_argument("--again", type=Path, metavar="FILE", help="what an earlier run counted, in place of logs")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers, too")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    args = parser.parse_args(argv)
    found = _again(args.again) if args.again else _counted(args)
    found["provenance"] = found.get("provenance") or f"tvmconv {VERSION}; `{_command(argv)}`"
    machine = Machine(**found["machine"])
    for point in (point for own in found["points"].values() for point in own):
        point["predicted"] = _predicted(point, machine, OVERLAP)
    fitted = {text: own for text, own in found["points"].items() if text not in found["held_out"]}
    held = [point for text in found["held_out"] for point in found["points"][text]]
    table = _table(found["points"], found["held_out"])
    note = f"{machine.name}; {found['provenance']}"
    if fitted:
        note += f"; the overlap that fits best is {significant(_overlap(fitted, machine))}, in use is {OVERLAP}"
    if found["held_out"]:
        note += f"; the quartiles of measured over predicted held-out times are {_quartiles(held)}"
    print("\n".join([table.text(), note]))
    args.out.mkdir(parents=True, exist_ok=True)
    name = found["name"]
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (args.out / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    (args.out / f"{name}.md").write_text(f"# {name}\n\n{table.markdown()}\n\n{LEGEND}\n\n{note}\n", encoding="utf-8")
    _draw(found["points"], args.out / f"{name}.png")
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, name, f"{table.markdown()}\n\n{LEGEND}"), encoding="utf-8")
    return 0


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["python", "scripts/bound_agreement.py", *argv])


def _again(file: Path) -> dict[str, Any]:
    """What an earlier run wrote."""
    with in_one_line(file, "read"):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not {"machine", "points", "held_out", "name"} <= set(found):
        raise UsageError(f"{file} is not of scripts/bound_agreement.py")
    return found


def _counted(args: argparse.Namespace) -> dict[str, Any]:
    """Build and count."""
    wanted = {tc.parse(text).text: args.configs for text in args.workload}
    held = {tc.parse(text).text: args.held_configs for text in args.held_out}
    records: dict[str, dict[str, Record]] = {text: {} for text in (*wanted, *held)}
    for log in args.logs:
        for record in measured(log):
            if record.workload.text in records and record.schedule == args.schedule and record.ok:
                records[record.workload.text][record.identity[-1]] = record
    for text in [text for text, own in records.items() if not own] or ([] if records else ["no workload"]):
        raise UsageError(f"the logs have no records of {args.schedule} for {text}")
    machine = machine_of(next(iter(next(iter(records.values())).values())))
    points: dict[str, list[dict[str, Any]]] = {}
    with progress_line("bounds: ") as show:
        for text, most in (wanted | held).items():
            own = list(records[text].values())
            random.Random(0).shuffle(own)
            points[text] = []
            for record in own:
                if len(points[text]) == most:
                    break
                show(f"{text}: {len(points[text])} of {most}")
                points[text] += _point(record, machine)
    machine_numbers = dataclasses.asdict(machine)
    return {"name": f"bounds-{args.schedule}", "machine": machine_numbers, "held_out": sorted(held), "points": points}


def _point(record: Record, machine: Machine) -> list[dict[str, Any]]:
    """What is counted of a record's kernel, and what it took; nothing where it cannot be built or counted any more."""
    try:
        kernel = tc.build(record.workload, record.schedule, arch=machine.arch, config=record.config)
        units = bounds(kernel, machine)
        steps = [step.numbers() for step in work(kernel)]
        share = occupancy_of(kernel).share
    except Error:
        return []
    told = {unit.unit: round(unit.seconds, 9) for unit in units}
    least = max(told.values())
    return [{"measured": record.cost, "least": least, "units": told, "occupancy": share, "steps": steps}]


def _predicted(point: dict[str, Any], machine: Machine, overlap: float) -> float:
    steps = [Work(**step) for step in point["steps"]]
    return round(predict(steps, machine, overlap).seconds, 9)


def _overlap(points: dict[str, list[dict[str, Any]]], machine: Machine) -> float:
    """The exponent for which predicted and measured times differ least: the mean square of the logarithm."""

    def error(overlap: float) -> float:
        pairs = [(each["measured"], _predicted(each, machine, overlap)) for own in points.values() for each in own]
        took, told = np.array(pairs).T
        return float(np.mean(np.log(took / told) ** 2))

    return min(np.arange(1.0, 4.05, 0.1), key=error)


def _table(points: dict[str, list[dict[str, Any]]], held: Sequence[str]) -> Table:
    rows = []
    for text, own in points.items():
        if not own:  # none can be built any more
            continue
        took, least, told = (np.array([each[name] for each in own]) for name in ("measured", "least", "predicted"))
        rows.append(
            (
                f"{text}{' (held out)' if text in held else ''}",
                str(len(own)),
                *_agreement(took, least),
                *_agreement(took, told),
                _quartiles(own),
            )
        )
    headers = ("workload", "configs", "least ρ", "least best", "predicted ρ", "predicted best", "measured / predicted")
    return Table(headers, rows, left=frozenset({"workload"}))


def _quartiles(points: Sequence[dict[str, Any]]) -> str:
    """Of measured over predicted."""
    shares = [point["measured"] / point["predicted"] for point in points]
    return " ".join(significant(value) for value in np.percentile(shares, [25, 50, 75])) if shares else NOTHING


def _agreement(took: np.ndarray, told: np.ndarray) -> tuple[str, str]:
    """Spearman's rank correlation, where ties share their mean rank; and the best of the tenth that is told to be.

    There is no correlation where all are told to take the same.
    """
    from scipy.stats import spearmanr

    first = np.argsort(told, kind="stable")[: max(1, round(BEST * len(told)))]
    best = significant(float(took.min() / took[first].min()))
    return (significant(float(spearmanr(took, told).statistic)) if np.ptp(told) else NOTHING), best


def _draw(points: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(10.8, 5.2), layout="constrained", sharey=True)
    for axes, name, title in zip(plots, ("least", "predicted"), ("the longest least time", "predicted"), strict=True):
        for text, own in points.items():
            took, told = (np.array([each[key] for each in own]) * 1e6 for key in ("measured", name))
            axes.scatter(told, took, s=7, alpha=0.6, label=text if axes is plots[0] else None)
        axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"{title}, by the code [µs]")
    plots[0].set_ylabel("measured [µs]")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
