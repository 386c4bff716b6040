"""Compare convolutions of 8-bit operands with those in float16, ours and cuDNN's, and with cuBLAS, in one run.

    tvmconv bench eight-bits conv2d:1x64x56x56,64x64x3x3,s1,p1 --batch 32 --seconds 3 --device cuda:0 -o results
    tvmconv bench eight-bits layers.txt --batch 1 --batch 8 --batch 32 --device cuda:0 -o results
    tvmconv bench eight-bits --from results/eight-bits.json --update-page docs/eight-bits.md

Arguments are convolutions, or files with one per line; their dtype, layout and epilogue are replaced. Each is searched
in float16 and in each 8-bit dtype for the same time, all channels last and with results in float16; 8-bit kernels also
scale each output channel. With --quantized-results, they store results of 8 bits, as in a network whose next layer has
operands of 8 bits, and so does cuBLAS's product of 8-bit floats; float16 kernels, cuDNN's and those of PyTorch's
`_int_mm` stay as they are. The log is DIR/eight-bits.jsonl, so that the same command continues. The fastest kernels,
cuDNN's fastest algorithms in float16 and, for filters of one tap, cuBLAS's 8-bit products are then timed in turn, after
a copy of as many bytes as 8-bit kernels move. After each layer, its line is printed, and DIR/eight-bits.md and
eight-bits.json have all layers so far.

With --archive or --configs there is no search: kernels come from archives of `bench prebuild build`, and from lists of
`bench prebuild list`, which are compiled meanwhile. Several processes may then share a GPU by the variable
TVMCONV_GPU_LOCK: all prepare operands and compile, and one measures at a time.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.build_ahead import AheadBuilder
from tvmconv.benchmarks.common import add_device, add_output, find_device, write_report
from tvmconv.benchmarks.eight_bit_libraries import CUDNN, Arrays, TurnClock, pick_library_calls, pick_product
from tvmconv.benchmarks.eight_bit_limits import COPY, LIMIT, add_limit, find_fastest_rate, time_bytes
from tvmconv.benchmarks.layouts import ROUND_SECONDS, Clock, list_layers, search_layout
from tvmconv.benchmarks.prebuild import (
    ArchivedKernel,
    identify,
    measure_kernels,
    read_archives,
    read_configs,
    select_fastest,
)
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device, sharing
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import exceeds_cache
from tvmconv.files import read_bytes
from tvmconv.logs.log import Log
from tvmconv.measure.reference_data import ProblemPrefetcher
from tvmconv.measure.timing_rounds import measure_in_rounds, time_in_turns
from tvmconv.measure.workers.pool import keep_workers_alive, prestart_workers
from tvmconv.reports.tables import EMPTY_CELL, Table, format_mean, format_micros, format_optional
from tvmconv.search.options import TuneOptions
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Layer, Workload, dtypes, parse
from tvmconv.workloads.epilogue import QUANTIZE
from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.suites import write_suite

SECTION = "eight-bits"  # of pages, and name of the files
FLOAT16 = "f16"
EIGHT_BIT_TEXTS = tuple(dtypes.DTYPES[name].text for name in dtypes.EIGHT_BIT_DTYPES)
DEFAULT_DTYPES = (dtypes.FLOAT8_E4M3.text, dtypes.INT8.text)
QUANTIZED_SUFFIX = ", 8-bit results"
NUM_FINALISTS = 2  # fastest kernels of an archive, which are timed again to choose one
VERIFY = "auto"  # which outputs are verified


Candidate = tuple[Clock, str]  # clock of a kernel, and its schedule and config


@dataclass
class EightBitTimes:
    """The times of a convolution in float16 and in 8-bit dtypes."""

    workload: str  # text, in float16
    seconds: dict[str, float] = field(default_factory=dict)  # by dtype, after the library's name for a library
    kernels: dict[str, str] = field(default_factory=dict)  # our fastest kernel by dtype: schedule and config
    failures: list[str] = field(default_factory=list)
    quantized: bool = False  # whether results of 8-bit kernels have 8 bits, in place of float16

    @property
    def title(self) -> str:
        """Return the convolution, and the type of the results if they have 8 bits, for a table."""
        return f"`{self.workload}`{QUANTIZED_SUFFIX if self.quantized else ''}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Convolutions, or files with one on each line."
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=text)
    text = "Files eight-bits.json to read, without measurements; of equal convolutions, the last one counts."
    parser.add_argument("--from", dest="files", nargs="+", type=Path, metavar="FILE", help=text)
    text = f"8-bit dtype (default: {' and '.join(DEFAULT_DTYPES)})"
    options.add_option(parser, "--dtype", None, text, choices=EIGHT_BIT_TEXTS, repeat=True)
    text = "Batch size (default: that of each convolution)"
    options.add_option(parser, "--batch", "N", text, type=options.parse_count, repeat=True)
    text = "Search each dtype for S seconds"
    options.add_option(parser, "--seconds", "S", text, type=options.parse_positive, default=3.0)
    text = "Archives (.zip) of bench prebuild build to take kernels from, without a search."
    parser.add_argument("--archive", nargs="+", type=Path, metavar="FILE", help=text)
    text = "Lists of bench prebuild list, whose kernels are compiled while others are measured, without a search."
    parser.add_argument("--configs", nargs="+", type=Path, metavar="FILE", help=text)
    text = "Number of processes that compile the kernels of --configs"
    options.add_option(parser, "--workers", "N", text, type=options.parse_workers, default=4)
    text = "Store results of 8-bit kernels in 8 bits, in place of float16."
    parser.add_argument("--quantized-results", action="store_true", help=text)
    text = "Suite (.json) to write the workloads of all dtypes to for bench prebuild build, without measurements."
    parser.add_argument("--write-suite", type=Path, metavar="FILE", help=text)
    add_device(parser)
    add_output(parser)
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the layers one after another, and write the table after each; or read the results of a file."""
    if bool(args.files) == bool(args.workloads):
        raise UsageError("expected convolutions to measure, or --from FILE")
    names = tuple(args.dtype or DEFAULT_DTYPES)
    if args.write_suite:
        texts, quantized = (FLOAT16, *names), args.quantized_results
        variants = [make_variant(w, text, quantized=quantized) for w in list_batches(args) for text in texts]
        write_suite([Layer(w.text, w, 1) for w in variants], args.write_suite)
        return 0
    if args.files:
        measured, provenance = read_all_times(args.files)
    else:
        device = find_device(args)
        provenance = describe_provenance(device, args.command)
        measured = list(_measure_and_write(args, names, device, provenance))
    table = make_table(measured, names)
    output.print_report(args, [table], [*list_notes(measured), provenance], json_data=_make_data(measured, provenance))
    options.update_page(args.page, SECTION, f"{table.format_markdown()}\n\nMedian times. {provenance}")
    return 1 if any(times.failures for times in measured) else 0


def _measure_and_write(
    args: argparse.Namespace, names: Sequence[str], device: Device, provenance: str
) -> Iterator[EightBitTimes]:
    """Measure the layers, and yield the times of each after the files have them."""
    layers = list_batches(args)
    args.out.mkdir(parents=True, exist_ok=True)
    measured = list[EightBitTimes]()
    for times in measure_layers(layers, names, device, args):
        measured.append(times)
        notes, data = [*list_notes(measured), provenance], _make_data(measured, provenance)
        write_report(args.out, SECTION, [make_table(measured, names)], notes, data, "8-bit convolutions")
        output.print_intermediate(args, make_table([times], names, has_mean=False).format_markdown())
        yield times


def list_batches(args: argparse.Namespace) -> list[Conv]:
    """Return the convolutions of the arguments with each of the batch sizes."""
    convolutions = list_layers(args.workloads)
    return [*dict.fromkeys(w.with_fields(N=batch or w.N) for batch in args.batch or [None] for w in convolutions)]


def _make_data(measured: Sequence[EightBitTimes], provenance: str) -> dict[str, Any]:
    """Return what a file eight-bits.json has."""
    return {"provenance": provenance, "layers": [vars(times) for times in measured]}


def read_times(file: Path) -> tuple[list[EightBitTimes], str]:
    """Return the times of a file eight-bits.json, which may be compressed by gzip, and their provenance."""
    try:
        data = json.loads(read_bytes(file, unpack=True))
        return [EightBitTimes(**layer) for layer in data["layers"]], data["provenance"]
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file}: expected a file eight-bits.json of tvmconv bench eight-bits") from error


def read_all_times(files: Sequence[Path]) -> tuple[list[EightBitTimes], str]:
    """Return the times of several files by size of the batch, and their provenances."""
    pairs = [read_times(file) for file in files]
    by_title = {times.title: times for measured, _ in pairs for times in measured}
    in_order = sorted(by_title.values(), key=lambda times: (times.quantized, parse_conv(times.workload).N))
    return in_order, "\n\n".join(dict.fromkeys(provenance for _, provenance in pairs))


def make_variant(w: Conv, text: str, *, quantized: bool = False) -> Conv:
    """Return a convolution in a dtype, channels last, with results in float16.

    Sums of 8-bit operands are scaled, and rounded to results of the operands' type if `quantized`.
    """
    dtype = dtypes.DTYPES_BY_TEXT[text]
    changes = {"dtype": dtype.name, "layout": CHANNELS_LAST, "epilogue": (), "out_dtype": "", "weight_dtype": ""}
    if dtype.has_8_bits:
        changes |= {"epilogue": ("scale", QUANTIZE)} if quantized else {"epilogue": ("scale",)}
        changes |= {} if quantized else {"out_dtype": dtypes.FLOAT16.name}
    return w.with_fields(**changes)


def measure_layers(
    layers: Sequence[Conv], names: Sequence[str], device: Device, args: argparse.Namespace
) -> Iterator[EightBitTimes]:
    """Find kernels of each convolution in all dtypes, and yield its times; a search prepares the next one.

    The worker processes of the searches start once. Archives need no search.
    """
    log = args.out / f"{SECTION}.jsonl"
    if args.archive or args.configs:
        yield from _measure_prepared(layers, names, device, args, Log(log))
        return
    make = functools.partial(make_variant, quantized=args.quantized_results)
    workloads: dict[Workload, float] = {make(w, text): 1.0 for w in layers for text in (FLOAT16, *names)}
    tune_options = TuneOptions(seconds=args.seconds, log=log, measure_baseline=False)
    with keep_workers_alive(starts_fork_server=True):
        prestart_workers(tune_options.workers, [device])
        searches = tune_tasks(workloads, [device], replace(tune_options, counts_from_ready_workers=True))
        for number, w in enumerate(layers, 1):
            half = make(w, FLOAT16)
            times, candidates = EightBitTimes(half.text, quantized=args.quantized_results), {}
            cold = exceeds_cache(half, device)
            for text in (FLOAT16, *names):
                try:
                    candidates[text] = [search_layout(*next(searches), device, cold)]
                except Error as error:
                    times.failures.append(f"{text}: {error}")
            inputs = {text: Problem(make(w, text)).inputs for text in (FLOAT16, *names)}
            with ExitStack() as stack:
                heading = f"{number} of {len(layers)}, {w.text}, "
                yield measure_layer(times, candidates, names, device, heading, stack, inputs)


def _measure_prepared(
    layers: Sequence[Conv], names: Sequence[str], device: Device, args: argparse.Namespace, log: Log
) -> Iterator[EightBitTimes]:
    """Yield the times of each convolution with the kernels of archives and lists, without a search."""
    problems, texts = ProblemPrefetcher(), (FLOAT16, *names)
    make = functools.partial(make_variant, quantized=args.quantized_results)
    load_libraries(device)
    variants = [make(w, text) for w in layers for text in texts]
    with closing(make_builder(args, variants, device)) as builder:
        for number, w in enumerate(layers, 1):
            times = EightBitTimes(make(w, FLOAT16).text, quantized=args.quantized_results)
            candidates, inputs = dict[str, list[Candidate]](), dict[str, Arrays]()
            with ExitStack() as stack:
                for text in texts:
                    variant = make(w, text)
                    problem = problems.get(variant, VERIFY)
                    inputs[text] = problem.inputs
                    try:
                        candidates[text] = list_prepared(problem, builder.get_kernels(variant), device, log)
                    except Error as error:
                        times.failures.append(f"{text}: {error}")
                for variant in variants[number * len(texts) :][: len(texts)]:  # of the next convolution
                    problems.prefetch(variant, VERIFY)
                with sharing.hold_gpu():
                    heading = f"{number} of {len(layers)}, {w.text}, "
                    measure_layer(times, candidates, names, device, heading, stack, inputs)
            yield times


def load_libraries(device: Device) -> None:
    """Have cuDNN and cuBLAS load their code, which takes seconds, before this process has its turn at the GPU."""
    half = parse_conv("conv2d:1x64x8x8,64x64x1x1,s1,p0,f16,nhwc")
    with suppress(Error), ExitStack() as stack:
        pick_library_calls(half, device, False, stack, Problem(half).inputs, num_algorithms=(2,))
        for text in DEFAULT_DTYPES:
            w = make_variant(half, text)
            pick_product(w, device, False, stack, Problem(w).inputs)


def make_builder(args: argparse.Namespace, workloads: Sequence[Conv], device: Device) -> AheadBuilder:
    """Return the kernels of the archives, and processes that compile the listed configs in the workloads' order."""
    archived = read_archives(args.archive or [], device)
    known = {identify(entry) for kernels in archived.values() for entry, _ in kernels}
    listed = [entry for path in args.configs or [] for entry in read_configs(path) if identify(entry) not in known]
    order = {w.text: number for number, w in enumerate(workloads)}
    entries = sorted((e for e in listed if e["workload"] in order), key=lambda e: order[e["workload"]])
    return AheadBuilder(entries, archived, args.workers)


def list_prepared(problem: Problem, kernels: Sequence[ArchivedKernel], device: Device, log: Log) -> list[Candidate]:
    """Verify and time the kernels of a convolution, and return the clocks of the fastest ones."""
    w = parse_conv(problem.workload.text)
    inputs, expected_output = problem.inputs, problem.expected_output  # which take a while, and no GPU
    with sharing.hold_gpu(), closing(device.create_benchmark(inputs, expected_output)) as benchmark:
        records = measure_kernels(w, kernels, device, benchmark, log)
    fastest = select_fastest(records, kernels, NUM_FINALISTS)
    if not fastest:
        raise Error("no kernel is right")
    cold = exceeds_cache(make_variant(w, FLOAT16), device)

    def make_clock(executable: Executable) -> Clock:
        kernel = device.load(executable)
        return TurnClock(
            lambda seconds: kernel.time(inputs, cold=cold, seconds=seconds).median,
            lambda: kernel.open_timer(inputs, cold=cold),
        )

    return [(make_clock(executable), describe_entry(entry)) for entry, executable in fastest]


def describe_entry(entry: Mapping[str, Any]) -> str:
    """Return the schedule and the config of an archived kernel."""
    return " ".join([entry["schedule"], *(f"{name}={value}" for name, value in entry["config"].items())])


def measure_layer(
    times: EightBitTimes,
    candidates: Mapping[str, Sequence[Candidate]],
    names: Sequence[str],
    device: Device,
    heading: str,
    stack: ExitStack,
    inputs: Mapping[str, Arrays],
) -> EightBitTimes:
    """Time a convolution's kernels and the libraries in turn.

    Args:
        times: The times to add to.
        candidates: Clocks and descriptions of our kernels by dtype; the fastest of each counts.
        names: Texts of the 8-bit dtypes.
        device: Device to measure on.
        heading: Beginning of progress lines.
        stack: Context in which the libraries' calls stay.
        inputs: Arguments of the convolution by dtype, float16 included.
    """
    half = parse_conv(times.workload)
    cold = exceeds_cache(half, device)
    clocks: dict[tuple[str, str], Clock] = {
        (text, kernel): clock for text, pairs in candidates.items() for clock, kernel in pairs
    }
    on_progress = stack.enter_context(progress_line(heading))
    on_progress("libraries")
    try:
        picks = pick_library_calls(half, device, cold, stack, inputs[FLOAT16])
        clocks |= {(CUDNN, layout): clock for layout, clock in picks.items()}
    except Error as error:
        times.failures.append(f"{CUDNN}: {error}")
    for text in names:
        variant = make_variant(half, text, quantized=times.quantized)
        if clock := pick_product(variant, device, cold, stack, inputs[text]):
            clocks[f"cuBLAS {text}", ""] = clock
    with suppress(Error):
        times.seconds[COPY] = time_bytes(variant, inputs[text], device, cold=cold)
    on_progress("timing")
    for text, pairs in candidates.items():
        if len(pairs) > 1:
            kept = min((kernel for _, kernel in pairs), key=lambda kernel: clocks[text, kernel](ROUND_SECONDS))
            for _, kernel in pairs:
                if kernel != kept:
                    del clocks[text, kernel]
    keys = [*clocks]
    rounds = measure_in_rounds(keys, lambda picked: time_together([clocks[key] for key in picked]), float)
    for (name, kernel), each in sorted(zip(keys, rounds, strict=True), key=lambda timed: -timed[1].median_measurement):
        times.seconds[name] = each.median_measurement  # the fastest one comes last
        if name in candidates:
            times.kernels[name] = kernel
    return times


def time_together(clocks: Sequence[Clock]) -> list[float]:
    """Return the median seconds of launches in short turns, or one after another if some clock has no turns."""
    openers = [clock.open_timer for clock in clocks if isinstance(clock, TurnClock)]
    if len(openers) == len(clocks) > 1 and (timings := time_in_turns(openers, ROUND_SECONDS)):
        return [timing.median for timing in timings]
    return [clock(ROUND_SECONDS) for clock in clocks]


def parse_conv(text: str) -> Conv:
    """Return the convolution of a text."""
    workload = parse(text)
    assert isinstance(workload, Conv)
    return workload


def list_notes(measured: Sequence[EightBitTimes]) -> list[str]:
    """Return the kernels of each layer, and what failed."""
    kernels = [f"* {t.title}, {text}: {kernel}" for t in measured for text, kernel in t.kernels.items()]
    failures = [f"{t.workload} failed: {line}" for t in measured for line in t.failures]
    return ["\n".join(kernels), *failures] if kernels else failures


def make_table(measured: Sequence[EightBitTimes], names: Sequence[str], *, has_mean: bool = True) -> Table:
    """Return the table with one line per convolution, and the geometric means of the ratios, of each batch size.

    A ratio says how many times as fast the 8-bit kernel is. If copies were timed, the last columns have the limit.
    """
    libraries = [f"cuBLAS {text}" for text in names]
    times_of = [FLOAT16, *names, CUDNN, *libraries]
    compared = [(text, other) for text, own in zip(names, libraries, strict=True) for other in (CUDNN, FLOAT16, own)]
    if any(COPY in times.seconds for times in measured):
        times_of, compared = [*times_of, LIMIT], [*compared, (LIMIT, CUDNN)]
    headings = ["workload", *(f"{name} [µs]" for name in times_of), *(f"{text} × {other}" for text, other in compared)]
    fastest_rate = find_fastest_rate([(times.workload, times.seconds) for times in measured], names)
    measured = [replace(t, seconds=add_limit(t.workload, t.seconds, fastest_rate)) for t in measured]
    rows = []
    for times in measured:
        cells = [format_optional(_find_ratio(times.seconds, other, text)) for text, other in compared]
        rows.append((times.title, *(format_micros(times.seconds.get(name)) for name in times_of), *cells))
    for title, group in group_by_batch(measured).items() if has_mean else ():
        means = [format_mean(_find_ratio(t.seconds, other, text) for t in group) for text, other in compared]
        rows.append((title, *(EMPTY_CELL for _ in times_of), *means))
    return Table(headings, rows, left_aligned=frozenset({"workload"}))


def group_by_batch(measured: Sequence[EightBitTimes]) -> dict[str, list[EightBitTimes]]:
    """Return the convolutions whose ratios have a mean, by the title of the mean: those of a batch size and a type."""
    groups: dict[tuple[int, bool], list[EightBitTimes]] = {}
    for times in measured:
        groups.setdefault((parse_conv(times.workload).N, times.quantized), []).append(times)
    if len(groups) == 1:
        return {"geometric mean": [*measured]}
    return {
        f"geometric mean, batch {size}{QUANTIZED_SUFFIX if quantized else ''}": group
        for (size, quantized), group in groups.items()
    }


def _find_ratio(seconds: Mapping[str, float], other: str, text: str) -> float | None:
    """Return the time of another way relative to that of the kernel in a dtype."""
    return seconds[other] / seconds[text] if other in seconds and text in seconds else None
