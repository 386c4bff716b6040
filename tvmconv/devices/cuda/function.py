"""Launches of a kernel function from a cubin."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.tensor_map import MAP_ALIGNMENT_BYTES, MAP_BYTES

if TYPE_CHECKING:
    from tvmconv.compiler.executable import LaunchConfig

ParameterValue = int | Sequence[int]  # a 64-bit value such as an address, or the words of a tensor map
_Slot = ctypes.c_uint64 * (MAP_BYTES // 8)


class CudaFunction:
    """A kernel function of a cubin on the current device, which is unloaded with this object.

    `dynamic_shared_bytes`: dynamic shared memory per block of every launch.
    """

    def __init__(self, cubin: bytes, name: str, dynamic_shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        library = check_cuda(driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        weakref.finalize(self, driver.cuLibraryUnload, library)
        self._library = library
        kernel = check_cuda(driver.cuLibraryGetKernel(library, name.encode()))
        # This call loads the function, which is not allowed during a graph capture.
        self._function = check_cuda(driver.cuKernelGetFunction(kernel))
        self._dynamic_shared_bytes = dynamic_shared_bytes
        if dynamic_shared_bytes:  # required beyond 48 KiB of static and dynamic memory
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check_cuda(driver.cuFuncSetAttribute(self._function, attribute, dynamic_shared_bytes))

    def copy_to_symbol(self, symbol: str, pointer: int, nbytes: int, stream: int) -> None:
        """Queue the copy of an array to a `__constant__` symbol of the cubin."""
        from cuda.bindings import driver, runtime

        address = check_cuda(driver.cuLibraryGetGlobal(self._library, symbol.encode()))  # (address, size)
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check_cuda(runtime.cudaMemcpyAsync(int(address), pointer, nbytes, kind, stream))

    def launch(self, shape: LaunchConfig, parameters: Sequence[ParameterValue], stream: int) -> None:
        """Queue one launch; see `prepare_launch`."""
        self.prepare_launch(shape, parameters, stream)()

    def prepare_launch(
        self, shape: LaunchConfig, parameters: Sequence[ParameterValue], stream: int, *, use_pdl: bool = False
    ) -> Callable[[], None]:
        """Return a function that queues a launch on each call.

        `use_pdl`: allow the kernel to begin before its predecessor on the stream has ended; the kernel waits for it by
            itself. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
        """
        params = PackedParams(len(parameters))
        for index, parameter in enumerate(parameters):
            params.set_param(index, parameter)
        launch = self.make_launcher(shape, stream, use_pdl=use_pdl)
        return lambda: launch(params)

    def make_launcher(
        self, shape: LaunchConfig, stream: int, *, use_pdl: bool = False
    ) -> Callable[[PackedParams], None]:
        """Return a function that queues a launch with given parameters, which are copied before it returns.

        The arguments are those of `prepare_launch`.
        """
        from cuda.bindings import driver

        config, attribute, value = driver.CUlaunchConfig(), driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
        config.sharedMemBytes, config.hStream = self._dynamic_shared_bytes, stream
        if use_pdl:
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        launch_kernel, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS

        def queue_launch(parameters: PackedParams) -> None:
            result = launch_kernel(config, self._function, parameters.address, 0)  # `self` keeps the function loaded
            if result[0] != success:
                check_cuda(result)

        return queue_launch


class PackedParams:
    """Launch parameters in memory, with the array of their addresses that the driver reads."""

    def __init__(self, num_params: int) -> None:
        memory = ctypes.create_string_buffer(MAP_ALIGNMENT_BYTES + MAP_BYTES * num_params)
        offset = -ctypes.addressof(memory) % MAP_ALIGNMENT_BYTES
        # The slots keep `memory` alive.
        self._slots = [_Slot.from_buffer(memory, offset + MAP_BYTES * index) for index in range(num_params)]
        self._addresses = (ctypes.c_uint64 * num_params)(*map(ctypes.addressof, self._slots))
        self.address = ctypes.addressof(self._addresses)

    def set_param(self, index: int, parameter: ParameterValue) -> None:
        """Set the value of a parameter."""
        if isinstance(parameter, int):
            self._slots[index][0] = parameter
        else:
            self._slots[index][: len(parameter)] = list(parameter)
