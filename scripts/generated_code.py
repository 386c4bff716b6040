"""Hashes of generated code, to see what a change of the schedules or the compiler changes in the kernels: a line each.

    python scripts/generated_code.py > before.txt         # in a checkout before the change
    python scripts/generated_code.py > after.txt          # in one after it
    diff before.txt after.txt

A line has the workload, the schedule, `default` or the log that the config is from, the target and a hash of launch and
text, in which every name is replaced by its place among them: what a kernel does is told from what its variables are
called. Generated are the defaults of every schedule on every layer of every suite, and the records of the logs that are
named (by default those of `tuning_logs/` and AutoTVM's in `tests/data/`), for OpenCL and a CUDA architecture; no GPU is
needed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import tvmconv as tc
from tvmconv.knobs import Config
from tvmconv.workloads.suites import SUITES

# Identifiers, numbers and operators' words are told apart by what may stand before them.
NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
LOGS = (Path("tuning_logs"), Path("tests/data/tophub-cuda.jsonl"))


class Case(NamedTuple):
    """A kernel: workload, schedule, where the config is from, the config, and what to generate for."""

    workload: str
    schedule: str
    source: str
    config: Config
    target: str


def cases(logs: Sequence[Path], arch: str) -> Iterator[Case]:
    """All kernels, in a stable order."""
    workloads = dict.fromkeys(layer.workload for name in SUITES for layer in tc.suite(name))
    for w in workloads:
        for schedule in tc.schedules(w):
            yield from _targets(w.text, schedule, "default", {}, arch)
    for path in logs:
        for log in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for number, line in enumerate(log.read_text().splitlines(), 1):
                try:
                    record = tc.Record.parse(line)
                except tc.RecordError:
                    continue
                for schedule in tc.schedules(record.workload):
                    if schedule.name == record.schedule and record.ok:
                        source = f"{log.name}:{number}"
                        yield from _targets(record.workload.text, schedule, source, record.config, arch)


def _targets(text: str, schedule: tc.Schedule, source: str, config: Config, arch: str) -> Iterator[Case]:
    for kind, target in (("cuda", arch), ("opencl", "opencl:0")):
        if schedule.runs_on(kind, arch if kind == "cuda" else None):
            yield Case(text, schedule.name, source, config, target)


def line(case: Case) -> str:
    """What is printed of a kernel."""
    arch = case.target if case.target.startswith("sm_") else None
    device = None if arch else case.target
    try:
        kernel = tc.build(tc.parse(case.workload), case.schedule, config=case.config or None, arch=arch, device=device)
        made = hashlib.sha256(f"{kernel.launch}\n{unnamed(kernel.source)}".encode()).hexdigest()[:16]
    except tc.Error as error:
        made = f"{type(error).__name__}: {error}"
    return f"{case.workload} {case.schedule} {case.source} {case.target} {made}"


def unnamed(source: str) -> str:
    """The kernel's text with its variables renamed to their places: `v0`, `v1` …; a preamble is left out."""
    start = max(source.find('extern "C"'), source.find("__kernel"), 0)
    constants = source.find("__constant__ ")
    text = source[min(start, constants) if constants >= 0 else start :]
    places: dict[str, str] = {}
    return NAME.sub(lambda match: places.setdefault(match[0], f"v{len(places)}"), text)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the lines."""
    parser = argparse.ArgumentParser(prog="generated_code", description="Hashes of generated code.")
    parser.add_argument("logs", nargs="*", type=Path, default=LOGS, metavar="LOG", help="logs, or folders of logs")
    parser.add_argument("--arch", default="sm_90", help="the CUDA architecture (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for text in pool.map(line, cases(args.logs, args.arch), chunksize=8):
            print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
