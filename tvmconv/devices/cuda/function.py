"""A kernel function of a cubin, and its launches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.cuda.graphs import check
from tvmconv.tensor_map import ALIGNMENT, NBYTES

if TYPE_CHECKING:
    from tvmconv.compiler.program import Launch

Parameter = int | Sequence[int]  # 64 bits, an address say, or the words of a tensor map


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
        if overlap:
            early = self.early(shape, stream)
            return lambda: early(laid)
        return lambda: self.launch_laid(shape, laid, stream)

    def early(self, shape: Launch, stream: int) -> Callable[[Laid], None]:
        """What queues launches that overlap, as `prepare` says, each with the parameters that it is given."""
        from cuda.bindings import driver

        config = _overlapping(*shape.grid, *shape.block, self._dynamic_shared_bytes, stream)
        return lambda parameters: check(driver.cuLaunchKernelEx(config, self._function, parameters.address, 0))

    def launch_laid(self, shape: Launch, parameters: Laid, stream: int) -> None:
        """Queue one launch with parameters that lie ready; they are read before this returns."""
        from cuda.bindings import driver

        sizes = (*shape.grid, *shape.block, self._dynamic_shared_bytes)
        check(driver.cuLaunchKernel(self._function, *sizes, stream, parameters.address, 0))


def _overlapping(gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int) -> Any:
    """A launch that may begin before the one before it on the stream has ended."""
    from cuda.bindings import driver

    attribute, value, config = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    config.gridDimX, config.gridDimY, config.gridDimZ = gx, gy, gz
    config.blockDimX, config.blockDimY, config.blockDimZ = bx, by, bz
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


class Laid:
    """Parameters in memory as a launch reads them: an array of the address of each.

    Attributes:
        address: of that array.
    """

    def __init__(self, count: int) -> None:
        self._memory = np.zeros(ALIGNMENT + NBYTES * count, "uint8")
        start = -self._memory.ctypes.data % ALIGNMENT
        self._slots = list(self._memory[start : start + NBYTES * count].view("uint64").reshape(-1, NBYTES // 8))
        self._addresses = np.array([slot.ctypes.data for slot in self._slots], "uint64")
        self.address = int(self._addresses.ctypes.data)

    def put(self, place: int, parameter: Parameter) -> None:
        """Put a parameter at its place."""
        if isinstance(parameter, int):
            self._slots[place][0] = parameter
        else:
            self._slots[place][: len(parameter)] = parameter
