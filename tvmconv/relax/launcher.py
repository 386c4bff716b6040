"""CUDA kernels as external functions of a library that TVM exports: their machine code, and the C code that launches
them.

TVM's runtime neither encodes tensor maps nor launches clusters or dependent launches. The C source module of this file
does. TVM compiles it into the library by the system's C compiler when the library is exported, so that the library
needs TVM's runtime and the CUDA driver, but neither tvmconv nor Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable
from tvmconv.errors import CompileError
from tvmconv.tensor_map import TensorMap

LAUNCHER_PATH = Path(__file__).with_name("launcher.c")
MAX_ARRAYS, MAX_PARAMS, MAX_KERNELS, MAX_AXES = 24, 24, 8, 5  # sizes of arrays in launcher.c
# CUtensorMapDataType and CUtensorMapSwizzle in cuda.h.
MAP_DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
# Code and bits of DLDataType in dlpack.h.
DLPACK_DTYPES = {"int8": (0, 8), "int32": (0, 32), "float16": (2, 16), "float32": (2, 32), "bfloat16": (4, 16)}
LITERAL_BYTES = 4096  # bytes of machine code per line of the source
ESCAPES = [f"\\{byte:03o}" for byte in range(256)]


def check_executable(executable: Executable, schedule: str) -> None:
    """Raise CompileError for a kernel that the C code cannot launch: it takes no constant memory and no texture."""
    for kernel in executable.kernels:
        if kernel.constants or kernel.textures:
            raise CompileError(f"{schedule} reads constant memory or a texture: expected global memory")
    num_arrays = len(executable.arrays) + len(executable.workspace)
    num_params = max(len(kernel.arguments) for kernel in executable.kernels)
    if num_arrays > MAX_ARRAYS or num_params > MAX_PARAMS or len(executable.kernels) > MAX_KERNELS:
        raise CompileError(f"{schedule} has too many arrays, parameters or device functions for a call by Relax")
    for array in (*executable.arrays, *executable.workspace):
        if array.dtype not in DLPACK_DTYPES:
            raise CompileError(f"{schedule} has an array of {array.dtype}: expected {', '.join(DLPACK_DTYPES)}")


def make_launcher_module(executables: Mapping[str, Executable], arch: str | None) -> Any:
    """Return a C source module of TVM whose functions launch kernels on TVM's current CUDA stream.

    The arguments of a function are the executable's arrays and then its workspace, as tensors on one CUDA device.

    Args:
        executables: Compiled kernel by the name of the function.
        arch: Architecture that the kernels were compiled for.
    """
    import tvm  # noqa: F401  registers the function
    import tvm_ffi

    source = format_launcher_source(executables, arch)
    return tvm_ffi.get_global_func("runtime.CSourceModuleCreate")(source, "c", list(executables), [])


def format_launcher_source(executables: Mapping[str, Executable], arch: str | None) -> str:
    """Return the C source of `make_launcher_module`."""
    parts = [LAUNCHER_PATH.read_text(encoding="utf-8")]
    for symbol, executable in executables.items():
        parts.extend(_format_function(symbol, arch or "another target", executable))
    functions = "".join(f"  unload(&{symbol}_state);\n" for symbol in executables)
    parts.append(
        "static void unload(State* state) {\n"
        "  if (state->library) driver.cuLibraryUnload(state->library); /* fails, without harm, if the process ends */\n"
        "}\n\n"
        f"__attribute__((destructor)) static void unload_all(void) {{\n{functions}}}\n"
    )
    return "\n".join(parts)


def _format_function(symbol: str, arch: str, executable: Executable) -> Iterator[str]:
    """Yield the tables of a function, and its entry point."""
    arrays = [*executable.arrays, *executable.workspace]
    maps: list[TensorMap] = []
    kernels = [_format_kernel(symbol, kernel, maps) for kernel in executable.kernels]
    yield _format_bytes(f"{symbol}_cubin", executable.kernels[0].code)
    yield _format_table(f"ArrayType {symbol}_arrays", [_format_array(array) for array in arrays])
    if maps:
        yield _format_table(f"TensorMap {symbol}_maps", [_format_map(each) for each in maps])
    yield _format_table(f"Kernel {symbol}_kernels", kernels)
    yield f"static State {symbol}_state;"
    fields = (f'"{symbol}"', f'"{arch}"', f"{symbol}_cubin", str(len(arrays)), str(len(kernels)))
    tables = f"{symbol}_arrays, {symbol}_kernels, &{symbol}_state"
    yield f"static const Function {symbol}_function = {{{', '.join(fields)}, {tables}}};"
    yield (
        f"EXPORT int __tvm_ffi_{symbol}(void* self, const TVMFFIAny* arguments, int32_t num_arguments, "
        "TVMFFIAny* result) {\n"
        "  (void)self;\n"
        f"  return run(&{symbol}_function, arguments, num_arguments, result);\n"
        "}\n"
    )


def _format_kernel(symbol: str, kernel: CompiledKernel, maps: list[TensorMap]) -> str:
    """Return the initializer of a kernel, and append its tensor maps to `maps`."""
    map_by_position = dict(kernel.tensor_maps)
    params = []
    for position, array in enumerate(kernel.arguments):
        pointer = "0"
        if position in map_by_position:
            pointer = f"&{symbol}_maps[{len(maps)}]"
            maps.append(map_by_position[position])
        params.append(f"{{{array}, {pointer}}}")
    launch = (_format_numbers(kernel.launch.grid), _format_numbers(kernel.launch.block))
    numbers = (kernel.dynamic_shared_bytes, int(kernel.uses_pdl), len(params))
    return f'{{"{kernel.name}", {", ".join(launch)}, {", ".join(map(str, numbers))}, {{{", ".join(params)}}}}}'


def _format_map(tensor_map: TensorMap) -> str:
    kind = (MAP_DTYPES[tensor_map.dtype], len(tensor_map.extents), MAP_SWIZZLES[tensor_map.swizzle])
    fields = [*map(str, kind), str(int(tensor_map.is_im2col))]
    numbers = (tensor_map.extents, tensor_map.strides, tensor_map.box, tensor_map.element_strides)
    fields += map(_format_numbers, (*numbers, tensor_map.lower_corner, tensor_map.upper_corner))
    return f"{{{', '.join(fields)}}}"


def _format_array(array: ArrayType) -> str:
    code, bits = DLPACK_DTYPES[array.dtype]
    return f"{{{code}, {bits}, {len(array.shape)}, {_format_numbers(array.shape)}}}"


def _format_numbers(numbers: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, numbers)) or '0'}}}"


def _format_table(declaration: str, entries: Sequence[str]) -> str:
    lines = ",\n".join(f"  {entry}" for entry in entries)
    return f"static const {declaration}[] = {{\n{lines}\n}};"


def _format_bytes(name: str, data: bytes) -> str:
    """Return an array of bytes as string literals, which compilers read much faster than lists of numbers."""
    lines = (data[start : start + LITERAL_BYTES] for start in range(0, len(data), LITERAL_BYTES))
    literals = "\n".join(f'  "{"".join(map(ESCAPES.__getitem__, line))}"' for line in lines)
    return f"static const unsigned char {name}[] __attribute__((aligned(64))) =\n{literals};"
