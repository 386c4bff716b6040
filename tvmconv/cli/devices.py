"""List the devices of this host, and why devices are missing."""

from __future__ import annotations

import argparse
from typing import Any

from tvmconv.cli import output
from tvmconv.devices import DeviceStatus, list_devices
from tvmconv.reports.tables import EMPTY_CELL, Table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    output.add_table_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the devices, and for each kind that is missing the reason and a remedy."""
    entries = [_to_json(status) for status in list_devices()]
    headers = ("device", "name", "memory [GB]", "multiprocessors", "architecture")
    rows = [_make_cells(entry) for entry in entries if entry["name"]]
    output.print_table(Table(headers, rows, frozenset({"device", "name", "architecture"})), args, entries)
    for entry in entries:
        if not entry["name"] and not (args.json or args.csv):
            print(f"\nno {entry['device']}: {entry['reason']}\n  remedy: {entry['remedy']}")
    return 0


def _make_cells(entry: dict[str, Any]) -> list[str]:
    memory = entry["memory_bytes"] and f"{entry['memory_bytes'] / 1e9:.1f}"
    cells = (entry["device"], entry["name"], memory, entry["multiprocessors"], entry["architecture"])
    return [str(cell or EMPTY_CELL) for cell in cells]


def _to_json(status: DeviceStatus) -> dict[str, Any]:
    device = status.device
    return {
        "device": status.text,
        "name": status.name,
        "memory_bytes": device and device.memory_bytes,
        "multiprocessors": device and device.multiprocessors,
        "architecture": device and device.arch,
        "peak_flops": device and device.peak_flops,
        "peak_bandwidth": device and device.peak_bandwidth,
        "reason": status.reason,
        "remedy": status.remedy,
    }
