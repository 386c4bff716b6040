"""`tvmconv train`: what logs have become a model, by which kernels are predicted and searches begin."""

from __future__ import annotations

import argparse
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvmconv.cli.progress import progress_line
from tvmconv.errors import Error, printable
from tvmconv.knowledge.likeness import layer_of
from tvmconv.logs.best import log_files
from tvmconv.logs.record import Record
from tvmconv.logs.shipped import shipped_logs, shipped_samples
from tvmconv.reports.tables import Table
from tvmconv.training import machine_of, measured, samples, train
from tvmconv.version import VERSION
from tvmconv.workloads import suite


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "train",
        help="learn from measured logs which configs are fast",
        description="Learn from measured logs which configs are fast, and write the model to a file, which --knowledge "
        "takes. The logs that come with tvmconv count as well.",
    )
    parser.add_argument("logs", metavar="LOG", nargs="*", help="a log, or a folder of logs; also .gz")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help="the model, a .npz")
    parser.add_argument("--device", metavar="NAME", help="whose records count (default: that of most records)")
    parser.add_argument(
        "--without",
        metavar="SUITE",
        action="append",
        default=[],
        help="leave out all records of its layers, in any batch and dtype: to see what the model makes of a network "
        "that it never saw; may be given several times",
    )
    parser.add_argument("--no-shipped", action="store_true", help="only the logs that are named")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, write, print what of."""
    logs = [*log_files(args.logs), *([] if args.no_shipped else [*shipped_logs(), *shipped_samples()])]
    if not logs:
        raise Error("no logs to learn from")
    records = _records(logs, args.device)
    left_out = {layer_of(layer.workload) for name in args.without for layer in suite(name)}
    kept = [record for record in records if layer_of(record.workload) not in left_out]
    machine = machine_of(records[0])
    date = time.strftime("%Y-%m-%d")
    note = f"{len(kept):,} records of {machine.name}; tvmconv {VERSION}; {date}; `{_command(args)}`"
    with progress_line("train: ") as show:
        made = samples(kept, lambda text: show(f"reading {text}"))
        knowledge = train(made, machine, note, lambda name: show(f"learning {name}"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    knowledge.save(args.out)
    rows = [
        (
            operator,
            name,
            f"{len(own):,}",
            f"{sum(len(sample.points) for sample in own):,}",
            _yes(name in knowledge.experts),
        )
        for (operator, name), own in sorted(made.items())
    ]
    headers = ("operator", "schedule", "workloads", "configs", "learnt")
    print(Table(headers, rows, left=frozenset({"operator", "schedule", "learnt"})).text())
    print(f"{printable(str(args.out))}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _command(args: argparse.Namespace) -> str:
    """What makes the same model of the same logs."""
    options = [f"--device={args.device}"] if args.device else []
    options += [f"--without={name}" for name in args.without]
    options += ["--no-shipped"] if args.no_shipped else []
    return shlex.join(["tvmconv", "train", *map(str, args.logs), *options])


def _yes(value: bool) -> str:
    return "yes" if value else "too little"


def _records(logs: Sequence[Path], name: str | None) -> list[Record]:
    """The valid records of the device of a name, or of the one that has most."""
    found: list[Record] = []
    with progress_line("train: ") as show:
        for number, log in enumerate(logs, 1):
            show(f"log {number} of {len(logs)}")
            found += measured(log)
    if not found:
        raise Error("no valid records in these logs")
    chosen = name or Counter(record.device for record in found).most_common(1)[0][0]
    kept = [record for record in found if record.device == chosen]
    if not kept:
        raise Error(f"no records of {chosen}; there are {', '.join(sorted({record.device for record in found}))}")
    return kept
