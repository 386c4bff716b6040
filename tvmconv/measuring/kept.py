"""Programs that were built before, kept on disk: a kernel of a log is there again without a compiler.

A program is kept under all that it is made from: the workload, the schedule, the config, the device, this library's own
files, and the versions of the compilers. Files are data: a header in JSON, and code for the device.
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
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from tvmconv.compiler.program import Program
from tvmconv.devices import Device
from tvmconv.files import read_bytes
from tvmconv.knobs import Config
from tvmconv.library import BUILT_IN, Schedule
from tvmconv.measuring.wire import decode_program, encode_program
from tvmconv.workloads import Workload

VARIABLE, NOWHERE = "TVMCONV_CACHE", "none"
MOST = 4000  # files; the oldest go
OURS = re.compile(r"(times-)?[0-9a-f]{64}")  # what their names begin with, in a folder that may have others
COMPILERS = ("apache-tvm", "apache-tvm-ffi", "cuda-bindings", "nvidia-cuda-nvrtc")


def folder() -> Path | None:
    """Where programs are kept: in `$TVMCONV_CACHE`, else in the user's cache; None for nowhere."""
    named = os.environ.get(VARIABLE)
    if named:
        return None if named == NOWHERE else Path(named)
    with contextlib.suppress(RuntimeError):  # there is no home
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tvmconv"
    return None


def find(workload: Workload, schedule: str, config: Config, device: Device) -> Program | None:
    """A program that was kept; None if there is none, or a file that it was made from has changed."""
    path = _path(workload, schedule, config, device)
    if path is None:
        return None
    try:
        header, _, code = read_bytes(path).partition(b"\n")
        told = json.loads(header)
        if any(_stamp(Path(name)) != stamp for name, stamp in told["sources"].items()):
            return None
        program, _ = decode_program(told["program"], code)
    except Exception:  # a file that is damaged raises what it likes
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # it is no longer among the oldest
    return program


def keep(workload: Workload, schedule: Schedule, config: Config, device: Device, program: Program) -> None:
    """Keep a program, if that is possible."""
    path = _path(workload, schedule.name, config, device)
    if path is None:
        return
    header, code = encode_program(program, None)
    source = Path(inspect.getsourcefile(inspect.unwrap(schedule.function)) or __file__)
    told = json.dumps({"program": header, "sources": {str(source): _stamp(source)}})
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=path.name, dir=path.parent, delete=False) as written:
            stack.callback(Path(written.name).unlink, missing_ok=True)
            written.write(told.encode() + b"\n" + code)
        os.replace(written.name, path)
        _thin(path.parent)


def _thin(where: Path) -> None:
    files = [file for file in where.iterdir() if OURS.match(file.name)]
    if len(files) > MOST:
        for file in sorted(files, key=lambda each: each.stat().st_mtime)[: len(files) - MOST]:
            file.unlink(missing_ok=True)


def _path(workload: Workload, schedule: str, config: Config, device: Device) -> Path | None:
    where = folder()
    if where is None:
        return None
    place = (device.kind, device.name, device.arch, str(device.limits))
    of = json.dumps([workload.text, schedule, sorted(config.items()), place, library()], default=str)
    return where / hashlib.sha256(of.encode()).hexdigest()


@functools.cache
def library() -> str:
    """What changes when this library or a compiler does."""
    places = [Path(__file__).parents[1], *map(Path, importlib.import_module(BUILT_IN).__path__)]
    files = sorted({file for place in places for file in place.rglob("*.py")})
    of = json.dumps([[str(file), _stamp(file)] for file in files] + [list(_versions())])
    return hashlib.sha256(of.encode()).hexdigest()


def _versions() -> Iterable[str]:
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield f"{name} {metadata.version(name)}"


def _stamp(file: Path) -> list[int]:
    """Size and time of a file; nothing if it is not there."""
    try:
        told = file.stat()
    except OSError:
        return []
    return [told.st_size, told.st_mtime_ns]
