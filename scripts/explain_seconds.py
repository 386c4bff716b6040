"""How long a page of `tvmconv explain` takes, for every kernel that the shipped logs have.

    python scripts/explain_seconds.py --into docs/explain.md
    python scripts/explain_seconds.py --each 5 -o some.jsonl       # of each schedule the largest five layers

Runs the command as a user would, one process at a time, for each schedule and workload of which there is a valid
record. What takes longer than the limit is timed twice more, at the end, and the shortest counts: other programs run on
the machine, too. Each time is kept in a file as soon as it is known, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvmconv import devices
from tvmconv.cli.errors import Parser, UsageError, guarded
from tvmconv.cli.options import count, positive
from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.logs.lines import BadLines
from tvmconv.logs.log import read
from tvmconv.logs.shipped import shipped_logs
from tvmconv.reports.tables import Table, with_section

SECTION = "seconds"
AGAIN = 2  # times that what took longer than the limit is timed once more

Kernel = tuple[str, str]  # a schedule and a workload, as text


def main(argv: Sequence[str] | None = None) -> int:
    """Time, print, and write into a page."""
    return guarded("explain_seconds", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="explain_seconds", description="How long tvmconv explain takes for the shipped kernels.")
    parser.add_argument("--arch", default="sm_90", metavar="A", help="to explain for (default: %(default)s)")
    parser.add_argument("--each", type=count, metavar="N", help="of each schedule, the largest (default: all)")
    parser.add_argument("--limit", type=positive, default=3.0, metavar="S", help="seconds (default: %(default)g)")
    parser.add_argument(
        "-o", dest="out", type=Path, default=Path("explain-seconds.jsonl"), metavar="FILE", help="what was timed"
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between this page's markers")
    args = parser.parse_args(argv)
    device = devices.find(args.arch)
    wanted = shipped_kernels(args.each)
    took = _kept(args.out)
    with progress_line("explain_seconds: ") as show, args.out.open("a", encoding="utf-8") as out:
        for turn in range(1 + AGAIN):
            due = [each for each in wanted if took.get(each, math.inf) > args.limit and (turn or each not in took)]
            for place, each in enumerate(due):
                show(f"{place} of {len(due):,}, {' of '.join(each)}")
                took[each] = min(round(seconds_of(each, args.arch), 3), took.get(each, math.inf))
                out.write(json.dumps([*each, took[each]]) + "\n")
                out.flush()
    table = seconds_table({each: took[each] for each in wanted}, args.limit)
    command = shlex.join(["python", "scripts/explain_seconds.py", *argv])
    note = f"On {os.cpu_count()} cores, {processor()}. {provenance(device, command)}"
    print(f"{table.text()}\n\n{note}")
    if args.into:
        page = args.into.read_text(encoding="utf-8")
        args.into.write_text(with_section(page, SECTION, f"{table.markdown()}\n\n{note}"), encoding="utf-8")
    return 0


def shipped_kernels(most: int | None) -> list[Kernel]:
    """Each schedule and workload of which the shipped logs have a valid record: of a schedule the largest layers."""
    flops: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for log in shipped_logs():
        for record in read(log, BadLines()):
            if record.ok:
                flops[record.schedule][record.workload.text] = record.workload.flops
    return [
        (schedule, text)
        for schedule, layers in sorted(flops.items())
        for text in sorted(layers, key=lambda text: (-layers[text], text))[:most]
    ]


def seconds_of(kernel: Kernel, arch: str) -> float:
    """How long the command takes, from its start to its end.

    Raises:
        Error: it fails.
    """
    schedule, workload = kernel
    words = ["explain", workload, f"{schedule}:tuned", "--arch", arch]
    start = time.perf_counter()
    ended = subprocess.run([sys.executable, "-m", "tvmconv", *words], capture_output=True, text=True)
    took = time.perf_counter() - start
    if ended.returncode:
        raise Error(f"tvmconv {shlex.join(words)} ended with {ended.returncode}: {ended.stderr.strip()}")
    return took


def seconds_table(took: Mapping[Kernel, float], limit: float) -> Table:
    """One line a schedule, those that take longest first, and one for all of them."""
    of: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (schedule, workload), seconds in took.items():
        of[schedule][workload] = seconds
    rows = [_cells(name, own, limit) for name, own in sorted(of.items(), key=lambda each: -max(each[1].values()))]
    whole = {f"{workload} by {schedule}": seconds for (schedule, workload), seconds in took.items()}
    headers = ("schedule", "kernels", "median [s]", "longest [s]", f"over {limit:g} s", "the longest")
    return Table(headers, [*rows, _cells("all", whole, limit)], left=frozenset({"schedule", "the longest"}))


def _cells(name: str, took: Mapping[str, float], limit: float) -> tuple[str, ...]:
    longest = max(took, key=lambda text: took[text])
    over = sum(seconds > limit for seconds in took.values())
    median = statistics.median(took.values())
    return name, f"{len(took):,}", f"{median:.2f}", f"{took[longest]:.2f}", str(over), longest


def _kept(file: Path) -> dict[Kernel, float]:
    """What an earlier run timed; the last line of a kernel counts.

    Raises:
        UsageError: the file holds something else.
    """
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        return {(str(schedule), str(workload)): float(seconds) for schedule, workload, seconds in rows}
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{file} is not what this script writes: {error}") from error


def processor() -> str:
    """What the machine's processor is called."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    told = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(told, platform.processor() or platform.machine())


if __name__ == "__main__":
    sys.exit(main())
