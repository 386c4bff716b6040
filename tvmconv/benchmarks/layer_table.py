"""Make a table of single layers, one line for each workload, from the results of `tvmconv bench tune-suite`.

    tvmconv bench layer-table results/*-tuned.json
    tvmconv bench layer-table results/grouped-tuned.json --section grouped --update-page docs/gradient-measurements.md
    tvmconv bench layer-table tuning_logs/*/gradients/*.json.gz --below 1.0
    tvmconv bench layer-table tuning_logs/*/gradients/*.json.gz --summary
    tvmconv bench layer-table tuning_logs/*/gradients/*.json.gz --networks tuning_logs/gradient-networks.json

The table has the times of the tuned kernel and of each library, their shares of the physical limit, the speed-ups, and
in its last line the geometric means. A workload of several files has the times of the newest run: that of the latest
date, and on one date that of the largest number at the end of the file's name. If files are of several devices, a
column names the device of each time. With --below X, only layers are listed whose speed-up is below X, the slowest
first. With --summary, the table has a line for each kind of layers, which is the name of its files without the word
with which all begin, and without their numbers. With --networks, it has a line for each network of a suite whose layers
are named NETWORK.NUMBER or NETWORK.NUMBER.GRADIENT. Times are those of the measured layers, each as often as the
network has it, and their share is that of the limits of all layers. With --possible as well, the table has the mean
speed-up over each library that kernels at the physical limit would have.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tvmconv.benchmarks.common import show
from tvmconv.cli import options
from tvmconv.cli.errors import UsageError
from tvmconv.errors import Error
from tvmconv.experiments.results import PREDICTED, TUNED, UNTUNED, Result
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.library_comparison import list_compared_names, make_comparison_table
from tvmconv.reports.tables import EMPTY_CELL, Table, format_mean, format_micros, format_optional, sum_seconds
from tvmconv.workloads import Layer, Workload
from tvmconv.workloads.suites import read_suite

SECTION = "layers"
NETWORKS_LEGEND = "Sums over the measured layers, each as often as the network has it, in its newest run."
POSSIBLE_LEGEND = (
    "Possible: the geometric mean if each kernel took as long as its physical limit, at the clock that the library's "
    "kernel held where it was measured, and at least as long as the shortest of all launches. Layers that Winograd's "
    "algorithm computes faster than that count with their own speed-up."
)
DEVICE = "device"  # column of a table of several devices


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="Files NAME-tuned.json.")
    text = f"Section of the page of --update-page that has the table (default: {SECTION})."
    parser.add_argument("--section", default=SECTION, metavar="NAME", help=text)
    lines = parser.add_mutually_exclusive_group()
    lines.add_argument("--summary", action="store_true", help="Print a line for each kind of layers.")
    text = "Print a line for each network of this suite."
    lines.add_argument("--networks", type=Path, metavar="FILE", help=text)
    text = "With --networks: add the mean speed-up over each library that kernels at the physical limit would have."
    parser.add_argument("--possible", action="store_true", help=text)
    text = "List only the layers whose speed-up over a library is below X, without means."
    parser.add_argument("--below", type=options.parse_positive, metavar="X", help=text)
    text = "Name the versions once for all runs on a device."
    parser.add_argument("--short-legend", action="store_true", help=text)
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Read the results, print the table and write it into a page."""
    sweeps = {file: Sweep.read(file) for file in args.files}
    for file, sweep in sweeps.items():
        if not sweep.has_row(TUNED):
            raise UsageError(
                f"{file} has no tuned kernels: expected a file NAME-tuned.json of tvmconv bench tune-suite"
            )
    if args.summary:
        table, legend = make_summary_table(sweeps), "Geometric means of the newest run of each layer."
    elif args.networks:
        results = {result.workload: result for sweep in keep_newest(sweeps) for result in sweep.results}
        table = make_networks_table(results, read_suite(args.networks), shows_possible=args.possible)
        legend = f"{NETWORKS_LEGEND} {POSSIBLE_LEGEND}" if args.possible else NETWORKS_LEGEND
    else:
        newest = keep_newest(sweeps)
        if args.below is not None:
            newest = list_slow_layers(newest, args.below)
        if not newest:
            raise Error(f"no layer has a speed-up below {args.below:g}")
        provenances = list(dict.fromkeys(sweep.provenance for sweep in newest))
        provenance = "\n\n".join(merge_provenances(provenances) if args.short_legend else provenances)
        table, legend = make_layer_table(newest), f"Median times. {provenance}"
        if args.below is not None:
            table = replace(table, rows=table.rows[:-1])  # the means would be of slow layers
    show(table, args, args.section, legend)
    return 0


def keep_newest(sweeps: dict[Path, Sweep]) -> list[Sweep]:
    """Return the sweeps with each workload in its newest run only, without those of which nothing is left."""

    def find_age(file: Path) -> tuple[str, int]:
        dates = re.findall(r"\b\d{4}-\d\d-\d\d\b", sweeps[file].provenance)
        return max(dates, default=""), _split_name(file)[1]

    newest: dict[Workload, Path] = {}
    for file in sorted(sweeps, key=find_age):
        newest |= dict.fromkeys((result.workload for result in sweeps[file].results), file)
    kept = []
    for file, sweep in sweeps.items():
        labeled = [(label, result) for label, result in sweep.labeled_results if newest[result.workload] == file]
        if labeled:
            labels, results = map(list, zip(*labeled, strict=True))
            kept.append(Sweep(sweep.name, labels, results, sweep.provenance))
    return kept


def list_slow_layers(sweeps: Sequence[Sweep], max_speedup: float) -> list[Sweep]:
    """Return a sweep for each layer whose kernel is less than `max_speedup` times as fast as a library, the slowest
    first.
    """
    speedups: list[tuple[float, Sweep]] = []
    for sweep in sweeps:
        for label, result in sweep.labeled_results:
            known = [result.compute_speedup(TUNED, name) or math.inf for name in list_compared_names(sweep)]
            one_layer = Sweep(sweep.name, [label], [result], sweep.provenance)
            speedups.append((min(known, default=math.inf), one_layer))
    return [sweep for speedup, sweep in sorted(speedups, key=lambda pair: pair[0]) if speedup < max_speedup]


def merge_provenances(provenances: Sequence[str]) -> list[str]:
    """Return a text for each device: the versions that its runs share, and their dates and commands."""
    runs: dict[str, list[tuple[list[str], str, str]]] = {}
    for provenance in provenances:
        device, versions, date, command = provenance.split("; ", 3)
        runs.setdefault(device, []).append((versions.split(", "), date, command))
    merged = []
    for device, own_runs in runs.items():
        shared = [version for version in own_runs[0][0] if all(version in versions for versions, _, _ in own_runs)]
        commands: dict[str, list[str]] = {}
        for _, date, command in own_runs:
            commands.setdefault(date, []).append(command)
        dated = [f"{date}: {', '.join(dict.fromkeys(own))}" for date, own in sorted(commands.items())]
        merged.append("; ".join([device, ", ".join(shared), *dated]))
    return merged


def _split_name(file: Path) -> tuple[str, int]:
    """Return the name of a file without its ending and its number, and the number."""
    match = re.fullmatch(r"(.*?)(?:-(\d+))?", file.name.partition(".json")[0].removesuffix(f"-{TUNED}"))
    assert match
    return match[1], int(match[2] or 1)


def make_layer_table(sweeps: Sequence[Sweep]) -> Table:
    """Return a table with one row for each workload of the sweeps, and the geometric means in the last row."""
    results: dict[Workload, Result] = {}
    for sweep in sweeps:
        for result in sweep.results:
            results.setdefault(result.workload, result)
    labels = [f"`{workload.text}`" for workload in results]
    table = make_comparison_table(Sweep(SECTION, labels, [*results.values()], ""))
    devices = [result.device_name for result in results.values()]
    if len(set(devices)) == 1:
        return table
    cells = [*devices, *[EMPTY_CELL] * (len(table.rows) - len(devices))]
    rows = [(*row, cell) for row, cell in zip(table.rows, cells, strict=True)]
    return Table([*table.headers, DEVICE], rows, {*table.left_aligned, DEVICE})


def make_summary_table(sweeps: dict[Path, Sweep]) -> Table:
    """Return a table with one row for each kind of layers: their number, and the speed-ups over each library."""
    kinds: dict[str, dict[Path, Sweep]] = {}
    for file, sweep in sweeps.items():
        kinds.setdefault(_split_name(file)[0], {})[file] = sweep
    words = {kind.partition("-")[0] for kind in kinds}
    prefix = f"{words.pop()}-" if len(words) == 1 else ""
    names = dict.fromkeys(name for sweep in sweeps.values() for name in list_compared_names(sweep))
    rows = []
    for kind, files in sorted(kinds.items()):
        results = [result for sweep in keep_newest(files) for result in sweep.results]
        row = [kind.removeprefix(prefix), str(len(results))]
        for name in names:
            speedups = [result.compute_speedup(TUNED, name) for result in results]
            known = [speedup for speedup in speedups if speedup]
            row += [format_mean(speedups), format_optional(min(known, default=None)), str(sum(s < 1 for s in known))]
        rows.append(row)
    headers = [header for name in names for header in (f"× {name}", "least", f"slower than {name}")]
    return Table(["kind", "layers", *headers], rows, {"kind"})


def make_networks_table(
    results: Mapping[Workload, Result], layers: Sequence[Layer], *, shows_possible: bool = False
) -> Table:
    """Return a table with one row for each network: how much of it was measured, its times, and the speed-ups.

    Args:
        results: Results of the measured layers.
        layers: Layers of the networks.
        shows_possible: Whether a column has the means of `compute_possible_speedup`.
    """
    networks: dict[str, list[Layer]] = {}
    for layer in layers:
        networks.setdefault(re.sub(r"\.\d+(\.[a-z]+)?$", "", layer.name), []).append(layer)
    own_names = (TUNED, PREDICTED, UNTUNED)
    names = dict.fromkeys(row.name for result in results.values() for row in result.rows if row.name not in own_names)
    launch_seconds = min((time for result in results.values() for time in result.seconds.values()), default=0.0)
    rows = []
    for network, own_layers in networks.items():
        measured = [(layer, results[layer.workload]) for layer in own_layers if layer.workload in results]
        limits = {layer.name: layer.count * _find_limit(layer.workload, results) for layer in own_layers}
        share = sum(limits[layer.name] for layer, _ in measured) / sum(limits.values())
        row = [network, str(len(own_layers)), str(len(measured)), f"{share:.0%}"]
        counts = [layer.count for layer, _ in measured]
        seconds = {
            name: sum_seconds([result.seconds.get(name) for _, result in measured], counts) for name in (TUNED, *names)
        }
        tuned_seconds = seconds[TUNED]
        row.append(format_micros(tuned_seconds))
        for name in names:
            speedups = [result.compute_speedup(TUNED, name) for _, result in measured]
            known, library_seconds = [speedup for speedup in speedups if speedup], seconds[name]
            ratio = library_seconds / tuned_seconds if library_seconds and tuned_seconds else None
            row += [format_micros(library_seconds), format_optional(ratio), format_mean(speedups)]
            if shows_possible:
                row.append(format_mean([compute_possible_speedup(each, name, launch_seconds) for _, each in measured]))
            row += [format_optional(min(known, default=None)), str(sum(s < 1 for s in known))]
        rows.append(row)
    headers = ["network", "layers", "measured", "of the limits", f"{TUNED} [µs]"]
    for name in names:
        headers += [f"{name} [µs]", f"{name} / {TUNED}", "geometric mean", *["possible"] * shows_possible]
        headers += ["least", f"slower than {name}"]
    return Table(headers, rows, {"network"})


def compute_possible_speedup(result: Result, library: str, launch_seconds: float) -> float | None:
    """Return the speed-up over a library of a kernel at the physical limit; None if the library has no time.

    A kernel takes at least `launch_seconds`. The tuned kernel's own speed-up is possible, too: Winograd's algorithm has
    fewer products than the limit of a direct convolution counts.
    """
    library_seconds, share = result.seconds.get(library), result.compute_limit_share(library)
    if not library_seconds or not share:
        return None
    possible = library_seconds / max(share * library_seconds, launch_seconds)
    return max(possible, result.compute_speedup(TUNED, library) or 0.0)


def _find_limit(workload: Workload, results: Mapping[Workload, Result]) -> float:
    """Return the `Result.limit_seconds` of a workload on the device of the results; zero if unknown."""
    own = results.get(workload) or replace(next(iter(results.values())), workload=workload, rows=())
    return own.limit_seconds or 0.0
