"""The bandwidth of every schedule of a filter over array sizes, beside libraries and the device's limit.

    python scripts/bandwidth.py --operator filter1d --device cuda:0 --baseline copy --baseline cupy -o results
    python scripts/bandwidth.py --operator filter2d --mask 3x3,clamp --sizes 512x512x3 2048x2048x3 --only basic,register
    tvmconv plot results/filter1d-k5.json -o filter1d.svg           # the chart again

Every kernel is verified, and timed with a cold L2 cache where its arrays exceed the cache, with a hot one below. Writes
NAME.json (everything measured, and on what), NAME.md (the table) and NAME.png (the chart) after each size; the same
command goes on where it was interrupted, and measures nothing that NAME.json has for this device.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tvmconv import devices, workloads
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import add_timing, how_to_time, tell_choice, tell_left_out
from tvmconv.cli.progress import progress_line
from tvmconv.devices import Device
from tvmconv.experiments.sweep import Sweep, measure_sweep, part_measured
from tvmconv.reports.sweep import table, write
from tvmconv.reports.tables import result_text

MASKS = {"filter1d": "k5", "filter2d": "5x5"}
SIZES = {
    "filter1d": [str(1 << exponent) for exponent in range(16, 29, 2)],
    "filter2d": [f"{1 << exponent}x{1 << exponent}x1" for exponent in range(8, 15)],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a filter over sizes; print and write the sweep."""
    return guarded("bandwidth", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    sizes = dict.fromkeys(args.sizes or SIZES[args.operator])
    if len(sizes) < 2:
        raise UsageError("--sizes: expected at least two, to compare; tvmconv run measures one")
    mask = args.mask or MASKS[args.operator]
    name = f"{args.operator}-{mask.replace(',', '-')}"
    sweep_workloads = {size: workloads.parse(f"{args.operator}:{size},{mask}") for size in sizes}
    first = next(iter(sweep_workloads.values()))
    device = devices.find(args.device)
    tell_choice(args.device, device)
    if not args.only:
        tell_left_out(first, device)

    args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed
    known = _known(args.out / f"{name}.json", device, args)
    sweep = measure_sweep(
        name,
        sweep_workloads,
        device,
        shlex.join(["python", "scripts/bandwidth.py", *argv]),
        progress=progress_line,
        done=lambda sweep: _keep(sweep, args.out),
        known=known,
        schedules=args.only,
        **{**how_to_time(args), "cold": args.cold or None},
    )
    print(table(sweep).text())
    print(sweep.provenance)
    write(sweep, args.out)
    return 0 if all(result.ok for result in sweep.results) else 1


def _parser() -> Parser:
    parser = Parser(prog="bandwidth", description="The bandwidth of every schedule of a filter over array sizes.")
    parser.add_argument("--operator", choices=MASKS, default="filter1d", help="(default: %(default)s)")
    parser.add_argument(
        "--sizes",
        metavar="SIZE",
        nargs="+",
        help="as in a workload's text: samples, or HxWxC (default: 2^16 to 2^28 samples by factors of 4, of 1 channel)",
    )
    parser.add_argument("--mask", help="as in a workload's text, clamp included: k7,clamp (default: k5, or 5x5)")
    parser.add_argument("--only", metavar="NAME,NAME", type=_names, help="only these schedules, and the naive one")
    parser.add_argument("-o", dest="out", type=Path, default=Path("results"), metavar="DIR", help="where results go")
    add_timing(parser)
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names of schedules joined by commas, not {text!r}")
    return names


def _known(file: Path, device: Device, args: argparse.Namespace) -> Sweep | None:
    """What a file has already: the results on this device with the schedules and libraries that are asked for."""
    known = part_measured(Sweep.read(file), device, args.only, args.baseline) if file.exists() else None
    if known:
        print(f"bandwidth: not measured again, as {file} has them: {', '.join(known.labels)}", file=sys.stderr)
    return known


def _keep(sweep: Sweep, folder: Path) -> None:
    write(sweep, folder)
    print(result_text(sweep.results[-1]), end="\n\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
