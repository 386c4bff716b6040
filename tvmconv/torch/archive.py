"""The file of an optimized model: graph and weights by `torch.export`, and the kernels' machine code.

Loading it needs PyTorch and the launchers, not TVM. The machine code in a file is executed, so load only files from a
trusted source.
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

from tvmconv import compat, devices, jsonfile
from tvmconv.compiler.executable import ArrayType, Executable
from tvmconv.devices import Device
from tvmconv.errors import DeviceError, Error, ModelError, translate_to_model_error
from tvmconv.files import check_archive, open_regular
from tvmconv.measure.serialization import decode_executable, encode_executable
from tvmconv.torch import operator
from tvmconv.torch.launch import make_launcher
from tvmconv.torch.signature import parse_signature

VERSION = 2
READABLE_VERSIONS = (1, 2)  # version 1 has former names of keys
MAX_NAME = 100  # largest length of the name of a device or an architecture
HEADER_FILE, MODEL_FILE, CODE_FILE = "tvmconv.json", "model.pt2", "kernels/{}.bin"


def save(
    model: torch.nn.Module,
    example_arguments: Sequence[Any],
    kernel_names: Sequence[str],
    torch_device: torch.device,
    path: str | os.PathLike[str],
) -> None:
    """Write an optimized model to a file.

    Args:
        model: The model.
        example_arguments: Arguments of the model; the file computes inputs of these shapes.
        kernel_names: Names of the kernels that it runs.
        torch_device: PyTorch's device of the model.
        path: Path of the file.

    Raises:
        ModelError: `torch.export` does not accept the model.
        Error: The file cannot be written.
    """
    model_buffer = io.BytesIO()
    with translate_to_model_error(f"{type(model).__name__} cannot be saved"), torch.no_grad():
        torch.export.save(torch.export.export(model, tuple(example_arguments), strict=False), model_buffer)
    kernels, device = [], None
    for name in kernel_names:
        launcher: Any = operator.find_launcher(name, torch_device)
        device = launcher.device
        kernels.append((name, *encode_executable(launcher.program, None)))
    header = {
        "version": VERSION,
        "torch_device": str(torch_device),
        "device": None if device is None else {"name": device.name, "arch": device.arch},
        "kernels": [{"workload": name, "program": header} for name, header, _ in kernels],
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(HEADER_FILE, json.dumps(header))
            archive.writestr(MODEL_FILE, model_buffer.getvalue())
            for kernel_index, (_, _, code) in enumerate(kernels):
                archive.writestr(CODE_FILE.format(kernel_index), code)
    except OSError as error:
        raise Error(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def load(path: str | os.PathLike[str], *, device: str | None = None, rebuild: bool = False) -> torch.nn.Module:
    """Load a saved model, which computes inputs of the example's shapes.

    Args:
        path: Path of the file.
        device: tvmconv's device to run on; by default the GPU with the saved index, or the first OpenCL device.
        rebuild: Whether to build the kernels again, which needs TVM, if the file has them for another architecture.

    Returns:
        The model.

    Raises:
        DeviceError: The device does not exist, or its architecture differs and `rebuild` is false.
        ModelError: The file cannot be read, is not such a file, or has another version.
    """
    path_text = os.fspath(path)
    with translate_to_model_error(f"cannot read {path_text}"):
        archived = _read_archive(path)
        torch_device = torch.device(archived.torch_device_text)
        if archived.kernels:
            target_device = devices.find_device(
                device or (f"cuda:{torch_device.index}" if torch_device.type == "cuda" else "opencl:0")
            )
            if target_device.arch != archived.arch and not rebuild:
                raise DeviceError(
                    f"{path_text} has kernels of {archived.device_name} ({archived.arch}), but {target_device.text} is "
                    f"{target_device.name} ({target_device.arch}): rebuild=True builds them again"
                )
            for kernel in archived.kernels:
                _install_kernel(kernel, target_device, torch_device, rebuild=target_device.arch != archived.arch)
        return torch.export.load(io.BytesIO(archived.model)).module()


@dataclass(frozen=True)
class _ArchivedKernel:
    """A kernel of a file.

    Attributes:
        name: Name under which the model calls it; it begins with the workload's text.
        program: The executable.
    """

    name: str
    program: Executable


@dataclass(frozen=True)
class _ArchivedModel:
    """The contents of a file.

    Attributes:
        torch_device_text: Text of PyTorch's device.
        device_name: Name of the device for which the kernels were built; None without kernels.
        arch: Architecture of that device; None for OpenCL.
        kernels: All kernels that the model calls.
        model: Bytes that `torch.export.save` wrote.
    """

    torch_device_text: str
    device_name: str | None
    arch: str | None
    kernels: list[_ArchivedKernel]
    model: bytes


def _read_archive(path: str | os.PathLike[str]) -> _ArchivedModel:
    """Read and check a file, except for the model itself, which PyTorch reads; raise ModelError."""
    path_text = os.fspath(path)
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            check_archive(archive, _memory_bytes())
            header = jsonfile.parse_json(archive.read(HEADER_FILE))
            if header["version"].value not in READABLE_VERSIONS:
                version = header["version"].decode(int)
                raise ModelError(f"{path_text} has version {version}, expected {VERSION}: save the model again")
            device, arch = None, None
            if header["kernels"].elements():
                device = header["device"]["name"].decode_line(MAX_NAME)
                arch_value = header["device"]["arch"]
                arch = None if arch_value.value is None else arch_value.decode_line(MAX_NAME)
            codes = (archive.read(CODE_FILE.format(kernel_index)) for kernel_index in itertools.count())
            kernels = [
                _parse_kernel(kernel_data, code)
                for kernel_data, code in zip(header["kernels"].elements(), codes, strict=False)
            ]
            return _ArchivedModel(
                header.rename_members(compat.TORCH_ARCHIVE_KEYS)["torch_device"].decode_line(MAX_NAME),
                device,
                arch,
                kernels,
                archive.read(MODEL_FILE),
            )
    except ModelError:
        raise
    except (Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"cannot read {path_text}: {reason}") from error


def _parse_kernel(data: jsonfile.JsonValue, code: bytes) -> _ArchivedKernel:
    """Read a kernel and check that its executable takes the tensors of its workload."""
    name = data["workload"].decode(str)
    workload = parse_signature(name).workload
    program, _ = decode_executable(data["program"].decode(str), code)
    expected = [
        ArrayType(*array_type).nbytes
        for array_type in zip(workload.argument_shapes, workload.argument_dtypes, strict=True)
    ]
    data["program"].check([array.nbytes for array in program.arrays] == expected, f"a program for {workload.text}")
    return _ArchivedKernel(name, program)


def _memory_bytes() -> int:
    """Return the size of this machine's memory in bytes, the limit of a file that can be loaded."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _install_kernel(kernel: _ArchivedKernel, device: Device, torch_device: torch.device, *, rebuild: bool) -> None:
    signature, program = parse_signature(kernel.name), kernel.program
    if rebuild:
        from tvmconv.predicted_kernel import build_predicted

        program = build_predicted(signature.workload, device).executable
    operator.install_kernel(kernel.name, torch_device, make_launcher(signature, program, device, torch_device))
