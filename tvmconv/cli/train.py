"""Train the cost model from tuning logs.

Train the cost model from tuning logs, and write it to a file for --cost-model. The logs that come with tvmconv are used
as well.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tvmconv.cli import output
from tvmconv.cli.options import add_option
from tvmconv.cli.progress import progress_line
from tvmconv.cost_model.similarity import layer_key
from tvmconv.errors import Error, escape_unprintable
from tvmconv.logs.merge import check_output_path
from tvmconv.logs.packaged import packaged_logs, packaged_samples
from tvmconv.logs.ranking import list_log_files
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Table
from tvmconv.training import collect_samples, find_record_device_spec, read_valid_records, train
from tvmconv.version import VERSION
from tvmconv.workloads import Workload, suite
from tvmconv.workloads.conv_gradient import DerivedConv


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("logs", metavar="LOG", nargs="*", help="Log, or folder of logs; also compressed (.gz, .xz).")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE", help="Model file to write (.npz).")
    text = (
        "Name of a device whose records are used; the first is the model's device, and times on others "
        "count relative to their own peak rates (default: the device of most records)"
    )
    add_option(parser, "--device", "NAME", text, repeat=True)
    text = "Suite whose layers and their gradients are left out, in any batch size and dtype, for an evaluation on them"
    add_option(parser, "--hold-out", "SUITE", text, former="--without", repeat=True)
    parser.add_argument("--no-shipped", action="store_true", help="Use only the logs that are named.")
    output.add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Train a cost model, write it to a file, and print the number of samples of each schedule."""
    logs = [*list_log_files(args.logs), *([] if args.no_shipped else [*packaged_logs(), *packaged_samples()])]
    if not logs:
        raise Error("no logs to learn from")
    check_output_path(args.out, logs)
    records = _read_records(logs, args.device)
    excluded_layers = {_forward_key(layer.workload) for name in args.hold_out for layer in suite(name)}
    kept_records = [record for record in records if _forward_key(record.workload) not in excluded_layers]
    first_records = {record.device: record for record in reversed(records)}
    device_specs = {name: find_record_device_spec(record) for name, record in first_records.items()}
    names = args.device or [*device_specs]
    device_spec = device_specs[names[0]]
    if others := [name for name, spec in device_specs.items() if spec.arch != device_spec.arch]:
        raise Error(f"{others[0]} is not of the architecture of {names[0]}, {device_spec.arch}: train another model")
    date, command = time.strftime("%Y-%m-%d"), _make_command(args)
    note = f"{len(kept_records):,} records of {' and '.join(device_specs)}; tvmconv {VERSION}; {date}; `{command}`"
    with progress_line("train: ") as show:
        training_samples = collect_samples(kept_records, lambda text: show(f"reading {text}"), device_specs)
        cost_model = train(training_samples, device_spec, note, lambda name: show(f"learning {name}"))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    cost_model.save(args.out)
    rows = []
    for (operator, name), samples in sorted(training_samples.items()):
        num_configs = sum(len(sample.points) for sample in samples)
        learnt = "yes" if name in cost_model.schedule_models else "too little"
        rows.append((operator, name, f"{len(samples):,}", f"{num_configs:,}", learnt))
    headers = ("operator", "schedule", "workloads", "configs", "learnt")
    json_data = [dict(zip(headers, row, strict=True)) for row in rows]
    output.print_table(Table(headers, rows, frozenset({"operator", "schedule", "learnt"})), args, json_data)
    if not (args.json or args.csv):
        print(f"{escape_unprintable(str(args.out))}: {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _forward_key(w: Workload) -> str:
    """Return the key of the forward convolution of which a workload may be a gradient."""
    return layer_key(w.forward if isinstance(w, DerivedConv) else w)


def _make_command(args: argparse.Namespace) -> str:
    """Return the command that trains the same model from the same logs."""
    options = [f"--device={name}" for name in args.device]
    options += [f"--hold-out={name}" for name in args.hold_out]
    options += ["--no-shipped"] if args.no_shipped else []
    return shlex.join(["tvmconv", "train", *map(str, args.logs), *options])


def _read_records(logs: Sequence[Path], names: Sequence[str]) -> list[Record]:
    """Return the valid records of the named devices; by default of the device with the most records."""
    records: list[Record] = []
    with progress_line("train: ") as show:
        for number, log in enumerate(logs, 1):
            show(f"log {number} of {len(logs)}")
            records += read_valid_records(log)
    if not records:
        raise Error("no valid records in these logs")
    device_names = {record.device for record in records}
    if unknown := [name for name in names if name not in device_names]:
        raise Error(f"no records of {unknown[0]}; there are {', '.join(sorted(device_names))}")
    selected = names or [Counter(record.device for record in records).most_common(1)[0][0]]
    return [record for record in records if record.device in selected]
