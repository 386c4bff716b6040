"""Time every schedule of a filter over array sizes, and compare its bandwidth with libraries and the device's peak.

    tvmconv bench bandwidth --operator filter1d --device cuda:0 --baseline copy --baseline cupy -o results
    tvmconv bench bandwidth --operator filter2d --mask 3x3,clamp --sizes 512x512x3 2048x2048x3 --only basic,register
    tvmconv plot results/filter1d-k5.json -o filter1d.svg           # the chart again

Every kernel is verified. It is timed with a cold L2 cache if its arrays exceed the cache, else with a hot one. After
each size, the benchmark writes NAME.json (all results and their provenance), NAME.md (the table) and NAME.png (the
chart). The same command resumes an interrupted run, without repeating measurements of this device in NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tvmconv import workloads
from tvmconv.benchmarks.common import add_output, find_device
from tvmconv.cli import options, output
from tvmconv.cli.errors import UsageError, print_note
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.experiments.sweep import Sweep, find_reusable_part, measure_sweep
from tvmconv.reports.sweep import make_table, write_sweep
from tvmconv.reports.tables import format_result

MASKS = {"filter1d": "k5", "filter2d": "5x5"}
SIZES = {
    "filter1d": [str(1 << exponent) for exponent in range(16, 29, 2)],
    "filter2d": [f"{1 << exponent}x{1 << exponent}x1" for exponent in range(8, 15)],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmark."""
    options.add_option(parser, "--operator", None, "Filter to time", choices=MASKS, default="filter1d")
    text = "Array sizes: samples, or HxWxC (default: 2^16 to 2^28 samples by factors of 4, with 1 channel)."
    parser.add_argument("--sizes", metavar="SIZE", nargs="+", help=text)
    parser.add_argument("--mask", help="Mask size and border, such as k7,clamp (default: k5, or 5x5).")
    text = "Schedules to time besides the naive one"
    options.add_option(parser, "--only", "NAME,NAME", text, type=options.parse_names)
    add_output(parser)
    options.add_timing_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure a filter over sizes, then print and write the sweep."""
    sizes = dict.fromkeys(args.sizes or SIZES[args.operator])
    if len(sizes) < 2:
        raise UsageError("--sizes: expected at least two sizes; tvmconv run measures one")
    mask = args.mask or MASKS[args.operator]
    name = f"{args.operator}-{mask.replace(',', '-')}"
    sweep_workloads = {size: workloads.parse(f"{args.operator}:{size},{mask}") for size in sizes}
    device = find_device(args)
    if not args.only:
        options.print_skipped_schedules(next(iter(sweep_workloads.values())), device)

    def write_and_print(sweep: Sweep) -> None:
        write_sweep(sweep, args.out)
        output.print_intermediate(args, format_result(sweep.results[-1]))

    args.out.mkdir(parents=True, exist_ok=True)  # fails before the measurement if it is not permitted
    sweep = measure_sweep(
        name,
        sweep_workloads,
        device,
        args.command,
        progress=progress_line,
        on_result=write_and_print,
        previous_sweep=_read_previous(args.out / f"{name}.json", device, args),
        schedules=args.only,
        **{**options.timing_kwargs(args), "cold": args.cold or None},
    )
    output.print_report(args, [make_table(sweep)], [sweep.provenance], json_data=json.loads(sweep.to_json()))
    write_sweep(sweep, args.out)
    return 0 if all(result.has_all_times for result in sweep.results) else 1


def _read_previous(file: Path, device: Device, args: argparse.Namespace) -> Sweep | None:
    """Return the results that a file has for this device, with the same schedules and libraries."""
    previous = find_reusable_part(Sweep.read(file), device, args.only, args.baseline) if file.exists() else None
    if previous:
        print_note(f"not measured again, as {file} has them: {', '.join(previous.labels)}")
    return previous
