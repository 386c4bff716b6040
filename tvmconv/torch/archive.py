"""An optimised model as a file: the graph and the weights by `torch.export`, and the kernels' machine code.

To load it takes PyTorch and what launches kernels, not TVM. A file is a program: its machine code is run as it is, so
load only what comes from somebody you trust.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmconv import devices, jsonfile
from tvmconv.compiler.program import ArrayType, Program
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, ModelError, as_model_error
from tvmconv.files import check_archive, open_regular
from tvmconv.measuring.wire import decode_program, encode_program
from tvmconv.torch import operator
from tvmconv.torch.form import form_of
from tvmconv.torch.launch import launcher_of

VERSION = 1
MAX_NAME = 100  # characters of the name of a device or an architecture
HEAD, MODEL, CODE = "tvmconv.json", "model.pt2", "kernels/{}.bin"


def save(
    model: torch.nn.Module,
    example: Sequence[Any],
    names: Sequence[str],
    place: torch.device,
    path: str | os.PathLike[str],
) -> None:
    """Write an optimised model.

    Args:
        model: what to write.
        example: its arguments; the file computes inputs of these shapes.
        names: of the kernels that it runs.
        place: where it runs.
        path: of the file.

    Raises:
        ModelError: `torch.export` does not take the model.
        Error: the file cannot be written.
    """
    packed = io.BytesIO()
    with as_model_error(f"{type(model).__name__} cannot be saved"), torch.no_grad():
        torch.export.save(torch.export.export(model, tuple(example), strict=False), packed)
    kernels, device = [], None
    for name in names:
        launcher: Any = operator.launcher(name, place)
        device = launcher.device
        kernels.append((name, *encode_program(launcher.program, None)))
    head = {
        "version": VERSION,
        "place": str(place),
        "device": None if device is None else {"name": device.name, "arch": device.arch},
        "kernels": [{"workload": name, "program": header} for name, header, _ in kernels],
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(HEAD, json.dumps(head))
            archive.writestr(MODEL, packed.getvalue())
            for number, (_, _, code) in enumerate(kernels):
                archive.writestr(CODE.format(number), code)
    except OSError as error:
        raise Error(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def load(path: str | os.PathLike[str], *, device: str | None = None, rebuild: bool = False) -> torch.nn.Module:
    """A model that was saved: it computes inputs of the example's shapes.

    Args:
        path: of the file.
        device: ours, where it runs; by default the GPU of the number that it had, or the first device of OpenCL.
        rebuild: build the kernels anew, which takes TVM, where the file has them for another architecture.

    Raises:
        DeviceError: there is no such device, or it is of another architecture.
        ModelError: this is no such file, or of another version.
    """
    shown = os.fspath(path)
    with as_model_error(f"cannot read {shown}"):
        saved = _read(path)
        place = torch.device(saved.place)
        if saved.kernels:
            ours = devices.find(device or (f"cuda:{place.index}" if place.type == "cuda" else "opencl:0"))
            if ours.arch != saved.arch and not rebuild:
                raise DeviceError(
                    f"{shown} has kernels of {saved.device} ({saved.arch}), and {ours.text} is {ours.name} "
                    f"({ours.arch}): rebuild=True"
                )
            for kernel in saved.kernels:
                _install(kernel, ours, place, anew=ours.arch != saved.arch)
        return torch.export.load(io.BytesIO(saved.model)).module()


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a file.

    Attributes:
        name: under which the model calls it, which begins with its workload.
        program: the kernel.
    """

    name: str
    program: Program


@dataclass(frozen=True)
class _Saved:
    """What a file has.

    Attributes:
        place: text of PyTorch's device.
        device: name of the device that the kernels were built for; None without kernels.
        arch: its architecture; None on OpenCL.
        kernels: all that the model calls.
        model: what `torch.export.save` wrote.
    """

    place: str
    device: str | None
    arch: str | None
    kernels: list[_Kernel]
    model: bytes


def _read(path: str | os.PathLike[str]) -> _Saved:
    """Read a file, and check all but the model itself, which PyTorch reads; raises `ModelError`."""
    shown = os.fspath(path)
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            check_archive(archive, _memory_bytes())
            head = jsonfile.parse(archive.read(HEAD))
            if head["version"].value != VERSION:
                version = head["version"].decode(int)
                raise ModelError(f"{shown} is of version {version}, and this library reads {VERSION}: save it anew")
            device, arch = None, None
            if head["kernels"].elements():
                device = head["device"]["name"].line(MAX_NAME)
                named = head["device"]["arch"]
                arch = None if named.value is None else named.line(MAX_NAME)
            codes = (archive.read(CODE.format(number)) for number in itertools.count())
            kernels = [_kernel(each, code) for each, code in zip(head["kernels"].elements(), codes, strict=False)]
            return _Saved(head["place"].line(MAX_NAME), device, arch, kernels, archive.read(MODEL))
    except ModelError:
        raise
    except (Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read {shown}: {reason}") from error


def _kernel(data: jsonfile.Value, code: bytes) -> _Kernel:
    """Read a kernel, whose program has to take the tensors of its workload."""
    name = data["workload"].decode(str)
    w = form_of(name).workload
    program, _ = decode_program(data["program"].decode(str), code)
    expected = [ArrayType(*each).nbytes for each in zip(w.argument_shapes, w.argument_dtypes, strict=True)]
    data["program"].check([array.nbytes for array in program.arrays] == expected, f"a program for {w.text}")
    return _Kernel(name, program)


def _memory_bytes() -> int:
    """Return the size of this machine's memory: no file that can be loaded is larger."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _install(kernel: _Kernel, device: Device, place: torch.device, *, anew: bool) -> None:
    form, program = form_of(kernel.name), kernel.program
    if anew:
        from tvmconv.predicted import build_predicted

        program = build_predicted(form.workload, device).program
    operator.install(kernel.name, place, launcher_of(form, program, device, place))
