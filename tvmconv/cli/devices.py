"""`tvmconv devices`: list the devices of this host, and why devices are missing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvmconv.devices import DeviceStatus, list_devices
from tvmconv.reports.tables import EMPTY_CELL, Table


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("devices", help="list the devices of this host, and why devices are missing")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the devices, and for each kind that is missing the reason and a remedy."""
    entries = list_devices()
    if args.json:
        print(json.dumps([_to_json(entry) for entry in entries]))
        return 0
    headers = ("device", "name", "memory [GB]", "multiprocessors", "architecture")
    rows = [_make_cells(entry) for entry in entries if entry.name]
    print(Table(headers, rows, left_aligned=frozenset({"device", "name", "architecture"})).format_text())
    for entry in entries:
        if not entry.name:
            print(f"\nno {entry.text}: {entry.reason}\n  remedy: {entry.remedy}")
    return 0


def _make_cells(entry: DeviceStatus) -> list[str]:
    device = entry.device
    memory = device and device.memory_bytes and f"{device.memory_bytes / 1e9:.1f}"
    multiprocessors = device and device.multiprocessors and str(device.multiprocessors)
    return [
        entry.text,
        entry.name or EMPTY_CELL,
        memory or EMPTY_CELL,
        multiprocessors or EMPTY_CELL,
        _find_arch(entry) or EMPTY_CELL,
    ]


def _find_arch(entry: DeviceStatus) -> str | None:
    return entry.device.arch if entry.device else None


def _to_json(entry: DeviceStatus) -> dict[str, Any]:
    device = entry.device
    return {
        "device": entry.text,
        "name": entry.name,
        "memory_bytes": device and device.memory_bytes,
        "multiprocessors": device and device.multiprocessors,
        "architecture": _find_arch(entry),
        "peak_flops": device and device.peak_flops,
        "peak_bandwidth": device and device.peak_bandwidth,
        "reason": entry.reason,
        "remedy": entry.remedy,
    }
