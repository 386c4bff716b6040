"""On-disk cache of built executables, which allows loading a kernel of a log without a compiler.

The key hashes all inputs of a build: workload, schedule, config, device, the source files of this package, and the
versions of the compilers. A file holds a checksum, a JSON header and device code. Without write access, nothing is
cached; damaged files are ignored.
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
MAX_FILES = 4000  # the oldest files beyond this number are deleted
CACHE_FILE_PATTERN = re.compile(r"(times-)?[0-9a-f]{64}")  # prefix of cache files; other files are never deleted
COMPILERS = ("apache-tvm", "apache-tvm-ffi", "cuda-bindings", "nvidia-cuda-nvrtc")


def find_cache_folder() -> Path | None:
    """Return the folder `$TVMCONV_CACHE` or else one in the user's cache; None if caching is disabled."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return None if named == DISABLED else Path(named)
    with contextlib.suppress(RuntimeError):  # no home directory
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmconv"
    return None


def lookup(workload: Workload, schedule: str, config: Config, device: Device) -> Executable | None:
    """Return a cached executable; None if there is none or the schedule's source file has changed."""
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
    except Exception:  # a file with a valid checksum may still have any content
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks the file as recently used
    return executable


def store(workload: Workload, schedule: Schedule, config: Config, device: Device, executable: Executable) -> None:
    """Write an executable to the cache if possible."""
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
    """Return a hash of the source files of this package and the versions of the compilers."""
    folders = [Path(__file__).parents[1], *map(Path, importlib.import_module(BUILT_IN).__path__)]
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    stamps = [[str(file), _make_file_stamp(file)] for file in files]
    return hashlib.sha256(json.dumps([*stamps, list(_list_compiler_versions())]).encode()).hexdigest()


def _list_compiler_versions() -> Iterable[str]:
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _make_file_stamp(file: Path) -> list[int]:
    """Return the size and modification time of a file; an empty list if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]
