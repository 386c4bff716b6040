"""Format `kernel.so`: library of machine code and host code, with an example of a call through TVM's runtime."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError
from tvmconv.export.formats.base import ExportFormat, fill_example

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredModule
    from tvmconv.kernel import Kernel

_ERROR_HEADING = "Compilation error:"  # line before the compiler's output in TVM's errors
_EXAMPLE = """\
import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

load_nvidia_dynamic_lib("cudart")  # before TVM, which skips its CUDA runtime without this library
import tvm
{imports}
random = np.random.default_rng(0)
gpu = tvm.cuda(0)
{inputs}
{output} = tvm.runtime.empty({output_shape}, "{dtype}", gpu)

kernel = tvm.runtime.load_module("./kernel.so")["main"]
kernel({arguments})

{output} = {output}.numpy()
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""


def write_file(kernel: Kernel, path: Path) -> None:
    """Link the library; raises `CompileError` if it cannot be linked or TVM's runtime could not call it."""
    if kernel.device.kind != "cuda":
        raise CompileError("TVM's wheel has no OpenCL runtime")
    link_library(kernel.lowered_module, path)


def format_example(description: Mapping[str, Any]) -> list[str]:
    """Return the example of a call through TVM's runtime."""
    versions = description["versions"]
    install = (
        f'`pip install "apache-tvm=={versions["apache-tvm"]}" "apache-tvm-ffi>=0.1.14.post0,<0.1.15" cuda-pathfinder '
        '"cuda-toolkit[cudart]>=13,<14"`'
    )
    return [
        f"With TVM ({install}):",
        fill_example(_EXAMPLE, description, input_format="tvm.runtime.tensor({}, gpu)"),
        "`tvm.runtime.from_dlpack` passes a tensor of another library without a copy.",
    ]


def link_library(lowered: LoweredModule, path: Path) -> None:
    """Write a shared library whose `main` takes the PrimFunc's arguments as DLPack tensors; this needs no GPU.

    The library contains the cubin and host code for the type of this machine's processor. `tvm.runtime.load_module`
    loads it if TVM's CUDA runtime is available.
    """
    from tvm.support import cc

    module, image = lowered.build_runtime_module(), lowered.cubin.image
    if cc.get_cc() is None:
        raise CompileError("no C++ compiler to link with: install g++ or clang++, or name one in CXX")

    def pack(host: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        return _pack_imports(host, is_system_lib, prefix, Path(folder), image)

    try:
        module.export_library(str(path), fpack_imports=pack)
    except (OSError, RuntimeError) as error:
        messages = str(error).removeprefix(_ERROR_HEADING).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"{cc.get_cc()} does not link {path.name}: {messages[0]}") from error


def _pack_imports(host: Any, is_system_lib: bool, prefix: str, folder: Path, image: bytes) -> str:
    """Write the object file of the module's imports for `tvm.runtime.Module.export_library`, and return its path."""
    import tvm_ffi

    pack_imports = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")
    codegen_blob = tvm_ffi.get_global_func("codegen.codegen_blob")
    source = host.imports[0].inspect_source().encode()
    blob = replace_source_with_cubin(pack_imports(host).numpy().tobytes(), source, image)
    path = folder / "imports.o"
    packed = codegen_blob(blob, is_system_lib, host.get_function("_get_target_string")(), prefix)
    packed.write_to_file(str(path))
    return str(path)


def replace_source_with_cubin(blob: bytes, source: bytes, image: bytes) -> bytes:
    """Replace CUDA source in TVM's packed imports by machine code.

    Without its CUDA runtime, TVM packs the source of a kernel, which would be compiled when the library is loaded. The
    layout is that of `SerializeModuleToBytes` (tvm/src/target/codegen.cc) and `CUDAModuleNode::SaveToBytes`
    (tvm/src/backend/cuda/runtime/cuda_module.cc); strings, bytes and payloads follow their length, a little-endian
    uint64::

        length | import tree | "cuda" (the kind) | payload length | "cuda" or "cubin" (the format) | functions | code
    """
    code = _add_length_prefix(source)
    if not blob.endswith(code):  # TVM has already packed machine code
        return blob
    kind = _add_length_prefix(b"cuda")
    header, _, tail = blob[8 : -len(code)].partition(kind)
    functions = tail[8:].removeprefix(_add_length_prefix(b"cuda"))
    payload = _add_length_prefix(b"cubin") + functions + _add_length_prefix(image)
    return _add_length_prefix(header + kind + _add_length_prefix(payload))


def _add_length_prefix(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


FORMAT = ExportFormat(
    "kernel.so",
    "the machine code, and host code that checks arguments and launches, for TVM's runtime",
    ("cuda", "opencl"),
    write_file,
    format_example,
    order=2,
    optional=True,
)
