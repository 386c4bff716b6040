"""The whole ladder over the layers of a suite (by default the d2l-tvm chapter's), as tables and a chart of GFLOP/s.

    python scripts/sweep.py --device cuda:0 --baseline cudnn -o results
    python scripts/sweep.py --suite resnet50 --only 3x3 --device cuda:0 -o results
    python scripts/sweep.py --from results/*-tuned.json -o results      # tables and charts again

Writes NAME.json (everything measured, and on what), NAME.md (the table) and NAME.png (the chart).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import add_suite, add_timing, chosen_layers, how_to_time, tell_choice
from tvmconv.cli.progress import progress_line
from tvmconv.experiments.sweep import CHANNELS_SUITE, Sweep, measure_sweep
from tvmconv.reports.sweep import markdown, table, write, write_again
from tvmconv.reports.tables import result_text, with_section

LADDER = ("default", "tiling", "columns", "vthread", "conflict_free")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read, a sweep; print and write it."""
    return guarded("sweep", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="sweep", description="The ladder of schedules over the layers of a suite.")
    add_suite(parser, CHANNELS_SUITE)
    parser.add_argument(
        "--from", dest="files", nargs="+", type=Path, metavar="FILE", help="do not measure: read these NAME.json"
    )
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON, Markdown and PNG to this folder")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this file's markers for NAME")
    add_timing(parser)
    args = parser.parse_args(argv)

    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # before measuring: it may not be allowed
    if args.files:
        sweeps = [Sweep.read(file) for file in args.files]
    else:
        sweeps = [_measure(args, shlex.join(["python", "scripts/sweep.py", *argv]))]
    for sweep in sweeps:
        _show(sweep, args)
    return 0 if all(result.ok for sweep in sweeps for result in sweep.results) else 1


def _show(sweep: Sweep, args: Any) -> None:
    """Print a sweep, and write it where that was asked for."""
    print(table(sweep).text())
    print(sweep.provenance)
    if args.out:
        is_there = (args.out / f"{sweep.name}.json").resolve() in [file.resolve() for file in args.files or ()]
        (write_again if is_there else write)(sweep, args.out)
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, sweep.name, markdown(sweep)), encoding="utf-8")


def _measure(args: Any, command: str) -> Sweep:
    selection = chosen_layers(args)
    device = devices.find(args.device)
    tell_choice(args.device, device)
    return measure_sweep(
        selection.name,
        selection.workloads,
        device,
        command,
        progress=progress_line,
        done=lambda sweep: print(result_text(sweep.results[-1]), end="\n\n", flush=True),
        schedules=LADDER,
        counts=selection.counts,
        **how_to_time(args),
    )


if __name__ == "__main__":
    sys.exit(main())
