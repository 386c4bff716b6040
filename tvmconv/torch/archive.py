"""The file of an optimized model: graph and weights by `torch.export`, and the kernels' machine code.

Loading it needs PyTorch and the launchers, not TVM. The machine code in a file is executed, so load only files from a
trusted source.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Sequence
from typing import Any

import torch

from tvmconv import compat, devices, jsonfile
from tvmconv.compiler.executable import ArrayType, Executable
from tvmconv.errors import DeviceError, Error, ModelError, translate_to_model_error
from tvmconv.files import check_archive, open_regular
from tvmconv.jsonfile import JsonValue
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
    """Write an optimized model, for inputs of its example's shapes and with the kernels that it runs, to a file.

    Raises ModelError if `torch.export` does not accept the model, and Error if the file cannot be written.
    """
    model_buffer = io.BytesIO()
    with translate_to_model_error(f"{type(model).__name__} cannot be saved"), torch.no_grad():
        torch.export.save(torch.export.export(model, tuple(example_arguments), strict=False), model_buffer)
    launchers: list[Any] = [operator.find_launcher(name, torch_device) for name in kernel_names]
    programs = [encode_executable(launcher.program, None) for launcher in launchers]
    device = launchers[0].device if launchers else None
    header = {
        "version": VERSION,
        "torch_device": str(torch_device),
        "device": None if device is None else {"name": device.name, "arch": device.arch},
        "kernels": [
            {"workload": name, "program": program_header}
            for name, (program_header, _) in zip(kernel_names, programs, strict=True)
        ],
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(HEADER_FILE, json.dumps(header))
            archive.writestr(MODEL_FILE, model_buffer.getvalue())
            for kernel_index, (_, code) in enumerate(programs):
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

    Examples:
        >>> import torch, tvmconv.torch
        >>> optimized.save("model.tvmconv")  # doctest: +SKIP
        >>> model = tvmconv.torch.load("model.tvmconv")  # doctest: +SKIP
        >>> model(torch.randn(1, 4, 8, 8).cuda()).shape  # doctest: +SKIP
        torch.Size([1, 4, 8, 8])
    """
    path_text = os.fspath(path)
    with translate_to_model_error(f"cannot read {path_text}"):
        torch_device_text, saved_name, saved_arch, kernels, model = _read_archive(path)
        torch_device = torch.device(torch_device_text)
        if kernels:
            target_device = devices.find_device(
                device or (f"cuda:{torch_device.index}" if torch_device.type == "cuda" else "opencl:0")
            )
            is_other_arch = target_device.arch != saved_arch
            if is_other_arch and not rebuild:
                raise DeviceError(
                    f"{path_text} has kernels of {saved_name} ({saved_arch}), but {target_device.text} is "
                    f"{target_device.name} ({target_device.arch}): rebuild=True builds them again"
                )
            for name, program in kernels:
                signature = parse_signature(name)
                if is_other_arch:
                    from tvmconv.predicted_kernel import build_predicted

                    program = build_predicted(signature.workload, target_device).executable
                launcher = make_launcher(signature, program, target_device, torch_device)
                operator.install_kernel(name, torch_device, launcher)
        return torch.export.load(io.BytesIO(model)).module()


def _read_archive(
    path: str | os.PathLike[str],
) -> tuple[str, str | None, str | None, list[tuple[str, Executable]], bytes]:
    """Read and check a file, except for the model itself, which PyTorch reads; raise ModelError.

    Returns the text of PyTorch's device, name and architecture of the device that the kernels were built for, the
    kernels by name, and the model.
    """
    path_text, name, arch = os.fspath(path), None, None
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            check_archive(archive, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
            header = jsonfile.parse_json(archive.read(HEADER_FILE))
            if header["version"].value not in READABLE_VERSIONS:
                version = header["version"].decode(int)
                raise ModelError(f"{path_text} has version {version}, expected {VERSION}: save the model again")
            kernels = [
                _parse_kernel(kernel_data, archive.read(CODE_FILE.format(kernel_index)))
                for kernel_index, kernel_data in enumerate(header["kernels"].elements())
            ]
            if kernels:
                name, arch_value = header["device"]["name"].decode_line(MAX_NAME), header["device"]["arch"]
                arch = None if arch_value.value is None else arch_value.decode_line(MAX_NAME)
            torch_device_text = header.rename_members(compat.TORCH_ARCHIVE_KEYS)["torch_device"].decode_line(MAX_NAME)
            return torch_device_text, name, arch, kernels, archive.read(MODEL_FILE)
    except ModelError:
        raise
    except (Error, OSError) as error:
        raise ModelError(f"cannot read {path_text}: {getattr(error, 'strerror', None) or error}") from error


def _parse_kernel(data: JsonValue, code: bytes) -> tuple[str, Executable]:
    """Read a kernel's name and executable, and check that it takes the tensors of its workload."""
    name = data["workload"].decode(str)
    workload = parse_signature(name).workload
    program, _ = decode_executable(data["program"].decode(str), code)
    array_types = map(ArrayType, workload.argument_shapes, workload.argument_dtypes)
    expected = [array_type.nbytes for array_type in array_types]
    data["program"].check([array.nbytes for array in program.arrays] == expected, f"a program for {workload.text}")
    return name, program
