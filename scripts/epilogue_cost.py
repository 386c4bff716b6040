"""What an epilogue costs: the fastest records of logs with it and without, timed in turns.

    python scripts/epilogue_cost.py tuning_logs --only 64x64 --device cuda:0 -o results

The configs are those of the records; a kernel with the epilogue is verified first. Writes DIR/epilogue.md.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import tvmconv as tc
from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import count
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.logs.best import best_of_each, log_files
from tvmconv.logs.lines import BadLines
from tvmconv.reports.tables import Table, significant
from tvmconv.verify import Problem
from tvmconv.workloads import Conv


def main(argv: Sequence[str] | None = None) -> int:
    """Time kernels with and without an epilogue."""
    return guarded("epilogue_cost", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="epilogue_cost", description="What an epilogue costs the fastest kernels of logs.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs, or folders of logs")
    parser.add_argument("--epilogue", default="bias,relu", metavar="E", help="its operations (default: %(default)s)")
    parser.add_argument("--only", default="conv", metavar="TEXT", help="only workloads whose text has this in it")
    parser.add_argument("--device", default="cuda:0", help="where to time (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=7, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write epilogue.md there")
    args = parser.parse_args(argv)

    device = devices.find(args.device)
    logs = {file: BadLines() for file in log_files(args.logs)}
    rows = []
    for record in best_of_each(logs, device=device.name):
        if not isinstance(record.workload, Conv) or args.only not in record.workload.text:
            continue
        finished = tc.parse(f"{record.workload.text},{args.epilogue}")
        pair = [
            tc.build(workload, record.schedule, config=record.config, device=device)
            for workload in (record.workload, finished)
        ]
        problems = [Problem(kernel.workload) for kernel in pair]
        verification = pair[1].verify(problems[1])
        if not verification.ok:
            raise Error(f"{pair[1]} is wrong by {verification.error:.2g}")
        turns = [
            [kernel.time(problem, seconds=0.05).median for kernel, problem in zip(pair, problems, strict=True)]
            for _ in range(args.rounds)
        ]
        bare, whole = (statistics.median(times) for times in zip(*turns, strict=True))
        times = (significant(bare * 1e6), significant(whole * 1e6))
        cells = (*times, f"{whole / bare - 1:+.1%}", f"{verification.error:.1e}")
        rows.append((record.workload.text, record.schedule, *cells))
    if not rows:
        raise Error(f"no record of {device.name} is of a convolution with {args.only!r} in its text")
    headers = ("workload", "schedule", "without [µs]", f"{args.epilogue} [µs]", "cost", "rel. error")
    table = Table(headers, rows, left=frozenset(headers[:2]))
    source = provenance(device, shlex.join(["python", "scripts/epilogue_cost.py", *argv]))
    print(f"{table.text()}\n\n{source}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "epilogue.md").write_text(f"{table.markdown()}\n\n{source}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
