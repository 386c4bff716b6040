"""Tune every workload of a suite, then compare the suite with libraries in one run, as a table and a chart.

    python scripts/tune_suite.py --suite mobilenet --only depthwise --seconds 20 --device cuda:0 -o results
    python scripts/tune_suite.py --suite resnet50 --dtype f16 --layout nhwc --batch 32 --seconds 8 --device cuda:0
    python scripts/tune_suite.py --suite mine.json --schedule direct --schedule implicit_gemm --trials 200
    python scripts/tune_d2l.py -o results              # 60 s a shape
    python scripts/tune_resnet50.py -o results         # 30 s a shape
    python scripts/tune_suite.py --suite filter2d --baseline copy --baseline cupy --device cuda:0 -o results

Measurements go to a log, DIR/NAME.jsonl or --log, where NAME tells the layers and the variant: `resnet50-f16-nhwc-b32`.
Then the naive schedule, the best one without tuning, the best kernel of the log (`tuned`) and the libraries, cuDNN if
none is named, are timed side by side: DIR/NAME-tuned.json, .md and .png, with the speed-up over each library, layer by
layer and as geometric mean, and the times of the network. The same command goes on where it was interrupted, also in
the comparison: layers whose kernels in NAME-tuned.json are still the best of the log, and take what its last timing
says, are not compared again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvmconv import baselines as libraries
from tvmconv import devices, library, naive
from tvmconv.cli.errors import Parser, UsageError, guarded
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

# What is compared beside the naive schedule: the last one that computes the workload.
COMPARED = {
    "conv1d": ("conflict_free",),
    "conv2d": ("conflict_free", "tensor_core"),
    "conv3d": ("conflict_free",),
    "filter1d": ("register",),
    "filter2d": ("register",),
}
TIMING_SECONDS = 0.15  # of each kernel in the comparison, in all rounds together
FAR = 0.10  # from the log's last timing of the same config: a time that is further away is taken again


def main(argv: Sequence[str] | None = None, *, prog: str = "tune_suite", **defaults: object) -> int:
    """Tune and compare a suite.

    Args:
        argv: the command line's arguments.
        prog: the script's name.
        defaults: of the options, for scripts that are about one suite.
    """
    return guarded(prog, lambda: _run(sys.argv[1:] if argv is None else argv, prog, defaults))


def _run(argv: Sequence[str], prog: str, defaults: dict[str, object]) -> int:
    args = _parser(prog, defaults).parse_args(argv)
    baselines = [name for name in args.baseline or ["cudnn"] if name != "none"]
    if args.device.startswith("rpc:") and not args.tune_only:
        raise UsageError(f"kernels cannot be compared on {args.device}: tune there with --tune-only")

    selection = chosen_layers(args)
    workloads = list(dict.fromkeys(selection.workloads.values()))
    take_where_they_apply(args.schedule or (), workloads)  # or say which does not
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.log or args.out / f"{selection.name}.jsonl"

    if not args.compare_only:
        _tune(args, selection.network, workloads)
    command = shlex.join(["python", f"scripts/{prog}.py", *argv])
    return 0 if args.tune_only else _compare(args, selection, baselines, command)


def _parser(prog: str, defaults: dict[str, object]) -> Parser:
    parser = Parser(prog=prog, description="Tune every layer of a suite, then compare the suite with libraries.")
    add_suite(parser, "d2l")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=(*libraries.known(), "none"),
        help="to compare with (default: cudnn alone)",
    )
    parser.add_argument(
        "--ladder",
        action=argparse.BooleanOptionalAction,
        help="compare schedules without tuning as well, the naive one and the best (default: unless the naive one "
        "would take seconds for a launch of a layer)",
    )
    parser.add_argument(
        "--predicted",
        action="store_true",
        help="compare what the model predicts without any trial as well, and the untuned default beside it",
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tune-only", action="store_true", help="do not compare")
    part.add_argument("--compare-only", action="store_true", help="do not tune: compare what the log has")
    add_search(parser)
    parser.set_defaults(log=None, **defaults)
    return parser


def _tune(args: argparse.Namespace, network: Mapping[Workload, int], workloads: Sequence[Workload]) -> None:
    """Search for the fastest configs, one workload after another, and print what came of it."""

    def told(number: int, workload: Workload) -> None:
        print(f"{number} of {len(workloads)}: {workload.text}", file=sys.stderr, flush=True)

    counts = {workload: network.get(workload, 1) for workload in workloads}
    results = search_all(args, counts, told, compare=False)  # the comparison does that
    print(results_table(results, network).text())
    print("\n".join(phase_lines(results)), end="\n\n", flush=True)


def _compare(args: argparse.Namespace, selection: Selection, baselines: Sequence[str], command: str) -> int:
    """Time all side by side, write and print it; the exit status."""
    device = devices.find(args.device)
    tell_choice(args.device, device)
    workloads = selection.workloads
    ladder = args.ladder
    if ladder is None:
        ladder = all(naive.is_affordable(workload, device) for workload in workloads.values())
        if not ladder:
            print("tune_suite: schedules without tuning are left out; --ladder compares them, too", file=sys.stderr)
    name = f"{selection.name}-tuned"
    with told_fallbacks():
        sweep = measure_sweep(
            name,
            workloads,
            device,
            command,
            progress=progress_line,
            done=lambda sweep: write_numbers(sweep, args.out),
            known=_known(args.out / f"{name}.json", args.log, device, ladder, baselines, predicted=args.predicted),
            counts=selection.counts,
            each=lambda workload: _ladder(workload, device) if ladder else {"ladder": False},
            log=args.log,
            predicted=args.predicted,
            remark=_taught([*workloads.values()], device) if args.predicted else "",
            baselines=baselines,
            cold=None,  # where the arrays exceed the cache
            seconds=TIMING_SECONDS,
            verify=args.verify,
        )
    write(sweep, args.out)
    if tuned.has_ladder(sweep):
        print(table(sweep).text(), end="\n\n")
    said = [*tuned.remarks(sweep), *verify_lines(dict.fromkeys(workloads.values()), args.verify), sweep.provenance]
    print("\n".join([tuned.comparison(sweep).text(), "", *said]))
    return 0 if all(result.ok for result in sweep.results) else 1


def _taught(workloads: Sequence[Workload], device: Device) -> str:
    """What the model has seen of the layers before: what it predicts of those is no test of it."""
    knowledge = known_for(device.arch)
    if knowledge is None:
        return ""
    layers = {layer_of(w): w for w in workloads}.values()
    seen = knowledge.seen(layers)
    if seen:
        print(f"tune_suite: the model has seen records of {seen} of these {len(layers)} layers", file=sys.stderr)
    return f"a model that has seen {seen or 'none'} of the {len(layers)} layers"


def _ladder(workload: Workload, device: Device) -> dict[str, Any]:
    """What of `run_ladder` gives the naive schedule and the best one without tuning."""
    there = {s.name for s in library.schedules(workload) if device.kind in s.kinds}
    reference = library.naive(workload)
    best_one = [name for name in COMPARED.get(workload.operator, ()) if name in there][-1:]
    names = [*([reference.name] if reference else []), *best_one]
    return {"schedules": names} if names else {"ladder": False}


def _known(
    file: Path, log: Path, device: Device, ladder: bool, baselines: Sequence[str], *, predicted: bool
) -> Sweep | None:
    """What a file has of comparisons on this device that would not come out otherwise now."""
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
    print(f"tune_suite: not compared again, as {file} has them: {', '.join(labels)}", file=sys.stderr)
    return replace(sweep, labels=[*labels], results=[*results], counts=[])


def is_far(row: Row, record: Record) -> bool:
    """Whether a row's time deviates from the log's last timing of the same config, where both are of a hot cache."""
    if row.timing is None or row.timing.cold or not record.final:
        return False
    return abs(row.timing.median - record.cost) > FAR * record.cost


if __name__ == "__main__":
    sys.exit(main())
