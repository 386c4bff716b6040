"""Compare convolutions of 8-bit operands with those in float16, ours and cuDNN's, and with cuBLAS, in one run.

    tvmconv bench eight-bits conv2d:1x64x56x56,64x64x3x3,s1,p1 --batch 32 --seconds 3 --device cuda:0 -o results
    tvmconv bench eight-bits layers.txt --batch 1 --batch 8 --batch 32 --device cuda:0 -o results
    tvmconv bench eight-bits --from results/eight-bits.json --update-page docs/eight-bits.md

Arguments are convolutions, or files with one per line; their dtype, layout and epilogue are replaced. Each is searched
in float16 and in each 8-bit dtype for the same time, all channels last and with results in float16; 8-bit kernels also
scale each output channel. The log is DIR/eight-bits.jsonl, so that the same command continues. The fastest kernels,
cuDNN's fastest algorithms in float16 and, for filters of one tap, cuBLAS's 8-bit products are then timed in turn. After
each layer, its line is printed, and DIR/eight-bits.md and eight-bits.json have all layers so far.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvmconv.benchmarks.common import add_device, add_output, find_device, write_report
from tvmconv.benchmarks.layouts import ROUND_SECONDS, Clock, Search, list_layers, pick_library_call, search_layout
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.run import exceeds_cache
from tvmconv.measure.timing_rounds import measure_in_rounds
from tvmconv.measure.workers.pool import keep_workers_alive, prestart_workers
from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_significant
from tvmconv.search.options import TuneOptions
from tvmconv.search.task_scheduler import tune_tasks
from tvmconv.verification import Problem
from tvmconv.workloads import Conv, Workload, dtypes
from tvmconv.workloads.layout import CHANNELS_LAST, UNIFORM_LAYOUTS

SECTION = "eight-bits"  # of pages, and name of the files
FLOAT16, CUDNN = "f16", "cuDNN f16"
EIGHT_BIT_TEXTS = tuple(dtypes.DTYPES[name].text for name in dtypes.EIGHT_BIT_DTYPES)
DEFAULT_DTYPES = (dtypes.FLOAT8_E4M3.text, dtypes.INT8.text)


@dataclass
class EightBitTimes:
    """The times of a convolution in float16 and in 8-bit dtypes."""

    workload: str  # text, in float16
    seconds: dict[str, float] = field(default_factory=dict)  # by dtype, after the library's name for a library
    kernels: dict[str, str] = field(default_factory=dict)  # our fastest kernel by dtype: schedule and config
    failures: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    text = "Convolutions, or files with one on each line."
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=text)
    text = "File eight-bits.json to read, without measurements."
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help=text)
    text = f"8-bit dtype (default: {' and '.join(DEFAULT_DTYPES)})"
    options.add_option(parser, "--dtype", None, text, choices=EIGHT_BIT_TEXTS, repeat=True)
    text = "Batch size (default: that of each convolution)"
    options.add_option(parser, "--batch", "N", text, type=options.parse_count, repeat=True)
    text = "Search each dtype for S seconds"
    options.add_option(parser, "--seconds", "S", text, type=options.parse_positive, default=3.0)
    add_device(parser)
    add_output(parser)
    options.add_page(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the layers one after another, and write the table after each; or read the results of a file."""
    if bool(args.file) == bool(args.workloads):
        raise UsageError("expected convolutions to measure, or --from FILE")
    names = tuple(args.dtype or DEFAULT_DTYPES)
    if args.file:
        measured, provenance = read_times(args.file)
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
    convolutions = list_layers(args.workloads)
    layers = [*dict.fromkeys(vary(w, N=batch or w.N) for batch in args.batch or [None] for w in convolutions)]
    args.out.mkdir(parents=True, exist_ok=True)
    measured = list[EightBitTimes]()
    for times in measure_layers(layers, names, device, args):
        measured.append(times)
        notes, data = [*list_notes(measured), provenance], _make_data(measured, provenance)
        write_report(args.out, SECTION, [make_table(measured, names)], notes, data, "8-bit convolutions")
        output.print_intermediate(args, make_table([times], names, has_mean=False).format_markdown())
        yield times


def _make_data(measured: Sequence[EightBitTimes], provenance: str) -> dict[str, Any]:
    """Return what a file eight-bits.json has."""
    return {"provenance": provenance, "layers": [vars(times) for times in measured]}


def read_times(file: Path) -> tuple[list[EightBitTimes], str]:
    """Return the times of a file eight-bits.json, and their provenance."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return [EightBitTimes(**layer) for layer in data["layers"]], data["provenance"]
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file}: expected a file eight-bits.json of tvmconv bench eight-bits") from error


def vary(w: Conv, **changes: Any) -> Conv:
    """Return a convolution with other values of some fields."""
    return type(w)(**{**vars(w), **changes})


def make_variant(w: Conv, text: str) -> Conv:
    """Return a convolution in a dtype, channels last, with results in float16; sums of 8-bit operands are scaled."""
    dtype = dtypes.DTYPES_BY_TEXT[text]
    if not dtype.has_8_bits:
        return vary(w, dtype=dtype.name, layout=CHANNELS_LAST, epilogue=(), out_dtype="")
    out_dtype = dtypes.FLOAT16.name
    return vary(w, dtype=dtype.name, layout=CHANNELS_LAST, epilogue=("scale",), out_dtype=out_dtype)


def measure_layers(
    layers: Sequence[Conv], names: Sequence[str], device: Device, args: argparse.Namespace
) -> Iterator[EightBitTimes]:
    """Search each convolution in all dtypes, and yield its times; a search prepares the next one.

    The worker processes of the searches start once.
    """
    workloads: dict[Workload, float] = {make_variant(w, text): 1.0 for w in layers for text in (FLOAT16, *names)}
    tune_options = TuneOptions(seconds=args.seconds, log=args.out / f"{SECTION}.jsonl", measure_baseline=False)
    with keep_workers_alive(starts_fork_server=True):
        prestart_workers(tune_options.workers, [device])
        searches = tune_tasks(workloads, [device], replace(tune_options, counts_from_ready_workers=True))
        for number, w in enumerate(layers, 1):
            yield measure_layer(w, names, searches, device, f"{number} of {len(layers)}, {w.text}, ")


def measure_layer(
    w: Conv, names: Sequence[str], searches: Iterator[Search], device: Device, heading: str
) -> EightBitTimes:
    """Search a convolution in all dtypes, then time the fastest kernels and the libraries in turn.

    Args:
        w: The convolution.
        names: Texts of the 8-bit dtypes.
        searches: Searches, of which the next ones are those of this convolution.
        device: Device to measure on.
        heading: Beginning of progress lines.
    """
    half = make_variant(w, FLOAT16)
    times, clocks = EightBitTimes(half.text), dict[str, Clock]()
    cold = exceeds_cache(half, device)
    with ExitStack() as stack:
        for text in (FLOAT16, *names):
            try:
                clocks[text], times.kernels[text] = search_layout(*next(searches), device, cold)
            except Error as error:
                times.failures.append(f"{text}: {error}")
        on_progress = stack.enter_context(progress_line(heading))
        on_progress("libraries")
        for layout in UNIFORM_LAYOUTS:
            try:
                clocks[f"{CUDNN} {layout}"] = pick_library_call(half, layout, device, cold, stack)
            except Error as error:
                times.failures.append(f"{CUDNN}, {layout}: {error}")
        for text in names:
            if clock := _pick_product(make_variant(w, text), device, cold, stack):
                clocks[f"cuBLAS {text}"] = clock
        on_progress("timing")
        keys = [*clocks]
        rounds = measure_in_rounds(keys, lambda picked: [clocks[key](ROUND_SECONDS) for key in picked], float)
    seconds = {key: each.median_measurement for key, each in zip(keys, rounds, strict=True)}
    cudnn = [seconds.pop(key) for key in keys if key.startswith(CUDNN)]
    times.seconds = {**seconds, **({CUDNN: min(cudnn)} if cudnn else {})}
    return times


def _pick_product(w: Conv, device: Device, cold: bool, stack: ExitStack) -> Clock | None:
    """Return the clock of cuBLAS's product of a convolution; None if it is no product that PyTorch supports."""
    from tvmconv.baselines.cublas import time_cublas

    try:
        timed = time_cublas(w, Problem(w).inputs, device=device, cold=cold, seconds=ROUND_SECONDS)
    except Error:
        return None
    stack.callback(timed.close)
    time_again = timed.time_again
    return None if time_again is None else lambda seconds: time_again(seconds).median


def list_notes(measured: Sequence[EightBitTimes]) -> list[str]:
    """Return the kernels of each layer, and what failed."""
    kernels = [f"* `{t.workload}`, {text}: {kernel}" for t in measured for text, kernel in t.kernels.items()]
    failures = [f"{t.workload} failed: {line}" for t in measured for line in t.failures]
    return ["\n".join(kernels), *failures] if kernels else failures


def make_table(measured: Sequence[EightBitTimes], names: Sequence[str], *, has_mean: bool = True) -> Table:
    """Return the table with one line per convolution, and the geometric means of the ratios.

    A ratio says how many times as fast the 8-bit kernel is.
    """
    columns = {"workload": [*(f"`{t.workload}`" for t in measured), *(["geometric mean"] if has_mean else [])]}
    libraries = [f"cuBLAS {text}" for text in names]
    for name in (FLOAT16, *names, CUDNN, *libraries):
        cells = [format_micros(t.seconds.get(name)) for t in measured]
        columns[f"{name} [µs]"] = [*cells, *([EMPTY_CELL] if has_mean else [])]
    for text, library in zip(names, libraries, strict=True):
        for other in (CUDNN, FLOAT16, library):
            ratios = [_find_ratio(t.seconds, other, text) for t in measured]
            known = [ratio for ratio in ratios if ratio is not None]
            mean = format_significant(statistics.geometric_mean(known)) if known else EMPTY_CELL
            cells = [EMPTY_CELL if ratio is None else format_significant(ratio) for ratio in ratios]
            columns[f"{text} × {other}"] = [*cells, *([mean] if has_mean else [])]
    return Table([*columns], [*zip(*columns.values(), strict=True)], left_aligned=frozenset({"workload"}))


def _find_ratio(seconds: Mapping[str, float], other: str, text: str) -> float | None:
    """Return the time of another way relative to that of the kernel in a dtype."""
    return seconds[other] / seconds[text] if other in seconds and text in seconds else None
