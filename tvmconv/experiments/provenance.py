"""Provenance: one line on the device, versions, date and command of measurements, for tables and charts."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata

from tvmconv.devices import Device
from tvmconv.version import VERSION

VERSION_NAMES = {"tvmconv": "tvmconv", "tvm": "TVM", "nvrtc": "NVRTC"}  # keys of versions, and the printed names


def describe_provenance(
    device: Device, command: str, library: str | None = None, builder_versions: Iterable[Mapping[str, str]] = ()
) -> str:
    """Return one line with the device, the versions of the software, the date and the command.

    Args:
        device: Device of the measurements.
        command: Command line.
        library: Version and settings of a baseline (`ResultRow.library`).
        builder_versions: Software versions of each kernel that another host built (default: those of this host).
    """
    versions = _list_builder_versions(list(builder_versions)) or _list_local_versions(device)
    versions += [*_list_driver_versions(device), *([library] if library else [])]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return f"{device.name}; {', '.join(versions)}; {today}; `{command}`"


def _list_builder_versions(builder_versions: list[Mapping[str, str]]) -> list[str]:
    """Return the versions of the software that built kernels, with several versions of a name if they differ."""
    versions_by_name = {
        name: dict.fromkeys(kernel_versions[key] for kernel_versions in builder_versions if key in kernel_versions)
        for key, name in VERSION_NAMES.items()
    }
    return [f"{name} {' and '.join(versions)}" for name, versions in versions_by_name.items() if versions]


def _list_local_versions(device: Device) -> list[str]:
    """Return the versions of the software that builds kernels on this host; TVM may be missing."""
    versions = [f"tvmconv {VERSION}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions.append(f"TVM {metadata.version('apache-tvm')}")
    if device.kind == "cuda":
        from tvmconv.compiler import nvrtc

        versions.append(f"NVRTC {nvrtc.get_version()}")
    return versions


def _list_driver_versions(device: Device) -> list[str]:
    """Return the versions of the software that runs kernels on the device."""
    if device.kind != "cuda":
        return [f"pyopencl {metadata.version('pyopencl')}"]
    driver = _nvidia_driver()
    return [f"driver {driver}"] if driver else []


def _nvidia_driver() -> str | None:
    """Return the version of NVIDIA's driver; None if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.splitlines()[0].strip() or None
