"""Compare convolutions channels first with the same convolutions channels last, ours and cuDNN's, in one run.

    tvmconv bench layouts conv2d:32x64x56x56,64x64x3x3,s1,p1,f16 --seconds 3 --device cuda:0 -o results
    tvmconv bench layouts resnet50.txt yolov8s.txt --mixed --device cuda:0 -o results
    tvmconv bench layouts tuning_logs/channels-first-layers.json -o results --update-page docs/tensor-cores.md

Arguments are workloads, files with one workload per line, or suites in JSON; their layout is replaced. The layers of a
file are a group, and so are layers of a suite with the same name before the last dot. Layers of several groups are
measured in turn, the first one of each group first. Each layout is searched for the same time, and its log is
DIR/layouts.jsonl. The fastest kernel of each layout and cuDNN's fastest algorithms of each layout are then timed in
turn. After each layer, its line is printed, and DIR/layouts.md and layouts.json have all layers so far. Layers that
layouts.json has are not measured again, so that the same command continues. With --measured-only, it prints their
tables and needs no device. × says how many times as fast the channels-first kernel is.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tvmconv as tc
from tvmconv.benchmarks.common import add_device, add_output, find_device, read_lines, write_report
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import format_progress
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import exceeds_cache
from tvmconv.jsonfile import JsonError, read_json
from tvmconv.measure.timing_rounds import measure_in_rounds
from tvmconv.measure.workers.pool import keep_workers_alive, prestart_workers
from tvmconv.reports.tables import EMPTY_CELL, Table, format_mean, format_micros, format_optional
from tvmconv.search.options import TuneOptions
from tvmconv.search.result import TuneResult
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.search.tune import ProgressCallback
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Workload
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, MIXED_LAYOUTS, UNIFORM_LAYOUTS
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.suites import read_suite

ROUND_SECONDS = 0.04  # time of a kernel or of a library's call in each round
NUM_ALGORITHMS = (0, None, 3)  # picks of cuDNN: by trials of all algorithms, by heuristics, by trials of the first 3
LIBRARY = "cuDNN"
OTHERS = "others"  # group of workloads that no file names

Clock = Callable[[float], float]  # runs for about so many seconds, and returns the median seconds of a launch
Search = tuple[Workload, Callable[[ProgressCallback], TuneResult]]  # a workload and its search


@dataclass
class LayoutTimes:
    """The times of a convolution in several layouts."""

    workload: str  # text, channels first
    seconds: dict[str, float] = field(default_factory=dict)  # by layout, after `LIBRARY` for a library
    kernels: dict[str, str] = field(default_factory=dict)  # our fastest kernel by layout: schedule and config
    failures: list[str] = field(default_factory=list)
    provenance: str = ""  # device, software and date


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Convolutions, files with one on each line, or suites in JSON."
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=text)
    parser.add_argument("--mixed", action="store_true", help="Search the two mixed layouts as well.")
    text = "Search each layout for S seconds"
    options.add_option(parser, "--seconds", "S", text, type=options.parse_positive, default=3.0)
    text = "Print the tables of the layers in DIR/layouts.json, and measure no others."
    parser.add_argument("--measured-only", action="store_true", help=text)
    options.add_page(parser)
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the layers one after another, and write the tables after each."""
    groups, layouts = list_groups(args.workloads), (*UNIFORM_LAYOUTS, *(MIXED_LAYOUTS if args.mixed else ()))
    args.out.mkdir(parents=True, exist_ok=True)
    layers, measured = list_in_turn([*groups.values()]), read_measured(args.out / "layouts.json")
    remaining = [] if args.measured_only else [w for w in layers if w.text not in measured]
    for times in measure_layers(remaining, layouts, args) if remaining else ():
        measured[times.workload] = times
        done = [measured[w.text] for w in layers if w.text in measured]
        write_report(args.out, "layouts", *make_report(done, groups, layouts), "Layouts")
        output.print_intermediate(args, make_layouts_table([times], layouts, has_mean=False).format_markdown())
    done = [measured[w.text] for w in layers if w.text in measured]
    tables, notes, data = make_report(done, groups, layouts)
    output.print_report(args, tables, notes, json_data=data)
    options.update_page(args.page, "layouts", "\n\n".join([*(table.format_markdown() for table in tables), notes[-1]]))
    return 1 if any(times.failures for times in done) else 0


def make_report(
    measured: Sequence[LayoutTimes], groups: Mapping[str, Sequence[Conv]], layouts: Sequence[str]
) -> tuple[list[Table], list[str], list[dict[str, Any]]]:
    """Return the tables, the notes, of which the last one is the provenance, and the data of layouts.json."""
    tables = [make_layouts_table(measured, layouts)]
    if len(groups) > 1:
        tables.insert(0, make_groups_table(measured, groups))
    provenance = "\n".join(dict.fromkeys(times.provenance for times in measured))
    return tables, [*list_notes(measured), provenance], [vars(times) for times in measured]


def read_measured(file: Path) -> dict[str, LayoutTimes]:
    """Return the layers that an earlier run measured, by workload; raise UsageError for a file of something else."""
    if not file.exists():
        return {}
    try:
        measured = read_json(file).decode(list[LayoutTimes])
    except JsonError as error:
        raise UsageError(f"{file}: expected a file layouts.json of tvmconv bench layouts ({error})") from error
    return {times.workload: times for times in measured}


def list_groups(arguments: Sequence[str]) -> dict[str, list[Conv]]:
    """Return the convolutions of each file, or of each group of a suite, and those named on their own as "others".

    Raises:
        UsageError: A workload is no convolution.
        WorkloadError: A suite is malformed.
    """
    texts: dict[str, list[str]] = {}
    for argument in arguments:
        if argument.endswith(".json"):
            for layer in read_suite(Path(argument)):
                texts.setdefault(layer.name.rpartition(".")[0] or OTHERS, []).append(layer.workload.text)
        else:
            texts.setdefault(OTHERS if ":" in argument else Path(argument).stem, []).append(argument)
    return {name: list_layers(arguments) for name, arguments in texts.items()}


def list_in_turn(groups: Sequence[Sequence[Conv]]) -> list[Conv]:
    """Return the convolutions of all groups: the first one of each, then the second one of each, ..."""
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*groups))
    return [*dict.fromkeys(w for w in in_turn if w is not None)]


def list_layers(arguments: Sequence[str]) -> list[Conv]:
    """Return the convolutions, channels first, that texts and files name; lines that begin with # are comments.

    Raises:
        UsageError: A workload is no convolution, or a file cannot be read.
    """
    texts = []
    for argument in arguments:
        lines = [argument] if ":" in argument else read_lines(Path(argument))
        texts += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    workloads = [as_workload(text) for text in texts]
    for w in workloads:
        if not isinstance(w, Conv):
            raise UsageError(f"{w.text}: expected a convolution")
    return [w.with_fields(layout=CHANNELS_FIRST) for w in workloads if isinstance(w, Conv)]


def measure_layers(layers: Sequence[Conv], layouts: Sequence[str], args: argparse.Namespace) -> Iterator[LayoutTimes]:
    """Search all layouts of each convolution, and yield its times; a search prepares the next one.

    The worker processes of the searches start once.
    """
    device = find_device(args)
    workloads: dict[Workload, float] = {w.with_fields(layout=layout): 1.0 for w in layers for layout in layouts}
    tune_options = TuneOptions(seconds=args.seconds, log=args.out / "layouts.jsonl", measure_baseline=False)
    with keep_workers_alive(starts_fork_server=True):
        prestart_workers(tune_options.workers, [device])
        searches = tune_tasks(workloads, [device], replace(tune_options, counts_from_ready_workers=True))
        for number, w in enumerate(layers, 1):
            heading = f"{number} of {len(layers)}, {w.text}, "
            times = measure_layer(w, layouts, searches, device, heading)
            times.provenance = describe_provenance(device, args.command)
            yield times


def measure_layer(
    w: Conv, layouts: Sequence[str], searches: Iterator[Search], device: Device, heading: str
) -> LayoutTimes:
    """Search all layouts of a convolution, then time the fastest kernels and the library's calls in turn.

    Args:
        w: The convolution, channels first.
        layouts: Layouts that are searched.
        searches: Searches, of which the next ones are those of this convolution.
        device: Device to measure on.
        heading: Beginning of progress lines.
    """
    times, clocks = LayoutTimes(w.text), dict[str, Clock]()
    cold = exceeds_cache(w, device)
    with ExitStack() as stack:
        for layout in layouts:
            try:
                clocks[layout], times.kernels[layout] = search_layout(*next(searches), device, cold)
            except Error as error:
                times.failures.append(f"{layout}: {error}")
        on_progress = stack.enter_context(progress_line(heading))
        for layout in UNIFORM_LAYOUTS:
            on_progress(f"{LIBRARY}, {layout}")
            try:
                clocks[f"{LIBRARY} {layout}"] = pick_library_call(w, layout, device, cold, stack)
            except Error as error:
                times.failures.append(f"{LIBRARY}, {layout}: {error}")
        on_progress("timing")
        names = [*clocks]
        rounds = measure_in_rounds(names, lambda keys: [clocks[key](ROUND_SECONDS) for key in keys], float)
    times.seconds = {name: each.median_measurement for name, each in zip(names, rounds, strict=True)}
    return times


def search_layout(
    w: Workload, search: Callable[[ProgressCallback], TuneResult], device: Device, cold: bool
) -> tuple[Clock, str]:
    """Search a convolution, which verifies kernels, and return the fastest kernel's clock and description."""
    with progress_line(f"{w.text}: ") as show:
        tuned = search(lambda progress: show(format_progress(progress)))
    if tuned.final is None:
        raise Error("the search found no kernel")
    record, problem = tuned.final, Problem(w)
    kernel = tc.build(w, record.schedule, config=record.config, device=device)
    knobs = " ".join(f"{name}={value}" for name, value in record.config.items())
    return lambda seconds: kernel.time(problem, cold=cold, seconds=seconds).median, f"{record.schedule} {knobs}"


def pick_library_call(w: Conv, layout: str, device: Device, cold: bool, stack: ExitStack) -> Clock:
    """Return the clock of the library's fastest pick for a layout; the stack closes it."""
    from tvmconv.baselines.base import require_gpu
    from tvmconv.baselines.cudnn import CudnnPickThread
    from tvmconv.baselines.torch_calls import list_calls_in_layout

    gpu, inputs, errors, picks = require_gpu(device, LIBRARY), Problem(w).inputs, list[Error](), []
    for call in list_calls_in_layout(w, layout):
        for num_algorithms in NUM_ALGORITHMS:
            try:
                pick = CudnnPickThread(w, call, inputs, gpu, cold=cold, num_algorithms=num_algorithms)
            except Error as error:
                errors.append(error)
                continue
            stack.callback(pick.close)
            picks.append(pick)
    if not picks:
        raise errors[0]
    fastest = min(picks, key=lambda pick: pick.seconds)
    return lambda seconds: fastest.time(seconds).median


def list_notes(measured: Sequence[LayoutTimes]) -> list[str]:
    """Return the kernels of each layer, and what failed."""
    kernels = [f"* `{t.workload}`, {layout}: {kernel}" for t in measured for layout, kernel in t.kernels.items()]
    failures = [f"{t.workload} failed: {line}" for t in measured for line in t.failures]
    return ["\n".join(kernels), *failures] if kernels else failures


def make_layouts_table(measured: Sequence[LayoutTimes], layouts: Sequence[str], *, has_mean: bool = True) -> Table:
    """Return the table with one line per convolution, and the geometric means of the ratios."""
    libraries = [f"{LIBRARY} {layout}" for layout in UNIFORM_LAYOUTS]
    columns = {"workload": [*(f"`{t.workload}`" for t in measured), *(["geometric mean"] if has_mean else [])]}

    def append_column(title: str, cells: list[str], mean: str) -> None:
        columns[title] = [*cells, *([mean] if has_mean else [])]

    for name in (*layouts, *libraries):
        append_column(f"{name} [µs]", [format_micros(t.seconds.get(name)) for t in measured], EMPTY_CELL)
    for name in (*libraries, CHANNELS_LAST):
        ratios = [_find_ratio(t.seconds, name) for t in measured]
        append_column(f"× {name}", [format_optional(ratio) for ratio in ratios], format_mean(ratios))
    return Table([*columns], [*zip(*columns.values(), strict=True)], left_aligned=frozenset({"workload"}))


def make_groups_table(measured: Sequence[LayoutTimes], groups: Mapping[str, Sequence[Conv]]) -> Table:
    """Return the table of geometric means over the measured layers of each group.

    The columns "slower" count layers whose channels-first kernel is slower.
    """
    names = (*(f"{LIBRARY} {layout}" for layout in UNIFORM_LAYOUTS), CHANNELS_LAST)
    rows = []
    for group, layers in groups.items():
        texts = {w.text for w in layers}
        times = [each for each in measured if each.workload in texts]
        cells = [group, f"{len(times)} of {len(texts)}"]
        for name in names:
            ratios = [ratio for each in times if (ratio := _find_ratio(each.seconds, name)) is not None]
            cells.append(format_mean(ratios))
            if name != CHANNELS_LAST:
                cells.append(str(sum(ratio < 1 for ratio in ratios)))
        rows.append(tuple(cells))
    headings = ["layers of", "measured"]
    for name in names:
        headings += [f"× {name}"] if name == CHANNELS_LAST else [f"× {name}", f"slower than {name}"]
    return Table(headings, rows, left_aligned=frozenset({"layers of"}))


def _find_ratio(seconds: Mapping[str, float], name: str) -> float | None:
    """Return a time relative to that of the channels-first kernel."""
    if name not in seconds or CHANNELS_FIRST not in seconds:
        return None
    return seconds[name] / seconds[CHANNELS_FIRST]
