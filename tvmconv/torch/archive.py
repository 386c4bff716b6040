"""An optimised model as a file: the graph and the weights by `torch.export`, and the kernels' machine code.

To load it takes PyTorch and what launches kernels, not TVM. A file is a program: its machine code is run as it is, so
load only what comes from somebody you trust.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import torch

from tvmconv import devices
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, ModelError, as_model_error
from tvmconv.measuring.wire import decode_program, encode_program
from tvmconv.torch import operator
from tvmconv.torch.form import form_of
from tvmconv.torch.launch import launcher_of

VERSION = 1
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
        with zipfile.ZipFile(path) as archive:
            head = json.loads(archive.read(HEAD))
            if head["version"] != VERSION:
                raise ModelError(
                    f"{shown} is of version {head['version']}, and this library reads {VERSION}: save it anew"
                )
            packed = io.BytesIO(archive.read(MODEL))
            codes = [archive.read(CODE.format(number)) for number in range(len(head["kernels"]))]
        place = torch.device(head["place"])
        names = [str(kernel["workload"]) for kernel in head["kernels"]]
        if names:
            of, arch = head["device"]["name"], head["device"]["arch"]
            ours = devices.find(device or (f"cuda:{place.index}" if place.type == "cuda" else "opencl:0"))
            if ours.arch != arch and not rebuild:
                raise DeviceError(
                    f"{shown} has kernels of {of} ({arch}), and {ours.text} is {ours.name} ({ours.arch}): rebuild=True"
                )
            for name, kernel, code in zip(names, head["kernels"], codes, strict=True):
                _install(name, str(kernel["program"]), code, ours, place, anew=ours.arch != arch)
        return torch.export.load(packed).module()


def _install(name: str, header: str, code: bytes, device: Device, place: torch.device, *, anew: bool) -> None:
    if anew:
        from tvmconv.predicted import build_predicted

        program = build_predicted(form_of(name).workload, device).program
    else:
        program, _ = decode_program(header, code)
    operator.install(name, place, launcher_of(form_of(name), program, device, place))
