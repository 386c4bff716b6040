"""Export of a kernel to a folder with source, binary, library, JSON description and README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.compiler import nvrtc
from tvmconv.errors import CompileError, Error
from tvmconv.export.formats import list_formats
from tvmconv.export.formats.base import ExportFormat
from tvmconv.export.readme import JSON_NAME, README_NAME, format_readme
from tvmconv.version import VERSION

if TYPE_CHECKING:
    from tvmconv.compiler.executable import CompiledKernel
    from tvmconv.kernel import Kernel
    from tvmconv.verification import Verification

LIBRARY_NAME = "kernel.so"


@dataclass(frozen=True)
class ExportResult:
    """Result of an export."""

    files: tuple[Path, ...]
    library_error: str | None  # reason why no shared library was written; None if there is one


def export(kernel: Kernel, folder: Path, *, verification: Verification | None = None) -> ExportResult:
    """Write a kernel to a folder.

    The files are `kernel.cu` and `kernel.cubin` for CUDA or `kernel.cl` for OpenCL, `kernel.json`, and a `README.md`
    with examples that run. CUDA kernels also get `kernel.so` if a C++ compiler can link it and all arguments are in
    global memory. For OpenCL, TVM's wheel has no runtime that could load a library. Files of an earlier export are
    replaced, unless the kernel cannot be compiled.

    Raises:
        CompileError: The kernel cannot be compiled.
        Error: The folder holds something else.
    """
    if kernel.device.kind == "cuda":
        _ = kernel.cubin  # compiles before any file is written
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / README_NAME).exists() and not (folder / JSON_NAME).exists():
        raise Error(f"{folder / README_NAME} does not belong to an exported kernel: expected another folder")
    if (kind := _read_exported_kind(folder)) not in (None, kernel.device.kind):
        raise Error(f"{folder} holds a kernel for {kind}, not for {kernel.device.kind}: expected another folder")
    for name in (*(file_format.name for file_format in list_formats()), README_NAME, JSON_NAME):
        (folder / name).unlink(missing_ok=True)  # from an earlier export
    written_formats: list[ExportFormat] = []
    error_by_name: dict[str, str] = {}
    for file_format in list_formats():
        if kernel.device.kind in file_format.kinds:
            try:
                file_format.write(kernel, folder / file_format.name)
                written_formats.append(file_format)
            except CompileError as error:
                if not file_format.optional:
                    raise
                error_by_name[file_format.name] = str(error)
    description = describe_kernel(kernel, verification)
    (folder / JSON_NAME).write_text(_format_json_lines(description), encoding="utf-8")
    (folder / README_NAME).write_text(format_readme(kernel.workload, description, written_formats), encoding="utf-8")
    names = (*(file_format.name for file_format in written_formats), JSON_NAME, README_NAME)
    return ExportResult(tuple(folder / name for name in names), error_by_name.get(LIBRARY_NAME))


def _read_exported_kind(folder: Path) -> str | None:
    """Return the device kind of the kernel in a folder; None if the folder contains no export."""
    try:
        return str(json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))["target"]["kind"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def describe_kernel(kernel: Kernel, verification: Verification | None) -> dict[str, Any]:
    """Return the content of `kernel.json`, which describes the call and the origin of a kernel.

    `arguments` are those of the library's `main` in order, each with its memory scope ("space": `global`, `constant` or
    `texture`) and, for CUDA's constant memory, the symbol to fill. `kernels` are the device functions in launch order.
    Their `parameters` name the arguments and `workspace` buffers whose addresses or texture objects they take, in
    order; `tensor_maps` lists the positions that take a tensor map instead (`tvmconv.tensor_map`). The first
    `num_prepack_kernels` device functions read only weights, so that later calls with the same weights can skip them.
    The entries of a single device function are repeated at the top level. `target.code` is the architecture to compile
    `kernel.cu` for. Times are in seconds.
    """
    from importlib import metadata

    workload, record, executable = kernel.workload, kernel.record, kernel.executable
    symbols = {i: symbol for compiled_kernel in executable.kernels for i, symbol in compiled_kernel.constants}
    names = [*workload.argument_names, *(f"scratch{i}" for i in range(len(executable.workspace)))]
    kernel_descriptions = [_describe_compiled_kernel(compiled_kernel, names) for compiled_kernel in executable.kernels]
    compile_arch = kernel.device.arch and nvrtc.select_arch_variant(kernel.source, kernel.device.arch)
    return {
        "workload": workload.text,
        "schedule": kernel.schedule.name,
        "config": kernel.config,
        "target": {"kind": kernel.device.kind, "arch": kernel.device.arch, "code": compile_arch},
        "arguments": [
            {
                "name": name,
                "dtype": array.dtype,
                "shape": array.shape,
                "space": kernel.memory_scopes[name],
                "symbol": symbols.get(i),
            }
            for i, (name, array) in enumerate(zip(workload.argument_names, executable.arrays, strict=True))
        ],
        "workspace": [
            {"name": name, "bytes": array.nbytes}
            for name, array in zip(names[len(executable.arrays) :], executable.workspace, strict=True)
        ],
        "kernels": kernel_descriptions,
        "num_prepack_kernels": executable.num_prepack_kernels,
        **(kernel_descriptions[0] if len(kernel_descriptions) == 1 else {}),
        "measured": record
        and {
            "device": record.device,
            "seconds": record.cost,
            "gflops": record.gflops,
            "relative_error": record.relative_error,
            "timestamp": record.timestamp,
        },
        "verified": verification and {"device": kernel.device.name, "relative_error": verification.error},
        "versions": {"tvmconv": VERSION, "apache-tvm": metadata.version("apache-tvm")},
    }


def _describe_compiled_kernel(compiled_kernel: CompiledKernel, names: Sequence[str]) -> dict[str, Any]:
    resources = compiled_kernel.resources
    return {
        "function": compiled_kernel.name,
        "parameters": [names[i] for i in compiled_kernel.arguments],
        "grid": compiled_kernel.launch.grid,
        "block": compiled_kernel.launch.block,
        "cluster": compiled_kernel.launch.cluster,
        "shared_bytes": resources.shared_bytes if resources else compiled_kernel.shared_bytes,  # ptxas aligns arrays
        "dynamic_shared_bytes": compiled_kernel.dynamic_shared_bytes,
        "tensor_maps": [
            {"parameter": position, **tensor_map.to_dict()} for position, tensor_map in compiled_kernel.tensor_maps
        ],
        "registers": resources.registers if resources else None,
        "spills": resources.spills if resources else None,
    }


def _format_json_lines(description: dict[str, Any]) -> str:
    lines = (f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in description.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
