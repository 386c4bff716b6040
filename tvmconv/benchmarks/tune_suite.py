"""Tune every workload of a suite, then compare the suite with libraries in one run, as a table and a chart.

    tvmconv bench tune-suite --suite mobilenet --only depthwise --seconds 20 --device cuda:0 -o results
    tvmconv bench tune-suite --suite resnet50 --dtype f16 --layout nhwc --batch 32 --seconds 8 --device cuda:0
    tvmconv bench tune-suite --suite mine.json --schedule direct --schedule implicit_gemm --trials 200
    tvmconv bench tune-suite --suite filter2d --baseline copy --baseline cupy --device cuda:0 -o results
    tvmconv bench tune-suite --suite yolov8s --dtype f16 --layout nhwc --batch 32 --sustained 0.6 --device cuda:0
    tvmconv bench tune-suite --suite yolov8s --batch 64 --trials 20 --lanes 4 --stop-after 170 --device cuda:0
    tvmconv bench tune-suite --suite mine.json --configs configs.jsonl --lanes 4 --device cuda:0 -o results

`scripts/tune_suite.py` is the same, and `tune_d2l.py` and `tune_resnet50.py` have defaults for the suite and the time
per layer. Measurements go to a log, DIR/NAME.jsonl or --log, where NAME has the layers and the variant, such as
`resnet50-f16-nhwc-b32`. Then the naive schedule, the best one without tuning, the best kernel of the log
(`tvmconv.reports.library_comparison`) and the libraries, by default cuDNN, are timed in turn. DIR/NAME-tuned.json, .md
and .png have the speed-up over each library, for each layer and as geometric mean, and the times of the network. The
same command resumes an interrupted run. A layer is not compared again if its kernel in NAME-tuned.json is still the
best of the log, and its time agrees with the log's final timing.

With --lanes N, N processes tune and compare layers side by side (`tvmconv.benchmarks.suite_lanes`). They take turns at
the GPU, so that one compiles or computes references while another measures, and no measurement is disturbed. A layer is
compared right after its search, and --stop-after T ends the command in time with whole results.

With --configs, there is no search: processes compile the configs that `bench prebuild list` chose for all layers, and
lanes, two by default, measure the layers that are ready. With both, --picking-seconds T bounds the time in which cuDNN
tries algorithms, which is most of what remains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvmconv import baselines as libraries
from tvmconv import devices, naive_cost, registry
from tvmconv.baselines import cudnn
from tvmconv.baselines.base import require_gpu
from tvmconv.benchmarks.build_ahead import AheadBuilder, find_fastest
from tvmconv.benchmarks.common import add_output
from tvmconv.benchmarks.prebuild import ArchivedKernel, identify, read_archives, read_configs
from tvmconv.benchmarks.suite_lanes import count_free_processors, measure_in_lanes
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import add_search_options, assign_schedules, describe_phases, make_results_table, search_all
from tvmconv.cost_model.model import cost_model_for
from tvmconv.cost_model.similarity import layer_key
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.preparation import PreparedExperiment
from tvmconv.experiments.results import PREDICTED, TUNED, UNTUNED, Result, ResultRow
from tvmconv.experiments.sweep import LayerSelection, Sweep, measure_sweep
from tvmconv.kernel import Kernel
from tvmconv.logs.log import Log
from tvmconv.logs.ranking import find_best_record
from tvmconv.logs.record import Record
from tvmconv.reports import library_comparison
from tvmconv.reports.sweep import make_table, write_numbers, write_sweep
from tvmconv.tvm_import import import_tvm
from tvmconv.workloads import Workload

# Schedules without tuning that are compared: the naive one, and the last of these that computes the workload.
COMPARED = {
    "conv1d": ("conflict_free",),
    "conv2d": ("conflict_free", "tensor_core"),
    "conv3d": ("conflict_free",),
    "filter1d": ("register",),
    "filter2d": ("register",),
}
TIMING_SECONDS = 0.15  # time for each kernel in the comparison, all rounds included
NUM_LANE_FINALISTS = 2  # final timings of a lane, during which the other lanes wait for the GPU
NUM_CONFIG_LANES = 2  # lanes with --configs, one of which computes references while the other one measures
MAX_DEVIATION = 0.10  # relative deviation from the log's final timing above which a kernel is timed again


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    options.add_suite_options(parser, "d2l")
    add_output(parser)
    choices = (*libraries.load_baselines(), "none")
    options.add_option(
        parser, "--baseline", None, "Library to compare with, or none (default: cudnn)", choices=choices, repeat=True
    )
    parser.add_argument(
        "--all-schedules",
        "--ladder",
        action=argparse.BooleanOptionalAction,
        help="Compare the naive schedule and the best one without tuning as well (default: unless the naive schedule "
        "would take seconds per launch).",
    )
    text = "Compare the kernel that the cost model predicts without trials, and the best default config, as well."
    parser.add_argument("--predicted", action="store_true", help=text)
    text = (
        "Run each kernel for T more seconds, for the clock that it leaves, its energy, and its share of the limit at "
        "this clock, in the table and in the chart NAME-limits.png (default: 0)."
    )
    parser.add_argument("--sustained", type=options.parse_positive, default=0.0, metavar="T", help=text)
    text = (
        "Processes that tune and compare layers side by side, and take turns at the GPU (default: two with --configs, "
        "otherwise one, without turns)."
    )
    parser.add_argument("--lanes", type=options.parse_workers, metavar="N", help=text)
    text = "Time in which cuDNN tries further algorithms after its first choices (default: %(default)s)."
    seconds = cudnn.MAX_PICKING_SECONDS
    parser.add_argument("--picking-seconds", type=options.parse_positive, default=seconds, metavar="T", help=text)
    text = "Begin no further layer T seconds after the start of the command; implies --lanes."
    parser.add_argument("--stop-after", type=options.parse_positive, metavar="T", help=text)
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--tune-only", action="store_true", help="Tune without the comparison.")
    part.add_argument("--compare-only", action="store_true", help="Compare the kernels of the log without tuning.")
    text = "Measure the configs of files of `bench prebuild list`, in place of a search."
    part.add_argument("--configs", nargs="+", type=Path, metavar="FILE", help=text)
    text = "Archives (.zip) of `bench prebuild build` with kernels of these configs, or further ones."
    parser.add_argument("--archive", nargs="+", type=Path, metavar="FILE", default=[], help=text)
    add_search_options(parser)
    parser.set_defaults(log=None)


def run(args: argparse.Namespace) -> int:
    """Tune a suite, and compare it with libraries."""
    if args.archive and args.configs is None:
        raise UsageError("--archive needs --configs")
    if args.device.startswith("rpc:") and not args.tune_only:
        raise UsageError(f"kernels cannot be compared on {args.device}: expected --tune-only with this device")
    selection = options.parse_layers(args)
    workloads = list(dict.fromkeys(selection.workloads.values()))
    if args.compare_only:
        import_tvm()
        assign_schedules(args.schedule, workloads)  # raises an error for schedules that compute no layer
    if "cudnn" in _list_baselines(args) and not args.tune_only:  # refused before the search, which takes long
        require_gpu(devices.find_device(args.device), "cuDNN")
    args.out.mkdir(parents=True, exist_ok=True)
    args.log = args.log or args.out / f"{selection.name}.jsonl"
    if args.lanes or args.stop_after or args.configs is not None:
        return _run_in_lanes(args, selection)
    if not args.compare_only:

        def show_layer(number: int, workload: Workload) -> None:
            print(f"{number} of {len(workloads)}: {workload.text}", file=sys.stderr, flush=True)

        counts = {workload: selection.network.get(workload, 1) for workload in workloads}
        results = search_all(args, counts, show_layer, measure_baseline=False)  # the comparison follows
        searched, phases = make_results_table(results, selection.network), describe_phases(results)
        if args.tune_only:
            output.print_report(args, [searched], phases)
        else:
            output.print_intermediate(args, "\n".join([output.format_table(searched, is_wide=args.wide), *phases]))
    return 0 if args.tune_only else _compare(args, selection)


def _compare(args: argparse.Namespace, selection: LayerSelection) -> int:
    """Time all kernels in turn, write and print the results, and return the exit status."""
    device = devices.find_device(args.device)
    options.print_auto_device(args.device, device)
    comparison = _Comparison.create(args, selection, device)
    previous = _read_previous(args.out / f"{selection.name}-tuned.json", comparison.is_current)
    return _report(args, comparison.measure(args, selection, previous), selection)


def _run_in_lanes(args: argparse.Namespace, selection: LayerSelection) -> int:
    """Tune and compare the layers in several processes, write and print the results, and return the exit status."""
    if args.tune_only or args.seconds_total is not None:
        raise UsageError("--lanes, --stop-after and --configs exclude --tune-only and --seconds-total")
    device = devices.find_device(args.device)
    options.print_auto_device(args.device, device)
    args.device, args.lanes = device.text, args.lanes or (1 if args.configs is None else NUM_CONFIG_LANES)
    comparison = _Comparison.create(args, selection, device)
    previous = _read_previous(args.out / f"{selection.name}-tuned.json", comparison.is_current)
    builder = _start_builder(args, [*selection.workloads.values()], device) if args.configs is not None else None
    with closing(builder) if builder else nullcontext():
        sweep = measure_in_lanes(args, selection, previous, start_lane, measure_layer, builder)
    return _report(args, sweep, selection)


def start_lane(args: argparse.Namespace) -> None:
    """Load the libraries that are compared with, which takes seconds, before the first turn at the GPU."""
    import_tvm()
    names = _list_baselines(args)
    libraries.import_modules(names)
    device = devices.find_device(args.device)
    if "cudnn" in names and device.kind == "cuda":
        cudnn.load_library(device)


def measure_layer(
    args: argparse.Namespace,
    selection: LayerSelection,
    previous: Sweep | None,
    kernels: Sequence[ArchivedKernel] | None,
) -> Sweep:
    """Tune the last layer of a selection, or measure its kernels if there are some, compare the fastest kernel, and
    return the results, with the previous ones of the others.
    """
    workload = [*selection.workloads.values()][-1]
    if not args.compare_only and kernels is None:
        counts = {workload: selection.network.get(workload, 1)}
        search_all(args, counts, measure_baseline=False, max_finalists=NUM_LANE_FINALISTS)
    device = devices.find_device(args.device)
    return _Comparison.create(args, selection, device).measure(args, selection, previous, kernels)


def _report(args: argparse.Namespace, sweep: Sweep, selection: LayerSelection) -> int:
    """Write and print the results, and return the exit status."""
    workloads = [*selection.workloads.values()]
    write_sweep(sweep, args.out)
    remarks = [
        *library_comparison.list_remarks(sweep),
        *options.describe_sampled(dict.fromkeys(workloads), args.verify),
        sweep.provenance,
    ]
    tables = [make_table(sweep)] if library_comparison.has_other_schedules(sweep) else []
    tables.append(library_comparison.make_comparison_table(sweep))
    output.print_report(args, tables, remarks, json_data=json.loads(sweep.to_json()))
    return 0 if all(result.has_all_times for result in sweep.results) else 1


def _start_builder(args: argparse.Namespace, workloads: Sequence[Workload], device: Device) -> AheadBuilder:
    """Start to compile the configs of --configs in the order of the layers."""
    order = {workload.text: number for number, workload in enumerate(workloads)}
    archived = read_archives(args.archive, device)
    known = {identify(entry) for kernels in archived.values() for entry, _ in kernels}
    listed = {identify(entry): entry for path in args.configs for entry in read_configs(path)}
    entries = [e for name, e in listed.items() if name not in known and e["workload"] in order]
    entries.sort(key=lambda entry: order[entry["workload"]])
    return AheadBuilder(entries, archived, args.workers or count_free_processors(args.lanes))


def _list_baselines(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the libraries to compare with."""
    return tuple(name for name in args.baseline or ["cudnn"] if name != "none")


def _includes_untuned(args: argparse.Namespace, workloads: Sequence[Workload], device: Device) -> bool:
    """Return whether schedules without tuning are compared: as the command says, or unless they would take long."""
    if args.all_schedules is not None:
        return bool(args.all_schedules)
    is_affordable = all(naive_cost.is_affordable(workload, device) for workload in workloads)
    if not is_affordable:
        print_note("schedules without tuning are left out; --all-schedules compares them as well")
    return is_affordable


@dataclass(frozen=True)
class _Comparison:
    """What is compared for each layer: the tuned kernel, libraries, and optionally other schedules."""

    device: Device
    log: Path  # log with the tuned kernels
    baselines: tuple[str, ...]  # names of libraries
    with_untuned: bool  # whether schedules without tuning are compared
    with_predicted: bool  # whether the cost model's prediction is compared

    @classmethod
    def create(cls, args: argparse.Namespace, selection: LayerSelection, device: Device) -> _Comparison:
        """Return the comparison that the options ask for."""
        return cls(
            device,
            args.log,
            _list_baselines(args),
            with_untuned=_includes_untuned(args, [*selection.workloads.values()], device),
            with_predicted=args.predicted,
        )

    def measure(
        self,
        args: argparse.Namespace,
        selection: LayerSelection,
        previous: Sweep | None,
        kernels: Sequence[ArchivedKernel] | None = None,
    ) -> Sweep:
        """Measure the layers that earlier results lack, write the numbers after each, and return all results. The
        kernel of the last layer is the fastest of `kernels`; if this is None, those of the log are compared.
        """

        def add_fastest(experiment: PreparedExperiment) -> None:
            assert kernels is not None
            try:
                kernel: Kernel | Error = find_fastest(experiment.problem, kernels, self.device, Log(self.log))
            except Error as error:
                kernel = error
            experiment.add_kernel(TUNED, kernel)

        workloads = [*selection.workloads.values()]
        with options.report_fallbacks():
            return measure_sweep(
                f"{selection.name}-tuned",
                selection.workloads,
                self.device,
                args.command,
                progress=progress_line,
                on_result=lambda sweep: write_numbers(sweep, args.out),
                previous_sweep=previous,
                counts=selection.counts,
                workload_arguments=self.choose_schedules,
                complete=None if kernels is None else add_fastest,
                log=args.log if kernels is None else None,
                predicted=args.predicted,
                extra_provenance=describe_training_layers(workloads, self.device) if args.predicted else "",
                baselines=self.baselines,
                cold=None,  # a cold cache only if the arrays exceed it
                seconds=TIMING_SECONDS,
                verify=args.verify,
                sustained=args.sustained,
                library_options={"cudnn": {"picking_seconds": args.picking_seconds}},
            )

    def list_untuned(self, workload: Workload) -> list[str]:
        """Return the schedules without tuning that are compared."""
        return _list_untuned(workload, self.device) if self.with_untuned else []

    def choose_schedules(self, workload: Workload) -> dict[str, Any]:
        """Return the arguments of `run_schedules` for the schedules without tuning."""
        names = self.list_untuned(workload)
        return {"schedules": names} if names else {"ladder": False}

    def is_current(self, result: Result) -> bool:
        """Return whether an earlier comparison need not be measured again."""
        names = [row.name for row in result.rows]
        expected_names = [*self.list_untuned(result.workload), TUNED, *self.baselines]
        record = find_best_record(self.log, result.workload, device=self.device.name)
        row = next((row for row in result.rows if row.name == TUNED), None)
        return (
            result.has_all_times
            and result.device_name == self.device.name
            and [name for name in names if name not in (PREDICTED, UNTUNED)] == expected_names
            and (not self.with_predicted or PREDICTED in names)
            and record is not None
            and row is not None
            and (row.schedule, row.config) == (record.schedule, record.config)
            and not any(row.unstable for row in result.rows)
            and not _deviates(row, record)
        )


def describe_training_layers(workloads: Sequence[Workload], device: Device) -> str:
    """Return a text on how many layers are in the cost model's training set, whose predictions test little."""
    cost_model = cost_model_for(device.arch)
    if cost_model is None:
        return ""
    layers = {layer_key(w): w for w in workloads}.values()
    num_seen = cost_model.count_training_layers(layers)
    if num_seen:
        print_note(f"the model has seen records of {num_seen} of these {len(layers)} layers")
    return f"a model that has seen {num_seen or 'none'} of the {len(layers)} layers"


def _list_untuned(workload: Workload, device: Device) -> list[str]:
    """Return the naive schedule and the best one without tuning."""
    available = {schedule.name for schedule in registry.schedules(workload) if device.kind in schedule.device_kinds}
    naive = registry.get_baseline_schedule(workload)
    best = [name for name in COMPARED.get(workload.operator, ()) if name in available][-1:]
    return [*([naive.name] if naive else []), *best]


def _read_previous(file: Path, is_current: Callable[[Result], bool]) -> Sweep | None:
    """Return the comparisons of a file that need not be measured again."""
    if not file.exists():
        return None
    sweep = Sweep.read(file)
    kept = [(label, result) for label, result in zip(sweep.labels, sweep.results, strict=True) if is_current(result)]
    if not kept:
        return None
    labels, results = zip(*kept, strict=True)
    print_note(f"not compared again, as {file} has them: {', '.join(labels)}")
    return replace(sweep, labels=[*labels], results=[*results], counts=[])


def _deviates(row: ResultRow, record: Record) -> bool:
    """Return whether a row's time deviates from the log's final timing of the same config, both with a hot cache."""
    if row.timing is None or row.timing.cold or not record.final:
        return False
    return abs(row.timing.median - record.cost) > MAX_DEVIATION * record.cost
