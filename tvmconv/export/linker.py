"""Linking of a CUDA kernel and its host code to a shared library for TVM's runtime."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredModule

_ERROR_HEADING = "Compilation error:"  # line before the compiler's output in TVM's errors


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
