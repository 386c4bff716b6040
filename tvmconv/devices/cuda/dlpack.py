"""Arrays of other libraries, taken where they lie in a GPU's memory (https://dmlc.github.io/dlpack)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.devices.device import check_inputs, get_first_line
from tvmconv.errors import DeviceError
from tvmconv.optional_packages import format_install_command

if TYPE_CHECKING:
    from tvmconv.compiler.executable import Executable
    from tvmconv.devices.cuda.gpu import NvidiaGpu


@dataclass(frozen=True)
class DLPackArgs:
    """The arrays of one call.

    Attributes:
        pointers: addresses of the inputs and the output.
        output: the output, as an array of the first input's library.
        workspace: addresses of the program's scratch memory, which that library takes back in the stream's order.
        stream: the stream on which that library is working.
        owners: what keeps the memory of inputs and scratch from being freed.
    """

    pointers: tuple[int, ...]
    output: Any
    workspace: tuple[int, ...]
    stream: int
    owners: tuple[Any, ...]


def import_dlpack(inputs: Sequence[Any], executable: Executable, device: NvidiaGpu) -> DLPackArgs:
    """Take inputs that speak DLPack without a copy, and let their library allocate the output and scratch memory.

    Raises:
        DeviceError: an input is no such array, is elsewhere, is not contiguous, or is not what the program takes.
    """
    import tvm

    try:
        arrays = [tvm.runtime.from_dlpack(array) for array in inputs]
    except Exception as error:  # each library raises its own
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
    except (AttributeError, TypeError) as error:  # a library without bfloat16
        library = type(inputs[0]).__module__.partition(".")[0]
        raise DeviceError(f"{library} has no arrays of {executable.output.dtype}, which the output is") from error
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
    """For the library that made `array`: the stream it is working on, and how it allocates an array on the GPU."""
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
    # To a consumer that names no stream, DLPack's producers hand over in the order of the default one.
    return 0, lambda shape, dtype: tvm.runtime.empty(shape, dtype, tvm.cuda(index))


@functools.cache
def load_tvm_runtime() -> None:
    """Load TVM's CUDA runtime library, which `import tvm` leaves out silently when it does not find libcudart.

    Raises:
        DeviceError: it does not load.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("cudart")  # where the wheels keep it, the dynamic loader does not look
        import tvm
        from tvm.base import _LOADED_LIBS
        from tvm_ffi.libinfo import load_lib_ctypes

        if "tvm_runtime_cuda" not in _LOADED_LIBS:  # TVM was imported before libcudart was there
            paths = tvm.libinfo.package_lib_paths()
            library = load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL", extra_lib_paths=paths)
            _LOADED_LIBS["tvm_runtime_cuda"] = library
    except (DynamicLibNotFoundError, OSError, RuntimeError) as error:
        reason = f"TVM's CUDA runtime does not load: {get_first_line(error)}"
        raise DeviceError(f"{reason}; {format_install_command('cudart')}") from error
