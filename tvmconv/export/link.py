"""A CUDA kernel and its host code as one shared library that TVM's runtime loads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.errors import CompileError

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import Lowered

_HEADING = "Compilation error:"  # TVM's, in a line of its own before what the compiler said


def link(lowered: Lowered, path: Path) -> None:
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

    module, image = lowered.executable(), lowered.cubin.image
    if cc.get_cc() is None:
        raise CompileError("no C++ compiler to link with: install g++ or clang++, or name one in CXX")

    def pack(host: Any, is_system_lib: bool, prefix: str, folder: str) -> str:
        return _pack(host, is_system_lib, prefix, Path(folder), image)

    try:
        module.export_library(str(path), fpack_imports=pack)
    except (OSError, RuntimeError) as error:
        said = str(error).removeprefix(_HEADING).strip().splitlines() or [type(error).__name__]
        raise CompileError(f"{cc.get_cc()} does not link {path.name}: {said[0]}") from error


def _pack(host: Any, is_system_lib: bool, prefix: str, folder: Path, image: bytes) -> str:
    """The object file of the module's imports, as `tvm.runtime.Module.export_library` asks for it."""
    import tvm_ffi

    pack_imports = tvm_ffi.get_global_func("runtime.ModulePackImportsToTensor")
    codegen_blob = tvm_ffi.get_global_func("codegen.codegen_blob")
    source = host.imports[0].inspect_source().encode()
    blob = with_image(pack_imports(host).numpy().tobytes(), source, image)
    path = folder / "imports.o"
    packed = codegen_blob(blob, is_system_lib, host.get_function("_get_target_string")(), prefix)
    packed.write_to_file(str(path))
    return str(path)


def with_image(blob: bytes, source: bytes, image: bytes) -> bytes:
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
    code = _counted(source)
    if not blob.endswith(code):  # TVM packed the machine code by itself
        return blob
    kind = _counted(b"cuda")
    before, _, rest = blob[8 : -len(code)].partition(kind)
    functions = rest[8:].removeprefix(_counted(b"cuda"))
    payload = _counted(b"cubin") + functions + _counted(image)
    return _counted(before + kind + _counted(payload))


def _counted(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
