"""Import of GPU arrays of other libraries without a copy, through DLPack (https://dmlc.github.io/dlpack)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvmconv.compiler.executable import Executable
from tvmconv.devices.device import Device, check_inputs, get_first_line
from tvmconv.errors import DeviceError
from tvmconv.optional_packages import format_install_command


@dataclass(frozen=True)
class DLPackArgs:
    """Arrays of one kernel call."""

    pointers: tuple[int, ...]  # addresses of the inputs and the output
    output: Any  # output as an array of the first input's library
    workspace: tuple[int, ...]  # addresses of the workspace arrays, which that library reuses in stream order
    stream: int  # handle of the library's current stream
    owners: tuple[Any, ...]  # objects that keep the memory of inputs and workspace alive


def import_dlpack(inputs: Sequence[Any], executable: Executable, device: Device) -> DLPackArgs:
    """Import inputs through DLPack without a copy, and let their library allocate output and workspace."""
    import tvm

    try:
        arrays = [tvm.runtime.from_dlpack(array) for array in inputs]
    except Exception as error:  # each library raises its own exceptions
        raise DeviceError(f"{device.text} cannot take the inputs through DLPack: {get_first_line(error)}") from error
    for i, array in enumerate(arrays):
        if array.device != tvm.cuda(device.index):
            raise DeviceError(f"input {i} is on {array.device}: expected {device.text}")
        if not array.is_contiguous():
            raise DeviceError(f"input {i} is not contiguous: expected C order")
    check_inputs(executable, arrays)
    stream, allocate = _find_producer(inputs[0], device.index)
    try:
        output = allocate(executable.output.shape, executable.output.dtype)
    except (AttributeError, TypeError) as error:  # the library has no bfloat16
        library = type(inputs[0]).__module__.partition(".")[0]
        raise DeviceError(f"{library} has no arrays of the output's dtype {executable.output.dtype}") from error
    workspace = [tvm.runtime.from_dlpack(allocate((array.nbytes,), "uint8")) for array in executable.workspace]
    arrays.append(tvm.runtime.from_dlpack(output))
    return DLPackArgs(
        pointers=tuple(array.data_ptr() for array in arrays),
        output=output,
        workspace=tuple(array.data_ptr() for array in workspace),
        stream=stream,
        owners=(*arrays, *workspace),
    )


def _find_producer(array: Any, index: int) -> tuple[int, Callable[[tuple[int, ...], str], Any]]:
    """Return the current stream of an array's library and its function that allocates an array on the GPU."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        torch = sys.modules["torch"]
        stream = torch.cuda.current_stream(index).cuda_stream
        return stream, lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    if library == "cupy":
        cupy = sys.modules["cupy"]

        def allocate(shape: tuple[int, ...], dtype: str) -> Any:
            with cupy.cuda.Device(index):
                return cupy.empty(shape, dtype)

        with cupy.cuda.Device(index):
            return cupy.cuda.get_current_stream().ptr, allocate
    import tvm

    load_tvm_runtime()
    # A DLPack consumer that names no stream receives the data in the order of the default stream.
    return 0, lambda shape, dtype: tvm.runtime.empty(shape, dtype, tvm.cuda(index))


@functools.cache
def load_tvm_runtime() -> None:
    """Load TVM's CUDA runtime library, which `import tvm` silently skips if it does not find libcudart."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("cudart")  # the wheel's folder is not on the loader's search path
        import tvm
        from tvm.base import _LOADED_LIBS
        from tvm_ffi.libinfo import load_lib_ctypes

        if "tvm_runtime_cuda" not in _LOADED_LIBS:  # TVM was imported before libcudart was loaded
            paths = tvm.libinfo.package_lib_paths()
            library = load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL", extra_lib_paths=paths)
            _LOADED_LIBS["tvm_runtime_cuda"] = library
    except (DynamicLibNotFoundError, OSError, RuntimeError) as error:
        reason = f"TVM's CUDA runtime does not load: {get_first_line(error)}"
        raise DeviceError(f"{reason}; {format_install_command('cudart')}") from error
