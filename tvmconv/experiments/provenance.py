"""Where numbers come from: one line to put beside every table and chart."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata

from tvmconv.devices import Device
from tvmconv.version import VERSION

VERSION_NAMES = {"tvmconv": "tvmconv", "tvm": "TVM", "nvrtc": "NVRTC"}  # as versions are told, and as they are named


def describe_provenance(
    device: Device, command: str, library: str | None = None, builder_versions: Iterable[Mapping[str, str]] = ()
) -> str:
    """The device, the versions of what made and ran the kernels, the date and the command, in one line.

    Args:
        device: where the numbers were measured.
        command: what was typed.
        library: what a baseline ran, with its version (`Row.library`).
        builder_versions: versions of what built the kernels, of each, where that was apart; by default they were built
            here.
    """
    versions = [
        *(_list_builder_versions(list(builder_versions)) or _list_local_versions(device)),
        *_list_driver_versions(device),
    ]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    version_text = ", ".join([*versions, *([library] if library else [])])
    return f"{device.name}; {version_text}; {today}; `{command}`"


def _list_builder_versions(builder_versions: list[Mapping[str, str]]) -> list[str]:
    """Of what built kernels apart, as they say; several where these differ."""
    versions_by_name = {
        name: dict.fromkeys(kernel_versions[key] for kernel_versions in builder_versions if key in kernel_versions)
        for key, name in VERSION_NAMES.items()
    }
    return [f"{name} {' and '.join(versions)}" for name, versions in versions_by_name.items() if versions]


def _list_local_versions(device: Device) -> list[str]:
    """Of what builds kernels here; TVM is none of it on a host without."""
    versions = [f"tvmconv {VERSION}"]
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions.append(f"TVM {metadata.version('apache-tvm')}")
    if device.kind == "cuda":
        from tvmconv.compiler import nvrtc

        versions.append(f"NVRTC {nvrtc.get_version()}")
    return versions


def _list_driver_versions(device: Device) -> list[str]:
    """Of what runs kernels on the device."""
    if device.kind != "cuda":
        return [f"pyopencl {metadata.version('pyopencl')}"]
    driver = _nvidia_driver()
    return [f"driver {driver}"] if driver else []


def _nvidia_driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.splitlines()[0].strip() or None
