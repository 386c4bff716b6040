"""What an epilogue costs: the fastest records of logs with it and without, timed in turns.

    python scripts/epilogue_cost.py tuning_logs --only 64x64 --device cuda:0 -o results

With the epilogue, that is the same config, or one that the logs have of a search with the epilogue, where it is faster;
it is verified first. Writes DIR/epilogue.md.
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
    found = {record.workload: record for record in best_of_each(logs, device=device.name)}
    bare = [record for w, record in found.items() if isinstance(w, Conv) and not w.epilogue and args.only in w.text]
    rows = []
    for record in bare:
        finished = tc.parse(f"{record.workload.text},{args.epilogue}")
        asked = [(record.workload, record), (finished, record)]
        if own := found.get(finished):
            asked.append((finished, own))
        kernels = [tc.build(w, each.schedule, config=each.config, device=device) for w, each in asked]
        problems = [Problem(w) for w, _ in asked]
        errors = [kernel.verify(problem) for kernel, problem in zip(kernels, problems, strict=True)]
        if wrong := [
            f"{kernel} is wrong by {it.error:.2g}" for kernel, it in zip(kernels, errors, strict=True) if not it.ok
        ]:
            raise Error(wrong[0])
        turns = [
            [kernel.time(problem, seconds=0.05).median for kernel, problem in zip(kernels, problems, strict=True)]
            for _ in range(args.rounds)
        ]
        without, *others = (statistics.median(times) for times in zip(*turns, strict=True))
        chosen = min(range(len(others)), key=others.__getitem__)
        times = (significant(without * 1e6), significant(others[chosen] * 1e6))
        cells = (
            *times,
            f"{others[chosen] / without - 1:+.1%}",
            ("same", "own")[chosen],
            f"{errors[chosen + 1].error:.1e}",
        )
        rows.append((record.workload.text, record.schedule, *cells))
    if not rows:
        raise Error(f"no record of {device.name} is of a convolution with {args.only!r} in its text")
    headers = ("workload", "schedule", "without [µs]", f"{args.epilogue} [µs]", "cost", "config", "rel. error")
    table = Table(headers, rows, left=frozenset(headers[:2]))
    source = provenance(device, shlex.join(["python", "scripts/epilogue_cost.py", *argv]))
    print(f"{table.text()}\n\n{source}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "epilogue.md").write_text(f"{table.markdown()}\n\n{source}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
