"""A kernel function of a cubin, and its launches."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tvmconv.devices.cuda.graphs import check
from tvmconv.tensor_map import ALIGNMENT, NBYTES

if TYPE_CHECKING:
    from tvmconv.compiler.program import Launch

Parameter = int | Sequence[int]  # 64 bits, an address say, or the words of a tensor map
_Slot = ctypes.c_uint64 * (NBYTES // 8)


class Function:
    """A kernel function in a cubin, for the current device; unloaded when it is no longer used.

    Args:
        cubin: its machine code, and perhaps that of others.
        name: its symbol.
        dynamic_shared_bytes: shared memory of a block that every launch asks for.
    """

    def __init__(self, cubin: bytes, name: str, dynamic_shared_bytes: int = 0) -> None:
        from cuda.bindings import driver

        library = check(driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        weakref.finalize(self, driver.cuLibraryUnload, library)
        self._library = library
        kernel = check(driver.cuLibraryGetKernel(library, name.encode()))
        self._function = check(driver.cuKernelGetFunction(kernel))  # loads it, which a graph's capture does not allow
        self._dynamic_shared_bytes = dynamic_shared_bytes
        if dynamic_shared_bytes:  # to opt in is needed beyond 48 KiB, static and dynamic together
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(self._function, attribute, dynamic_shared_bytes))

    def fill(self, symbol: str, pointer: int, nbytes: int, stream: int) -> None:
        """Queue the copy of an array to a `__constant__` symbol of the cubin."""
        from cuda.bindings import driver, runtime

        address = check(driver.cuLibraryGetGlobal(self._library, symbol.encode()))  # and its size
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check(runtime.cudaMemcpyAsync(int(address), pointer, nbytes, kind, stream))

    def launch(self, shape: Launch, parameters: Sequence[Parameter], stream: int) -> None:
        """Queue one launch."""
        self.prepare(shape, parameters, stream)()

    def prepare(
        self, shape: Launch, parameters: Sequence[Parameter], stream: int, *, overlap: bool = False
    ) -> Callable[[], None]:
        """What queues a launch each time that it is called.

        Args:
            shape: grid and block.
            parameters: in the function's order.
            stream: to launch on.
            overlap: whether the kernel may begin before the one before it on the stream has ended, for which it waits
                by itself. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
        """
        laid = Laid(len(parameters))
        for place, parameter in enumerate(parameters):
            laid.put(place, parameter)
        queue = self.launcher(shape, stream, overlap=overlap)
        return lambda: queue(laid)

    def launcher(self, shape: Launch, stream: int, *, overlap: bool = False) -> Callable[[Laid], None]:
        """What queues a launch with the parameters that it is given, which are read before it returns.

        Args: as for `prepare`.
        """
        from cuda.bindings import driver

        config, attribute, value = driver.CUlaunchConfig(), driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
        config.sharedMemBytes, config.hStream = self._dynamic_shared_bytes, stream
        if overlap:
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        call, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS

        def queue(parameters: Laid) -> None:
            result = call(config, self._function, parameters.address, 0)  # as long as this is there, so is the function
            if result[0] != success:
                check(result)

        return queue


class Laid:
    """Parameters in memory as a launch reads them: an array of the address of each.

    Attributes:
        address: of that array.
    """

    def __init__(self, count: int) -> None:
        memory = ctypes.create_string_buffer(ALIGNMENT + NBYTES * count)
        first = -ctypes.addressof(memory) % ALIGNMENT
        self._slots = [
            _Slot.from_buffer(memory, first + NBYTES * place) for place in range(count)
        ]  # they keep it alive
        self._addresses = (ctypes.c_uint64 * count)(*map(ctypes.addressof, self._slots))
        self.address = ctypes.addressof(self._addresses)

    def put(self, place: int, parameter: Parameter) -> None:
        """Put a parameter at its place."""
        if isinstance(parameter, int):
            self._slots[place][0] = parameter
        else:
            self._slots[place][: len(parameter)] = list(parameter)
