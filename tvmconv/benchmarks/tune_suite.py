"""Tune every workload of a suite, then compare the suite with libraries in one run, as a table and a chart.

    tvmconv bench tune-suite --suite mobilenet --only depthwise --seconds 20 --device cuda:0 -o results
    tvmconv bench tune-suite --suite resnet50 --dtype f16 --layout nhwc --batch 32 --seconds 8 --device cuda:0
    tvmconv bench tune-suite --suite mine.json --schedule direct --schedule implicit_gemm --trials 200
    tvmconv bench tune-suite --suite filter2d --baseline copy --baseline cupy --device cuda:0 -o results

`scripts/tune_suite.py` is the same, and `tune_d2l.py` and `tune_resnet50.py` have a suite and a time per layer as
defaults. Measurements go to a log, DIR/NAME.jsonl or --log, where NAME has the layers and the variant:
`resnet50-f16-nhwc-b32`. Then the naive schedule, the best one without tuning, the best kernel of the log (`tuned`) and
the libraries, cuDNN by default, are timed side by side: DIR/NAME-tuned.json, .md and .png, with the speed-up over each
library, layer by layer and as geometric mean, and the times of the network. The same command continues after an
interruption, also in the comparison: a layer is not compared again if its kernel in NAME-tuned.json is still the best
of the log and took what the log's last timing says.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmconv import baselines as libraries
from tvmconv import devices, library, naive
from tvmconv.benchmarks.common import add_output
from tvmconv.cli.errors import UsageError, note
from tvmconv.cli.options import add_suite, chosen_layers, tell_choice, told_fallbacks, verify_lines
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import add_search, phase_lines, results_table, search_all, take_where_they_apply
from tvmconv.devices import Device
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.run import PREDICTED, TUNED, UNTUNED
from tvmconv.experiments.sweep import Selection, Sweep, measure_sweep
from tvmconv.knowledge.likeness import layer_of
from tvmconv.knowledge.model import known_for
from tvmconv.logs.best import best
from tvmconv.logs.record import Record
from tvmconv.reports import tuned
from tvmconv.reports.sweep import table, write, write_numbers
from tvmconv.workloads import Workload

# Schedules that are compared beside the naive one: the last that computes the workload.
COMPARED = {
    "conv1d": ("conflict_free",),
    "conv2d": ("conflict_free", "tensor_core"),
    "conv3d": ("conflict_free",),
    "filter1d": ("register",),
    "filter2d": ("register",),
}
TIMING_SECONDS = 0.15  # for each kernel in the comparison, all rounds included
FAR = 0.10  # a time that deviates by more from the log's last timing of the same config is taken again


def run(args: argparse.Namespace) -> int:
    """Tune and compare a suite."""
    baselines = [name for name in args.baseline or ["cudnn"] if name != "none"]
    if args.device.startswith("rpc:") and not args.tune_only:
        raise UsageError(f"kernels cannot be compared on {args.device}: tune there with --tune-only")

    selection = chosen_layers(args)
    workloads = list(dict.fromkeys(selection.workloads.values()))
    take_where_they_apply(args.schedule or (), workloads)  # or say which does not
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.log or args.out / f"{selection.name}.jsonl"

    if not args.compare_only:
        _tune(args, selection, workloads)
    return 0 if args.tune_only else _compare(args, selection, baselines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    add_suite(parser, "d2l")
    add_output(parser)
    parser.add_argument(
        "--baseline",
        action="append",
        choices=(*libraries.known(), "none"),
        help="library to compare with, or none; may be given several times (default: cudnn)",
    )
    parser.add_argument(
        "--ladder",
        action=argparse.BooleanOptionalAction,
        help="compare the naive schedule and the best one without tuning as well (default: unless the naive schedule "
        "would take seconds per launch)",
    )
    parser.add_argument(
        "--predicted",
        action="store_true",
        help="compare the kernel that the model predicts without any trial as well, and the untuned default",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tune-only", action="store_true", help="tune without comparing afterwards")
    part.add_argument("--compare-only", action="store_true", help="compare what the log has without tuning")
    add_search(parser)
    parser.set_defaults(log=None)


def _tune(args: argparse.Namespace, selection: Selection, workloads: Sequence[Workload]) -> None:
    """Search for the fastest configs, one workload after another, and print the results."""

    def show_layer(number: int, workload: Workload) -> None:
        print(f"{number} of {len(workloads)}: {workload.text}", file=sys.stderr, flush=True)

    counts = {workload: selection.network.get(workload, 1) for workload in workloads}
    results = search_all(args, counts, show_layer, compare=False)  # the comparison follows
    print(results_table(results, selection.network).text())
    print("\n".join(phase_lines(results)), end="\n\n", flush=True)


def _compare(args: argparse.Namespace, selection: Selection, baselines: Sequence[str]) -> int:
    """Time all side by side, write and print the results; return the exit status."""
    device = devices.find(args.device)
    tell_choice(args.device, device)
    workloads = selection.workloads
    ladder = args.ladder
    if ladder is None:
        ladder = all(naive.is_affordable(workload, device) for workload in workloads.values())
        if not ladder:
            note("schedules without tuning are left out; --ladder compares them, too")
    name = f"{selection.name}-tuned"
    with told_fallbacks():
        sweep = measure_sweep(
            name,
            workloads,
            device,
            args.command,
            progress=progress_line,
            done=lambda sweep: write_numbers(sweep, args.out),
            known=_known(args.out / f"{name}.json", args.log, device, ladder, baselines, predicted=args.predicted),
            counts=selection.counts,
            each=lambda workload: _ladder(workload, device) if ladder else {"ladder": False},
            log=args.log,
            predicted=args.predicted,
            remark=_describe_model([*workloads.values()], device) if args.predicted else "",
            baselines=baselines,
            cold=None,  # where the arrays exceed the cache
            seconds=TIMING_SECONDS,
            verify=args.verify,
        )
    write(sweep, args.out)
    if tuned.has_ladder(sweep):
        print(table(sweep).text(), end="\n\n")
    remarks = [*tuned.remarks(sweep), *verify_lines(dict.fromkeys(workloads.values()), args.verify), sweep.provenance]
    print("\n".join([tuned.comparison(sweep).text(), "", *remarks]))
    return 0 if all(result.ok for result in sweep.results) else 1


def _describe_model(workloads: Sequence[Workload], device: Device) -> str:
    """Return how many of the layers the model was trained on: its predictions for those test nothing."""
    knowledge = known_for(device.arch)
    if knowledge is None:
        return ""
    layers = {layer_of(w): w for w in workloads}.values()
    seen = knowledge.seen(layers)
    if seen:
        note(f"the model has seen records of {seen} of these {len(layers)} layers")
    return f"a model that has seen {seen or 'none'} of the {len(layers)} layers"


def _ladder(workload: Workload, device: Device) -> dict[str, Any]:
    """Return the arguments of `run_ladder` for the naive schedule and the best one without tuning."""
    available = {s.name for s in library.schedules(workload) if device.kind in s.kinds}
    reference = library.naive(workload)
    best_one = [name for name in COMPARED.get(workload.operator, ()) if name in available][-1:]
    names = [*([reference.name] if reference else []), *best_one]
    return {"schedules": names} if names else {"ladder": False}


def _known(
    file: Path, log: Path, device: Device, ladder: bool, baselines: Sequence[str], *, predicted: bool
) -> Sweep | None:
    """Return those comparisons of a file, made on this device, that need not be measured again."""
    if not file.exists():
        return None
    sweep = Sweep.read(file)

    def is_current(result: Result) -> bool:
        names = [row.name for row in result.rows]
        own = _ladder(result.workload, device).get("schedules", []) if ladder else []
        record = best(log, result.workload, device=device.name)
        row = next((row for row in result.rows if row.name == TUNED), None)
        return (
            result.ok
            and result.device_name == device.name
            and [name for name in names if name not in (PREDICTED, UNTUNED)] == [*own, TUNED, *baselines]
            and (not predicted or PREDICTED in names)
            and record is not None
            and row is not None
            and (row.schedule, row.config) == (record.schedule, record.config)
            and not any(row.unstable for row in result.rows)
            and not is_far(row, record)
        )

    kept = [(label, result) for label, result in zip(sweep.labels, sweep.results, strict=True) if is_current(result)]
    if not kept:
        return None
    labels, results = zip(*kept, strict=True)
    note(f"not compared again, as {file} has them: {', '.join(labels)}")
    return replace(sweep, labels=[*labels], results=[*results], counts=[])


def is_far(row: Row, record: Record) -> bool:
    """Return whether a row's time deviates from the log's last timing of the same config, both with a hot cache."""
    if row.timing is None or row.timing.cold or not record.final:
        return False
    return abs(row.timing.median - record.cost) > FAR * record.cost
