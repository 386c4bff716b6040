"""Times of the records of logs as two checkouts build them, taken in turns: what a change of the code costs in speed.

    git worktree add ../before v0.1
    python scripts/compare_checkouts.py ../before . tuning_logs --device cuda:0 -o results

Each checkout builds its kernels in a process of its own, from its own code; then the processes time them in turns, so
that a GPU's clocks are the same for both. Prints the largest ratios and their geometric mean, and writes all of them to
DIR/checkouts.json and .md.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv import devices
from tvmconv.cli.errors import Parser, guarded
from tvmconv.cli.options import count
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.logs.best import log_files
from tvmconv.reports.tables import Table, significant

SHOWN = 12

# Runs in either checkout, with nothing but what both have: the names that scripts and users rely on.
CHILD = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import tvmconv as tc
device, lines = json.loads(sys.stdin.readline())
records = [tc.Record.parse(line) for line in lines]
def build(record):
    kernel = tc.build(record.workload, record.schedule, config=record.config, device=device)
    kernel.loaded
    return kernel
with ThreadPoolExecutor(8) as threads:
    kernels = list(threads.map(build, records))
problems = {record.workload: tc.Problem(record.workload) for record in records}
print(json.dumps(tc.__file__), flush=True)
for _ in sys.stdin:
    times = [kernel.time(problems[kernel.workload], seconds=0.02).median for kernel in kernels]
    print(json.dumps(times), flush=True)
"""


class Checkout:
    """A process that builds and times the kernels of records with the code of one checkout."""

    def __init__(self, folder: Path, device: str, lines: Sequence[str]) -> None:
        path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",  # not a checkout, which would come first on the path
            text=True,
        )
        self._folder = folder
        self._send([device, list(lines)])
        self.code = Path(self._answer())
        if folder.resolve() not in self.code.parents:
            raise Error(f"{folder} is no checkout: tvmconv was imported from {self.code.parent}")

    def time(self) -> list[float]:
        """Seconds a launch of each kernel."""
        self._send("time")
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Error(f"the process of {self._folder} ended: see above")
        return json.loads(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two checkouts."""
    return guarded("compare_checkouts", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    parser = Parser(prog="compare_checkouts", description="Times of records as two checkouts build them.")
    parser.add_argument("before", type=Path, metavar="BEFORE", help="a checkout")
    parser.add_argument("after", type=Path, metavar="AFTER", help="another one")
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs, or folders of logs")
    parser.add_argument("--device", default="cuda:0", help="where to time (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="turns of each (default: %(default)s)")
    parser.add_argument("-o", dest="out", type=Path, metavar="DIR", help="write checkouts.json and .md there")
    args = parser.parse_args(argv)

    device = devices.find(args.device)
    lines = [line for file in log_files(args.logs) for line in file.read_text(encoding="utf-8").splitlines()]
    checkouts = [Checkout(folder, args.device, lines) for folder in (args.before, args.after)]
    try:
        rounds = [[checkout.time() for checkout in checkouts] for _ in range(args.rounds)]
    finally:
        for checkout in checkouts:
            checkout.close()
    before, after = (map(statistics.median, zip(*turns, strict=True)) for turns in zip(*rounds, strict=True))
    rows = sorted(zip(lines, before, after, strict=True), key=lambda row: -row[2] / row[1])
    mean = math.exp(statistics.fmean(math.log(b / a) for _, a, b in rows))
    table = Table(
        ("workload", "schedule", "before [µs]", "after [µs]", "after / before"),
        [_cells(*row) for row in rows],
        left=frozenset({"workload", "schedule"}),
    )
    shown = Table(table.headers, table.rows[:SHOWN], table.left)
    source = provenance(device, shlex.join(["python", "scripts/compare_checkouts.py", *argv]))
    ratios = f"geometric mean {mean:.4f}, largest {rows[0][2] / rows[0][1]:.4f}"
    summary = f"{len(rows)} records; after / before: {ratios}. {source}"
    print(f"{shown.text()}\n\n{summary}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        data = [{"record": json.loads(line), "before": b, "after": a} for line, b, a in rows]
        (args.out / "checkouts.json").write_text(json.dumps({"provenance": source, "records": data}), encoding="utf-8")
        (args.out / "checkouts.md").write_text(f"{table.markdown()}\n\n{summary}\n", encoding="utf-8")
    return 0


def _cells(line: str, before: float, after: float) -> tuple[str, ...]:
    row = json.loads(line)
    times = (significant(seconds * 1e6) for seconds in (before, after))
    return row["workload"], row["schedule"], *times, f"{after / before:.3f}"


if __name__ == "__main__":
    sys.exit(main())
