"""Compare convolutions channels first with the same convolutions channels last, ours and cuDNN's, in one run.

    tvmconv bench layouts conv2d:32x64x56x56,64x64x3x3,s1,p1,f16 --seconds 3 --device cuda:0 -o results
    tvmconv bench layouts layers.txt --mixed --device cuda:0 -o results

Arguments are workloads, or files with one workload per line; their layout is replaced. Each layout is searched for the
same time, and its log is DIR/layouts.jsonl, so that the same command continues. The fastest kernel of each layout and
cuDNN's fastest algorithms of each layout are then timed in turn. After each layer, its line is printed, and
DIR/layouts.md and layouts.json have all layers so far. × says how many times as fast the channels-first kernel is.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import tvmconv as tc
from tvmconv.benchmarks.common import add_device, add_output, find_device, write_report
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.cli.tune import format_progress
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import exceeds_cache
from tvmconv.measure.timing_rounds import measure_in_rounds
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_significant
from tvmconv.verification import Problem
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, MIXED_LAYOUTS, UNIFORM_LAYOUTS
from tvmconv.workloads.registry import as_workload

ROUND_SECONDS = 0.04  # time of a kernel or of a library's call in each round
NUM_ALGORITHMS = (0, None, 3)  # picks of cuDNN: by trials of all algorithms, by heuristics, by trials of the first 3
LIBRARY = "cuDNN"

Clock = Callable[[float], float]  # runs for about so many seconds, and returns the median seconds of a launch


@dataclass
class LayoutTimes:
    """The times of a convolution in several layouts."""

    workload: str  # text, channels first
    seconds: dict[str, float] = field(default_factory=dict)  # by layout, after `LIBRARY` for a library
    kernels: dict[str, str] = field(default_factory=dict)  # our fastest kernel by layout: schedule and config
    failures: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Convolutions, or files with one on each line."
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=text)
    parser.add_argument("--mixed", action="store_true", help="Search the two mixed layouts as well.")
    text = "Search each layout for S seconds"
    options.add_option(parser, "--seconds", "S", text, type=options.parse_positive, default=3.0)
    add_device(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the layers one after another, and write the table after each."""
    layers, device, measured = list_layers(args.workloads), find_device(args), list[LayoutTimes]()
    args.out.mkdir(parents=True, exist_ok=True)
    layouts = (*UNIFORM_LAYOUTS, *(MIXED_LAYOUTS if args.mixed else ()))
    for number, w in enumerate(layers, 1):
        times = measure_layer(w, layouts, device, args, f"{number} of {len(layers)}, {w.text}, ")
        measured.append(times)
        table, notes = make_layouts_table(measured, layouts), list_notes(measured)
        notes.append(describe_provenance(device, args.command))
        data = [vars(each) for each in measured]
        write_report(args.out, "layouts", [table], notes, data, "Layouts")
        output.print_intermediate(args, make_layouts_table([times], layouts, has_mean=False).format_markdown())
    output.print_report(args, [table], notes, json_data=data)
    return 1 if any(times.failures for times in measured) else 0


def list_layers(arguments: Sequence[str]) -> list[Conv]:
    """Return the convolutions, channels first, that texts and files name; lines that begin with # are comments.

    Raises:
        UsageError: A workload is no convolution.
    """
    texts = []
    for argument in arguments:
        is_file = ":" not in argument
        lines = Path(argument).read_text(encoding="utf-8").splitlines() if is_file else [argument]
        texts += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    workloads = [as_workload(text) for text in texts]
    for w in workloads:
        if not isinstance(w, Conv):
            raise UsageError(f"{w.text}: expected a convolution")
    return [convert_layout(w, CHANNELS_FIRST) for w in workloads if isinstance(w, Conv)]


def convert_layout(w: Conv, layout: str) -> Conv:
    """Return the convolution in another layout."""
    return type(w)(**{**vars(w), "layout": layout})


def measure_layer(
    w: Conv, layouts: Sequence[str], device: Device, args: argparse.Namespace, heading: str
) -> LayoutTimes:
    """Search all layouts of a convolution, then time the fastest kernels and the library's calls in turn."""
    times, clocks = LayoutTimes(w.text), dict[str, Clock]()
    cold = exceeds_cache(w, device)
    with ExitStack() as stack, progress_line(heading) as on_progress:
        for layout in layouts:
            try:
                clocks[layout], times.kernels[layout] = search_layout(convert_layout(w, layout), device, cold, args)
            except Error as error:
                times.failures.append(f"{layout}: {error}")
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


def search_layout(w: Conv, device: Device, cold: bool, args: argparse.Namespace) -> tuple[Clock, str]:
    """Search a convolution, and return the fastest kernel's clock and description."""
    log = args.out / "layouts.jsonl"
    with progress_line(f"{w.text}: ") as show:
        tuned = tc.tune(
            *(w,),
            seconds=args.seconds,
            log=log,
            device=device,
            measure_baseline=False,
            progress=lambda status: show(format_progress(status)),
        )
    if tuned.final is None:
        raise Error("the search found no kernel")
    record, problem = tuned.final, Problem(w)
    kernel = tc.build(w, record.schedule, config=record.config, device=device)
    if not (verification := kernel.verify(problem)).ok:
        raise Error(f"{record.schedule} is wrong by {verification.error:.2g}")
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
    fastest = min(picks, key=lambda pick: pick.timing.median)
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
        known = [ratio for ratio in ratios if ratio is not None]
        cells = [EMPTY_CELL if ratio is None else format_significant(ratio) for ratio in ratios]
        append_column(f"× {name}", cells, format_significant(statistics.geometric_mean(known)) if known else EMPTY_CELL)
    return Table([*columns], [*zip(*columns.values(), strict=True)], left_aligned=frozenset({"workload"}))


def _find_ratio(seconds: Mapping[str, float], name: str) -> float | None:
    """Return a time relative to that of the channels-first kernel."""
    if name not in seconds or CHANNELS_FIRST not in seconds:
        return None
    return seconds[name] / seconds[CHANNELS_FIRST]
