"""Print hashes of generated code, one line per kernel, and compare those of two checkouts.

    python scripts/generated_code.py > lines.txt
    python scripts/generated_code.py --against ../before                     # prints the lines that differ
    python scripts/generated_code.py --against ../before --suite d2l some.jsonl

A line has the kernel's label, the target, and a hash of launch and text. In both, each identifier is replaced by the
number of its first occurrence, so that the hash does not depend on names. The kernels are the defaults of every
schedule for the layers of suites, and the records of logs (by default those of `tuning_logs/`, and AutoTVM's in
`tests/data/`), for OpenCL and a CUDA architecture; no GPU is needed. A record's label is its line in the log, so that
the names of modules, schedules and knobs may differ as long as both checkouts read the log. The script uses only the
public names of `tvmconv`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import tvmconv as tc

ROOT = Path(__file__).resolve().parents[1]
LOGS = (ROOT / "tuning_logs", ROOT / "tests/data/tophub-cuda.jsonl")
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # identifiers, but not members or exponents and suffixes of numbers


class Case(NamedTuple):
    """A kernel to generate: its label, the workload and schedule or the line of a log, and the target."""

    label: str
    workload: str
    schedule: str
    line: str
    target: str


def cases(suites: Sequence[str], logs: Sequence[Path], arch: str) -> Iterator[Case]:
    """Yield all kernels in a stable order."""
    for w in dict.fromkeys(layer.workload for name in suites for layer in tc.suite(name)):
        for schedule in tc.schedules(w):
            for target in (arch, "opencl:0"):
                yield Case(f"{w.text} {schedule.name} default", w.text, schedule.name, "", target)
    for path in logs:
        for log in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), 1):
                for target in (arch, "opencl:0"):
                    yield Case(f"{log.name}:{number}", "", "", line, target)


def describe(case: Case) -> str:
    """Generate a kernel and return its line, with `refused` in place of the hash if it cannot be generated."""
    target: dict[str, Any] = {"arch": case.target} if case.target.startswith("sm_") else {"device": case.target}
    try:
        if case.line:
            record = tc.Record.parse(case.line)
            kernel = tc.build(record.workload, record.schedule, config=record.config, **target)
        else:
            kernel = tc.build(tc.parse(case.workload), case.schedule, **target)
        text = f"{rename(str(kernel.launch))}\n{rename(without_preamble(kernel.source))}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    except tc.Error:
        digest = "refused"
    return f"{case.label} {case.target} {digest}"


def without_preamble(source: str) -> str:
    """Return the text of a kernel from its first constant or function to its end."""
    starts = [source.find(word) for word in ("__constant__ ", 'extern "C"', "__kernel")]
    return source[min((start for start in starts if start >= 0), default=0) :]


def rename(text: str) -> str:
    """Return a text with each identifier replaced by the number of its first occurrence, `v0`, `v1` and so on."""
    numbers: dict[str, str] = {}
    return NAME.sub(lambda match: numbers.setdefault(match[0], f"v{len(numbers)}"), text)


def lines_of(checkout: Path, words: Sequence[str]) -> dict[str, str]:
    """Run this script with the package of another checkout; return the hashes by label and target."""
    command = [sys.executable, __file__, *words, "--checkout", str(checkout)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    printed = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return dict(line.rsplit(" ", 1) for line in printed.stdout.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Print all lines or those that differ, and return the exit status, which is 1 if a line differs."""
    parser = argparse.ArgumentParser(prog="generated_code", description="Print hashes of generated code.")
    parser.add_argument("logs", nargs="*", type=Path, default=LOGS, metavar="LOG", help="Logs, or folders of logs.")
    parser.add_argument("--suite", action="append", metavar="S", help="Suite whose defaults are used (default: all).")
    parser.add_argument("--arch", default="sm_90", help="CUDA architecture (default: %(default)s).")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="Number of processes (default: %(default)s).")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="Checkout to compare the code with.")
    parser.add_argument("--checkout", type=Path, default=ROOT, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not args.suite:
        from tvmconv.workloads.suites import SUITES

        args.suite = list(SUITES)
    if args.against:
        words = [*(str(log.resolve()) for log in args.logs), "--arch", args.arch, "--jobs", str(args.jobs)]
        words += [word for name in args.suite for word in ("--suite", name)]
        before, after = (lines_of(checkout.resolve(), words) for checkout in (args.against, ROOT))
        differing = [label for label in {**before, **after} if before.get(label) != after.get(label)]
        for label in differing:
            print(f"{label} {before.get(label, 'absent')} -> {after.get(label, 'absent')}")
        print(f"{len(differing)} of {len({**before, **after})} kernels differ", file=sys.stderr)
        return 1 if differing else 0
    if args.checkout.resolve() not in Path(str(tc.__file__)).resolve().parents:
        parser.error(f"expected a checkout, not {args.checkout}: tvmconv was imported from {tc.__file__}")
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(describe, cases(args.suite, args.logs, args.arch), chunksize=8):
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
