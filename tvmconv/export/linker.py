"""A CUDA kernel and its host code as one shared library that TVM's runtime loads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredModule

_ERROR_HEADING = "Compilation error:"  # TVM's, in a line of its own before what the compiler said


def link_library(lowered: LoweredModule, path: Path) -> None:
    """Write a shared library whose `main` takes the PrimFunc's arguments as DLPack tensors. Needs no GPU.

    The library holds the host code for this machine's kind of processor and the cubin; `tvm.runtime.load_module` loads
    it where TVM's CUDA runtime is.

    Args:
        lowered: a CUDA kernel.
        path: the library, `*.so`.

    Raises:
        CompileError: there is no C++ compiler to link with, or it fails; NVRTC rejects the kernel, or an argument does
            not lie in global memory.
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
    """The object file of the module's imports, as `tvm.runtime.Module.export_library` asks for it."""
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
    """TVM's packed imports with the machine code in place of its text.

    Where its CUDA runtime is not loaded, TVM packs a kernel's text, to be compiled wherever the library is loaded. The
    layout is that of `SerializeModuleToBytes` (tvm/src/target/codegen.cc) and `CUDAModuleNode::SaveToBytes`
    (tvm/src/backend/cuda/runtime/cuda_module.cc); strings, bytes and payloads follow their length, a little-endian
    uint64::

        length | import tree | "cuda" (the kind) | payload length | "cuda" or "cubin" (the format) | functions | code

    Args:
        blob: the imports, a single CUDA module.
        source: the module's text.
        image: the cubin.
    """
    code = _add_length_prefix(source)
    if not blob.endswith(code):  # TVM packed the machine code by itself
        return blob
    kind = _add_length_prefix(b"cuda")
    header, _, tail = blob[8 : -len(code)].partition(kind)
    functions = tail[8:].removeprefix(_add_length_prefix(b"cuda"))
    payload = _add_length_prefix(b"cubin") + functions + _add_length_prefix(image)
    return _add_length_prefix(header + kind + _add_length_prefix(payload))


def _add_length_prefix(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
