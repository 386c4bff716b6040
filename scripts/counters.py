"""Why one schedule beats another: what a GPU counts while each runs, beside what is counted from its code.

    python scripts/counters.py filter2d:8192x8192x1,5x5 --device cuda:0 -o results
    python scripts/counters.py filter1d:268435456,k5 --schedules basic,shuffle,register -o results
    python scripts/counters.py --from results/filter1d-counters.json -o results      # the tables again
    python scripts/counters.py --from results/filter1d-counters.json --into docs/results.md

Needs ncu on the PATH and the right to read the GPU's counters. Every kernel is launched once on random inputs, with its
default config; --log adds the fastest kernel of a log. Writes OPERATOR-counters.json, all that was read, and
OPERATOR-counters.md, the tables.
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import tvmconv as tc
from tvmconv import devices
from tvmconv.analysis.nsight import ncu
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import tell_choice, told_fallbacks
from tvmconv.errors import Error
from tvmconv.experiments.counters import METRICS, STALLS, Counters, counters, kernels
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.readings import Readings
from tvmconv.reports.counters import LEGEND, SUMMARY_LEGEND, summary, tables
from tvmconv.reports.tables import with_section


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    return guarded("counters", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if bool(args.workloads) == bool(args.file):
        raise Error("give workloads to measure or --from FILE to read, and not both")
    if args.launch_only:
        for _, kernel in _kernels(args):
            kernel(*kernel.workload.inputs(seed=0))
        return 0
    if args.file:
        measured = Readings.read(args.file, Counters)
    else:
        device = devices.find(args.device)
        tell_choice(args.device, device)
        operators = dict.fromkeys(tc.parse(text).operator for text in args.workloads)
        name = f"{'-'.join(operators)}-counters"
        source = provenance(device, shlex.join(["python", "scripts/counters.py", *argv]))
        profiled = ncu.profile([sys.executable, __file__, *argv, "--launch-only"], {**METRICS, **STALLS})
        with told_fallbacks():
            rows = [counters(*built, read) for built, read in zip(_kernels(args), profiled, strict=True)]
        measured = Readings(name, source, rows)
    texts = dict.fromkeys(row.workload for row in measured.kernels)
    sections = {text: [row for row in measured.kernels if row.workload == text] for text in texts}
    for text, part in sections.items():
        print("\n\n".join([text, *(table.text() for table in tables(part))]), end="\n\n")
    print(measured.provenance)
    if args.out:
        pages = [
            "\n\n".join([f"## {text}", *(table.markdown() for table in tables(part))])
            for text, part in sections.items()
        ]
        measured.write(args.out, "\n\n".join([*pages, f"{LEGEND} {measured.provenance}"]))
    if args.into:
        summaries = [f"`{text}`:\n\n{summary(part).markdown()}" for text, part in sections.items()]
        section = "\n\n".join([*summaries, f"{SUMMARY_LEGEND} {measured.provenance}"])
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, measured.name, f"{section}\n"), encoding="utf-8")
    return 0


def _parser() -> Parser:
    parser = Parser(prog="counters", description="Hardware counters of a workload's schedules, by Nsight Compute.")
    parser.add_argument("workloads", metavar="WORKLOAD", nargs="*", help="such as filter2d:8192x8192x1,5x5")
    parser.add_argument("--schedules", metavar="A,B", help="these and the naive one (default: all that apply)")
    parser.add_argument(
        "--log", metavar="FILE", action="append", help="logs, whose fastest kernel runs as well, as tuned"
    )
    parser.add_argument("--device", default="cuda:0", help="a CUDA device (default: %(default)s)")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="do not measure: read this JSON")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write JSON and Markdown to this folder")
    parser.add_argument("--into", type=Path, metavar="FILE", help="put a summary between this file's markers for NAME")
    parser.add_argument("--launch-only", action="store_true", help="launch each kernel once and print nothing, for ncu")
    return parser


def _kernels(args: Namespace) -> Iterator[tuple[str, tc.Kernel]]:
    """The schedules that were asked for, by name, and their kernels, for every workload."""
    names = args.schedules.split(",") if args.schedules else None
    return kernels([tc.parse(text) for text in args.workloads], names, devices.find(args.device), args.log)


if __name__ == "__main__":
    sys.exit(main())
