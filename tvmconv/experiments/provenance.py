"""Where numbers come from: one line to put beside every table and chart."""

from __future__ import annotations

import datetime
import subprocess
from importlib import metadata

from tvmconv.devices import Device
from tvmconv.version import VERSION


def provenance(device: Device, command: str, library: str | None = None) -> str:
    """The device, the versions of what made and ran the kernels, the date and the command, in one line.

    Args:
        device: where the numbers were measured.
        command: what was typed.
        library: what a baseline ran, with its version (`Row.library`).
    """
    versions = [f"tvmconv {VERSION}", *_tvm(), *_versions(device)]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    what = ", ".join([*versions, *([library] if library else [])])
    return f"{device.name}; {what}; {today}; `{command}`"


def _tvm() -> list[str]:
    """TVM's version; nothing where kernels were built elsewhere and only run here."""
    try:
        return [f"TVM {metadata.version('apache-tvm')}"]
    except metadata.PackageNotFoundError:
        return []


def _versions(device: Device) -> list[str]:
    """Of the compiler and the driver under the device."""
    if device.kind != "cuda":
        return [f"pyopencl {metadata.version('pyopencl')}"]
    from tvmconv.compiler import nvrtc

    driver = _nvidia_driver()
    return [f"NVRTC {nvrtc.version()}", *([f"driver {driver}"] if driver else [])]


def _nvidia_driver() -> str | None:
    """The version of NVIDIA's driver; None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() or None
