r"""Compare the predicted times and the lower bounds of the units, from the code of kernels, with measured records.

    tvmconv bench bounds tuning_logs/*/*.jsonl.gz --schedule direct -o results \
        --workload conv2d:1x128x40x40,128x128x3x3,s1,p1 --validation-workload conv2d:1x256x20x20,256x256x3x3,s1,p1
    tvmconv bench bounds --from results/bounds-direct.json -o results

For each workload, N random measured configs are built for the architecture of the log's device. The table compares the
largest lower bound of the units (tvmconv.analysis.speed_of_light) and the predicted time
(tvmconv.analysis.predicted_time) with the measured times. The only fitted constant, `OVERLAP_EXPONENT`, is fitted to
the workloads of --workload, not to those of --validation-workload, and the fit is printed. Results are in
bounds-SCHEDULE.json, .md and .png. The JSON has all counts, so that --from does not build kernels.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvmconv as tc
from tvmconv.analysis.kernel_work import KernelWork, count_kernel_work
from tvmconv.analysis.occupancy import compute_kernel_occupancy
from tvmconv.analysis.predicted_time import OVERLAP_EXPONENT, predict_time
from tvmconv.analysis.speed_of_light import compute_unit_times
from tvmconv.benchmarks.common import add_output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.options import add_page, add_renamed_option, parse_count, update_page
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.logs.lines import translate_os_errors
from tvmconv.logs.record import Record
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant
from tvmconv.target import Target
from tvmconv.training import find_record_device_spec, read_valid_records
from tvmconv.version import VERSION

BEST = 0.1  # fraction of the configs with the best estimates, whose fastest one is compared
LEGEND = (
    "ρ: Spearman's rank correlation with the measured times, of the largest lower bound and of the predicted time. "
    "Best: time of the fastest config divided by that of the fastest one in the tenth with the best estimates. The "
    "last column has the quartiles of measured over predicted time."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="Tuning logs, also .gz.")
    parser.add_argument(
        "--workload", action="append", default=[], metavar="W", help="Workload that the overlap exponent is fitted to."
    )
    add_renamed_option(
        parser,
        "--validation-workload",
        "--held-out",
        action="append",
        default=[],
        metavar="W",
        help="Workload excluded from the fit.",
    )
    parser.add_argument("--schedule", default="direct", metavar="S", help="Schedule (default: %(default)s).")
    parser.add_argument(
        "--configs",
        type=parse_count,
        default=150,
        metavar="N",
        help="Number of configs of each workload (default: %(default)s).",
    )
    add_renamed_option(
        parser,
        "--validation-configs",
        "--held-configs",
        type=parse_count,
        default=50,
        metavar="N",
        help="Number of configs of each validation workload (default: %(default)s).",
    )
    parser.add_argument(
        "--from", "--again", dest="file", type=Path, metavar="FILE", help="File bounds-SCHEDULE.json to read, not logs."
    )
    add_page(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Build and count the kernels or read a file, then print and write the table."""
    found = _again(args.file) if args.file else _counted(args)
    found["provenance"] = found.get("provenance") or f"tvmconv {VERSION}; `{args.command}`"
    machine = Target(**found["machine"])
    for point in (point for own in found["points"].values() for point in own):
        point["predicted"] = _predicted(point, machine, OVERLAP_EXPONENT)
    fitted = {text: own for text, own in found["points"].items() if text not in found["held_out"]}
    held = [point for text in found["held_out"] for point in found["points"][text]]
    table = _table(found["points"], found["held_out"])
    note = f"{machine.name}; {found['provenance']}"
    if fitted:
        best_fit = format_significant(_overlap(fitted, machine))
        note += f"; the best fit of the overlap exponent is {best_fit}, its value in use is {OVERLAP_EXPONENT}"
    if found["held_out"]:
        note += f"; the quartiles of measured over predicted held-out times are {_quartiles(held)}"
    print("\n".join([table.format_text(), note]))
    args.out.mkdir(parents=True, exist_ok=True)
    name = found["name"]
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    (args.out / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    section = f"{table.format_markdown()}\n\n{LEGEND}"
    (args.out / f"{name}.md").write_text(f"# {name}\n\n{section}\n\n{note}\n", encoding="utf-8")
    _draw(found["points"], args.out / f"{name}.png")
    update_page(args.page, name, section)
    return 0


def _again(file: Path) -> dict[str, Any]:
    """Read the file of an earlier run."""
    with translate_os_errors(file, "read"):
        found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or not {"machine", "points", "held_out", "name"} <= set(found):
        raise UsageError(f"{file} was not written by tvmconv bench bounds")
    return found


def _counted(args: argparse.Namespace) -> dict[str, Any]:
    """Build the kernels of the workloads' records, and return their counts."""
    wanted = {tc.parse(text).text: args.configs for text in args.workload}
    held = {tc.parse(text).text: args.validation_configs for text in args.validation_workload}
    records: dict[str, dict[str, Record]] = {text: {} for text in (*wanted, *held)}
    for log in args.logs:
        for record in read_valid_records(log):
            if record.workload.text in records and record.schedule == args.schedule and record.ok:
                records[record.workload.text][record.identity[-1]] = record
    for text in [text for text, own in records.items() if not own] or ([] if records else ["no workload"]):
        raise UsageError(f"the logs have no records of {args.schedule} for {text}")
    machine = find_record_device_spec(next(iter(next(iter(records.values())).values())))
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
    machine_numbers = machine.to_json()
    return {"name": f"bounds-{args.schedule}", "machine": machine_numbers, "held_out": sorted(held), "points": points}


def _point(record: Record, machine: Target) -> list[dict[str, Any]]:
    """Return a record's time and the counts of its kernel; an empty list if it cannot be built or counted."""
    try:
        kernel = tc.build(record.workload, record.schedule, arch=machine.arch, config=record.config)
        units = compute_unit_times(kernel, machine)
        steps = [step.to_json() for step in count_kernel_work(kernel)]
        share = compute_kernel_occupancy(kernel).warp_fraction
    except Error:
        return []
    seconds = {unit.unit: round(unit.seconds, 9) for unit in units}
    least = max(seconds.values())
    return [{"measured": record.cost, "least": least, "units": seconds, "occupancy": share, "steps": steps}]


def _predicted(point: dict[str, Any], machine: Target, overlap: float) -> float:
    steps = [KernelWork(**step) for step in point["steps"]]
    return round(predict_time(steps, machine, overlap).seconds, 9)


def _overlap(points: dict[str, list[dict[str, Any]]], machine: Target) -> float:
    """Return the exponent with the smallest mean square of the logarithm of measured over predicted time."""

    def error(overlap: float) -> float:
        pairs = [(each["measured"], _predicted(each, machine, overlap)) for own in points.values() for each in own]
        measured, predicted = np.array(pairs).T
        return float(np.mean(np.log(measured / predicted) ** 2))

    return min(np.arange(1.0, 4.05, 0.1), key=error)


def _table(points: dict[str, list[dict[str, Any]]], held: Sequence[str]) -> Table:
    rows = []
    for text, own in points.items():
        if not own:  # no config builds any longer
            continue
        times, *estimates = (np.array([each[name] for each in own]) for name in ("measured", "least", "predicted"))
        agreements = [cell for estimate in estimates for cell in _agreement(times, estimate)]
        rows.append((f"{text}{' (held out)' * (text in held)}", str(len(own)), *agreements, _quartiles(own)))
    headers = ("workload", "configs", "least ρ", "least best", "predicted ρ", "predicted best", "measured / predicted")
    return Table(headers, rows, left_aligned=frozenset({"workload"}))


def _quartiles(points: Sequence[dict[str, Any]]) -> str:
    """Return the quartiles of measured over predicted."""
    ratios = [point["measured"] / point["predicted"] for point in points]
    return " ".join(map(format_significant, np.percentile(ratios, [25, 50, 75]))) if ratios else EMPTY_CELL


def _agreement(times: np.ndarray, estimates: np.ndarray) -> tuple[str, str]:
    """Return Spearman's rank correlation, and the relative throughput of the best config in the first tenth.

    Ties have their mean rank. There is no correlation if all estimates are equal.
    """
    from scipy.stats import spearmanr

    first = np.argsort(estimates, kind="stable")[: max(1, round(BEST * len(estimates)))]
    best = format_significant(float(times.min() / times[first].min()))
    return (format_significant(float(spearmanr(times, estimates).statistic)) if np.ptp(estimates) else EMPTY_CELL), best


def _draw(points: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(1, 2, figsize=(10.8, 5.2), layout="constrained", sharey=True)
    for axes, name, title in zip(plots, ("least", "predicted"), ("the longest least time", "predicted"), strict=True):
        for text, own in points.items():
            times, estimates = (np.array([each[key] for each in own]) * 1e6 for key in ("measured", name))
            axes.scatter(estimates, times, s=7, alpha=0.6, label=text if axes is plots[0] else None)
        axes.axline((1, 1), (10, 10), color="grey", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=f"{title}, by the code [µs]")
    plots[0].set_ylabel("measured [µs]")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(file, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
