"""Libraries of TVM with machine code for CUDA, exported on a machine without CUDA's runtime.

Where TVM finds no CUDA runtime, as on a machine without a GPU, its CUDA modules keep the source of their kernels. An
exported library then contains this source, and TVM compiles it when it loads the library, which needs NVRTC, CUDA's
headers and TVM's Python package, and takes a second or more. Here the source is replaced by machine code when the
library is exported.

TVM packs the imported modules of a library in one array of bytes (`ModuleSerializer` in src/target/codegen.cc), and a
CUDA module in such an array (`SaveToBytes` in src/backend/cuda/runtime/cuda_module.cc). Numbers have 64 bits, and a
string follows its length:

    array = size of the rest, row pointers, child indices, modules
    module = "_lib", or the name of its kind and its bytes
    bytes of a CUDA module = format ("cuda", "cubin", ...), table of its functions, code
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm.relax import VMExecutable
from tvm.runtime import Executable

from tvmconv.compiler import nvrtc
from tvmconv.compiler.cuda_environment import OPTIONS_VARIABLE, make_cuda_environment
from tvmconv.errors import CompileError

NUMBER_BYTES = 8
OBJECT_FILE = "imports.o"
LIBRARY_KEY, CUDA_KEY, SOURCE_FORMAT, BINARY_FORMAT = b"_lib", b"cuda", b"cuda", b"cubin"

CudaCompiler = Callable[[str], bytes]


class PrecompiledExecutable(VMExecutable):
    """TVM's executable of a Relax module for CUDA, whose libraries contain machine code and no CUDA source.

    Args:
        mod: Module of TVM's executable.
        arch: Architecture that its kernels are compiled for, such as "sm_90".
    """

    def __init__(self, mod: Any, arch: str) -> None:
        super().__init__(mod)
        self.arch = arch

    def export_library(
        self,
        file_name: str | os.PathLike[str],
        *,
        fcompile: Callable[..., Any] | None = None,
        addons: list[str] | None = None,
        workspace_dir: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Export a library as TVM's executable does, with the same arguments.

        Raises:
            CompileError: NVRTC is not available, or rejects a kernel of TVM.
        """
        return export_library(
            self, file_name, self.arch, fcompile=fcompile, addons=addons, workspace_dir=workspace_dir, **kwargs
        )


def export_library(executable: Any, file_name: str | os.PathLike[str], arch: str, **kwargs: Any) -> Any:
    """Export an executable of TVM as a library whose CUDA kernels are machine code.

    Args:
        executable: Result of `tvm.compile`, for a target of CUDA, or its module.
        file_name: Path of the library.
        arch: Architecture of the kernels that TVM has left as source.
        kwargs: Further arguments of TVM's `export_library`.

    Returns:
        What TVM's `export_library` returns.

    Raises:
        CompileError: NVRTC is not available, or rejects a kernel of TVM.

    Examples:
        >>> import tvm, tvmconv.relax
        >>> executable = tvm.compile(mod, target, relax_pipeline="tvmconv")  # doctest: +SKIP
        >>> tvmconv.relax.export_library(executable, "model.so", "sm_90")  # doctest: +SKIP
    """
    module = executable.mod if isinstance(executable, Executable) else executable
    if not has_cuda_runtime() and has_cuda_module(module):
        compile_cuda = functools.partial(compile_source, arch=arch)
        kwargs["fpack_imports"] = functools.partial(pack_imports, compile_cuda)
    return module.export_library(str(file_name), **kwargs)


def has_cuda_runtime() -> bool:
    """Return whether TVM's CUDA runtime is loaded, with which TVM compiles CUDA modules at once."""
    import tvm_ffi

    return tvm_ffi.get_global_func("ffi.Module.create.cuda", allow_missing=True) is not None


def has_cuda_module(module: Any) -> bool:
    """Return whether a module of TVM or one that it imports has kernels of TVM for CUDA. TVM generates host code with
    LLVM for these.
    """
    return module.kind == "cuda" or any(map(has_cuda_module, module.imports))


def compile_source(source: str, *, arch: str) -> bytes:
    """Return the machine code of a CUDA source of TVM, with the options that TVM would use.

    Headers of warp matrix instructions are found as `tvmconv.compiler.cuda_environment` describes.
    """
    return nvrtc.compile_cubin(source, arch, options=_list_include_options()).image


@functools.cache
def _list_include_options() -> list[str]:
    return shlex.split(make_cuda_environment().get(OPTIONS_VARIABLE, os.environ.get(OPTIONS_VARIABLE, "")))


def pack_imports(
    compile_cuda: CudaCompiler, module: Any, is_system_lib: bool, symbol_prefix: str, workspace_dir: str
) -> str:
    """Write the imported modules of a module of TVM to an object file, and return its path.

    Args:
        compile_cuda: Function that compiles the source of a CUDA module.
        module: Module that is exported. This argument and the others are those of `fpack_imports` in TVM's
            `export_library`.
        is_system_lib: Whether the library is linked into a program.
        symbol_prefix: Prefix of the symbol of the array.
        workspace_dir: Folder for the file.
    """
    import tvm  # noqa: F401  registers the functions
    import tvm_ffi

    pack, write_blob = map(tvm_ffi.get_global_func, ("runtime.ModulePackImportsToTensor", "codegen.codegen_blob"))
    host = next(each for each in module._collect_dso_modules() if each.kind == "llvm")
    blob = compile_cuda_modules(pack(module).numpy().tobytes(), compile_cuda)
    path = Path(workspace_dir) / f"{symbol_prefix}{OBJECT_FILE}"
    packed = write_blob(blob, is_system_lib, host.get_function("_get_target_string")(), symbol_prefix)
    packed.write_to_file(str(path))
    return str(path)


def compile_cuda_modules(blob: bytes, compile_cuda: CudaCompiler) -> bytes:
    """Return the array of a library's imported modules with machine code in place of CUDA source.

    Raises:
        CompileError: The array has another format, or the source does not compile.
    """
    reader = _Reader(blob)
    if reader.read_number() != len(blob) - NUMBER_BYTES:
        raise CompileError("the imported modules of TVM's library have an unknown format")
    num_modules = len(reader.read_numbers()) - 1
    reader.read_numbers()
    parts = [blob[NUMBER_BYTES : reader.position]]
    for _ in range(num_modules):
        key = reader.read_string()
        parts.append(_format_string(key))
        if key != LIBRARY_KEY:
            content = reader.read_string()
            parts.append(_format_string(_compile_module(content, compile_cuda) if key == CUDA_KEY else content))
    if reader.position != len(blob):
        raise CompileError("the imported modules of TVM's library have an unknown format")
    body = b"".join(parts)
    return _format_number(len(body)) + body


def _compile_module(content: bytes, compile_cuda: CudaCompiler) -> bytes:
    """Return the bytes of a CUDA module with machine code; a module that has no source stays as it is."""
    reader = _Reader(content)
    if reader.read_string() != SOURCE_FORMAT:
        return content
    table_start = reader.position
    source_start = next((p for p in range(table_start, len(content)) if _has_last_string(content, p)), None)
    if source_start is None:
        raise CompileError("a CUDA module of TVM has an unknown format")
    binary = compile_cuda(content[source_start + NUMBER_BYTES :].decode())
    return _format_string(BINARY_FORMAT) + content[table_start:source_start] + _format_string(binary)


def _has_last_string(content: bytes, start: int) -> bool:
    """Return whether a string begins at an index and ends at the end. Names of a table are shorter than its source."""
    end = start + NUMBER_BYTES
    return int.from_bytes(content[start:end], "little") == len(content) - end


class _Reader:
    """Reads numbers and strings from bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def read_number(self) -> int:
        return int.from_bytes(self._read(NUMBER_BYTES), "little")

    def read_numbers(self) -> Sequence[int]:
        return [self.read_number() for _ in range(self.read_number())]

    def read_string(self) -> bytes:
        return self._read(self.read_number())

    def _read(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise CompileError("the imported modules of TVM's library end too early")
        data, self.position = self.data[self.position : end], end
        return data


def _format_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little")


def _format_string(content: bytes) -> bytes:
    return _format_number(len(content)) + content
