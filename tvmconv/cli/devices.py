"""`tvmconv devices`: what can run or be compiled for here, and why not when not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvmconv.devices import Entry, inventory
from tvmconv.reports.tables import NOTHING, Table


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("devices", help="what can run or be compiled for here, and why not when not")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the devices; for what is not there, the reason and the remedy."""
    entries = inventory()
    if args.json:
        print(json.dumps([_json(entry) for entry in entries]))
        return 0
    there = [entry for entry in entries if entry.name]
    headers = ("device", "name", "memory [GB]", "multiprocessors", "architecture")
    print(Table(headers, [_cells(entry) for entry in there], left=frozenset({"device", "name", "architecture"})).text())
    for entry in entries:
        if not entry.name:
            print(f"\nno {entry.text}: {entry.reason}\n  remedy: {entry.remedy}")
    return 0


def _cells(entry: Entry) -> list[str]:
    device = entry.device
    memory = device and device.memory_bytes and f"{device.memory_bytes / 1e9:.1f}"
    multiprocessors = device and device.multiprocessors and str(device.multiprocessors)
    return [entry.text, entry.name or NOTHING, memory or NOTHING, multiprocessors or NOTHING, _arch(entry) or NOTHING]


def _arch(entry: Entry) -> str | None:
    return entry.device.arch if entry.device else None


def _json(entry: Entry) -> dict[str, Any]:
    device = entry.device
    return {
        "device": entry.text,
        "name": entry.name,
        "memory_bytes": device and device.memory_bytes,
        "multiprocessors": device and device.multiprocessors,
        "architecture": _arch(entry),
        "peak_flops": device and device.peak_flops,
        "peak_bandwidth": device and device.peak_bandwidth,
        "reason": entry.reason,
        "remedy": entry.remedy,
    }
