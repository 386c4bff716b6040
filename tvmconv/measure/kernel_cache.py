"""Programs that were built before, kept on disk: a kernel of a log is there again without a compiler.

A program is kept under all that it is made from: the workload, the schedule, the config, the device, this library's own
files, and the versions of the compilers. Files are data: a checksum, a header in JSON, and code for the device. Where
the folder cannot be written, nothing is kept; a file that is damaged is as good as none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tvmconv.checksummed_file import read_checked, write_checked
from tvmconv.compiler.executable import Executable
from tvmconv.devices import Device
from tvmconv.measure.serialization import decode_executable, encode_executable
from tvmconv.registry import BUILT_IN, Schedule
from tvmconv.space import Config
from tvmconv.workloads import Workload

CACHE_VARIABLE, DISABLED = "TVMCONV_CACHE", "none"
MAX_FILES = 4000  # files; the oldest go
CACHE_FILE_PATTERN = re.compile(
    r"(times-)?[0-9a-f]{64}"
)  # what their names begin with, in a folder that may have others
COMPILERS = ("apache-tvm", "apache-tvm-ffi", "cuda-bindings", "nvidia-cuda-nvrtc")


def find_cache_folder() -> Path | None:
    """Where programs are kept: in `$TVMCONV_CACHE`, else in the user's cache; None for nowhere."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return None if named == DISABLED else Path(named)
    with contextlib.suppress(RuntimeError):  # there is no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmconv"
    return None


def lookup(workload: Workload, schedule: str, config: Config, device: Device) -> Executable | None:
    """A program that was kept; None if there is none, or a file that it was made from has changed."""
    path = _make_entry_path(workload, schedule, config, device)
    if path is None:
        return None
    content = read_checked(path)
    if content is None:
        return None
    try:
        header, _, code = content.partition(b"\n")
        data = json.loads(header)
        if any(_make_file_stamp(Path(name)) != stamp for name, stamp in data["sources"].items()):
            return None
        executable, _ = decode_executable(data["program"], code)
    except Exception:  # a file that was made with the right checksum may still hold anything
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it is no longer among the oldest
    return executable


def store(workload: Workload, schedule: Schedule, config: Config, device: Device, executable: Executable) -> None:
    """Keep a program, if that is possible."""
    path = _make_entry_path(workload, schedule.name, config, device)
    if path is None:
        return
    header, code = encode_executable(executable, None)
    source = Path(inspect.getsourcefile(inspect.unwrap(schedule.function)) or __file__)
    data = json.dumps({"program": header, "sources": {str(source): _make_file_stamp(source)}})
    if write_checked(path, data.encode() + b"\n" + code):
        with contextlib.suppress(OSError):
            _evict_oldest(path.parent)


def _evict_oldest(folder: Path) -> None:
    files = [file for file in folder.iterdir() if CACHE_FILE_PATTERN.match(file.name)]
    if len(files) > MAX_FILES:
        for file in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - MAX_FILES]:
            file.unlink(missing_ok=True)


def _make_entry_path(workload: Workload, schedule: str, config: Config, device: Device) -> Path | None:
    folder = find_cache_folder()
    if folder is None:
        return None
    device_key = (device.kind, device.name, device.arch, str(device.limits))
    key_text = json.dumps([workload.text, schedule, sorted(config.items()), device_key, hash_sources()], default=str)
    return folder / hashlib.sha256(key_text.encode()).hexdigest()


@functools.cache
def hash_sources() -> str:
    """What changes when this library or a compiler does."""
    folders = [Path(__file__).parents[1], *map(Path, importlib.import_module(BUILT_IN).__path__)]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    hashed_text = json.dumps(
        [[str(file), _make_file_stamp(file)] for file in files] + [list(_list_compiler_versions())]
    )
    return hashlib.sha256(hashed_text.encode()).hexdigest()


def _list_compiler_versions() -> Iterable[str]:
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _make_file_stamp(file: Path) -> list[int]:
    """Size and time of a file; nothing if it is not there."""
    try:
        status = file.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]
