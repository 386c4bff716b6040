"""Kernels on an NVIDIA GPU, loaded and launched through the CUDA driver without TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable
from tvmconv.devices import cuda
from tvmconv.devices.cuda.dlpack import import_dlpack
from tvmconv.devices.cuda.function import CudaFunction, ParameterValue, create_texture, encode_tensor_map
from tvmconv.devices.cuda.graphs import (
    GraphTimer,
    check_cuda,
    create_stream,
    make_capture,
    time_between_events,
    time_buffer_sets,
)
from tvmconv.devices.device import (
    LONG_LAUNCH_SECONDS,
    BufferSets,
    Device,
    DeviceLostError,
    LoadedKernel,
    Timing,
    check_inputs,
)
from tvmconv.errors import DeviceError


class CudaLoadedKernel(LoadedKernel):
    """An executable that is loaded on an NVIDIA GPU; see `LoadedKernel`."""

    def __init__(self, device: Device, executable: Executable) -> None:
        self.device = device
        self.executable = executable
        with self.translate_errors():
            self._functions = [CudaFunction(k.code, k.name, k.dynamic_shared_bytes) for k in executable.kernels]

    def run(self, inputs: Sequence[NDArray[Any]], written: NDArray[Any] | None = None) -> NDArray[Any]:
        """Run once on the default stream; see `LoadedKernel.run`."""
        check_inputs(self.executable, inputs)
        output = np.empty(self.executable.output.shape, self.executable.output.dtype)
        with self.translate_errors(), DeviceArrays() as arrays:
            pointers = arrays.upload_all(inputs, self.executable.output)
            with self.bind(pointers, stream=0) as bound:
                bound.launch()
                arrays.download(pointers[-1], output)  # waits for the kernel and raises its errors
                if written is not None:
                    result = np.empty(written.shape, self.executable.arrays[-2].dtype)
                    arrays.download(pointers[-2], result)
                    written[...] = result
        return output

    def call_dlpack(self, inputs: Sequence[Any]) -> Any:
        """Run on arrays in GPU memory; see `LoadedKernel.call_dlpack`.

        The call waits for the kernel if an input is read through a texture.
        """
        args = import_dlpack(inputs, self.executable, self.device)
        with self.translate_errors(), self.bind(args.pointers, args.stream, args.workspace) as bound:
            bound.launch()
        return args.output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches captured in a CUDA graph; see `LoadedKernel.time`."""
        check_inputs(self.executable, inputs)
        sets = BufferSets.choose_count(self.executable.nbytes, self.device.l2_bytes or 0, cold=cold)
        with self.translate_errors(), ExitStack() as stack:
            arrays, stream = stack.enter_context(DeviceArrays()), stack.enter_context(create_stream(self.device.index))
            copies = arrays.upload_sets(inputs, self.executable.output, sets.num_sets)
            bound = [stack.enter_context(self.bind(pointers, stream)) for pointers in copies]

            def launch(i: int) -> None:
                bound[i % sets.num_sets].launch()

            # A faulty launch fails here instead of in a capture, where errors are less specific.
            (first,) = time_between_events(stream, lambda: launch(0), 1)
            if first >= LONG_LAUNCH_SECONDS:
                return Timing((first,), f"CUDA events around 1 launch, {sets.describe('L2')}", cold)
            return time_buffer_sets(make_capture(stream, launch), stream, sets, seconds)

    @contextmanager
    def open_timer(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False) -> Iterator[GraphTimer]:
        """Open a timer of launches in turns; see `LoadedKernel.open_timer`."""
        check_inputs(self.executable, inputs)
        sets = BufferSets.choose_count(self.executable.nbytes, self.device.l2_bytes or 0, cold=cold)
        with self.translate_errors(), ExitStack() as stack:
            arrays, stream = stack.enter_context(DeviceArrays()), stack.enter_context(create_stream(self.device.index))
            copies = arrays.upload_sets(inputs, self.executable.output, sets.num_sets)
            bound = [stack.enter_context(self.bind(pointers, stream)) for pointers in copies]
            # A faulty launch fails here instead of in a capture, where errors are less specific.
            time_between_events(stream, bound[0].launch, 1)
            yield GraphTimer(make_capture(stream, lambda i: bound[i % sets.num_sets].launch()), stream, sets)

    def bind(
        self, pointers: Sequence[int], stream: int, workspace: Sequence[int] | None = None, **options: bool
    ) -> BoundKernel:
        """Prepare launches on arrays; the arguments are those of `BoundKernel`. Call it within `translate_errors`."""
        return BoundKernel(self.executable, self._functions, pointers, stream, workspace, **options)

    def translate_errors(self) -> AbstractContextManager[None]:
        """Return a context of `translate_errors` that adds this kernel's launch shape to messages."""
        return translate_errors(self.device, f", launched as {self.executable.launch_text}")


class BoundKernel(ExitStack):
    """A loaded kernel that is bound to arrays, ready to be launched.

    The constructor copies constant-memory arguments on the stream, creates texture objects and tensor maps, allocates
    the workspace, and launches the prepack kernels once. All launches of a loaded kernel share its constant memory, so
    it can be bound to one set of constants at a time. Closing it frees textures and workspace after their use.

    `pointers`: addresses of the executable's `arrays`, in their order.
    `workspace`: addresses of the executable's workspace arrays; by default new memory filled with NaN.
    `use_pdl`: let a device function begin before its predecessor has ended if it supports this.
    `has_predecessor`: whether another kernel is launched right before, which the first device function may overlap.
    """

    def __init__(
        self,
        executable: Executable,
        functions: Sequence[CudaFunction],
        pointers: Sequence[int],
        stream: int,
        workspace: Sequence[int] | None = None,
        *,
        use_pdl: bool = True,
        has_predecessor: bool = False,
    ) -> None:
        super().__init__()
        with ExitStack() as resources:
            owns_workspace = bool(executable.workspace) and workspace is None
            if workspace is None:
                arrays = resources.enter_context(DeviceArrays())
                workspace = [arrays.allocate_nan_filled(array, stream) for array in executable.workspace]
            addresses = dict(enumerate((*pointers, *workspace)))
            texture_handles = {
                i: resources.enter_context(create_texture(pointers[i], executable.arrays[i], stream))
                for i in {i for kernel in executable.kernels for i in kernel.textures}
            }
            for kernel, function in zip(executable.kernels, functions, strict=True):
                for index, symbol in kernel.constants:
                    function.copy_to_symbol(symbol, pointers[index], executable.arrays[index].nbytes, stream)
            first_kernel = executable.kernels[executable.num_prepack_kernels]
            launches = [
                function.prepare_launch(
                    kernel.launch,
                    _make_parameters(kernel, addresses, texture_handles),
                    stream,
                    use_pdl=use_pdl and kernel.uses_pdl and (has_predecessor or kernel is not first_kernel),
                )
                for kernel, function in zip(executable.kernels, functions, strict=True)
            ]
            for launch in launches[: executable.num_prepack_kernels]:
                launch()
            self._launches = launches[executable.num_prepack_kernels :]
            self.push(resources.pop_all())
        if texture_handles or owns_workspace:
            self.callback(cuda.runtime.cudaStreamSynchronize, stream)  # the reader of the results reports errors

    def launch(self) -> None:
        """Queue one launch of every device function except the prepack kernels."""
        for launch in self._launches:
            launch()


def _make_parameters(
    kernel: CompiledKernel, addresses: Mapping[int, int], texture_handles: Mapping[int, int]
) -> list[ParameterValue]:
    """Return the parameters of a device function: addresses, texture objects and tensor maps."""
    parameters: list[ParameterValue] = [
        texture_handles[i] if i in kernel.textures else addresses[i] for i in kernel.arguments
    ]
    for position, tensor_map in kernel.tensor_maps:
        parameters[position] = encode_tensor_map(tensor_map, addresses[kernel.arguments[position]])
    return parameters


class DeviceArrays(ExitStack):
    """Arrays in the memory of the current device, which the end of a `with` block frees."""

    def allocate(self, nbytes: int) -> int:
        """Allocate memory and return its address."""
        pointer = int(check_cuda(cuda.runtime.cudaMalloc(nbytes)))
        self.callback(cuda.runtime.cudaFree, pointer)  # errors are ignored: a lost device has nothing to free
        return pointer

    def upload(self, array: NDArray[Any]) -> int:
        """Copy an array to new memory and return its address."""
        pointer = self.allocate(array.nbytes)
        copy_to_device(pointer, array)
        return pointer

    def allocate_nan_filled(self, array: ArrayType, stream: int) -> int:
        """Allocate memory for an array, queue its filling with NaN on the stream, and return its address."""
        pointer = self.allocate(array.nbytes)
        fill_nan(pointer, array.nbytes, stream)
        return pointer

    def upload_all(self, inputs: Sequence[NDArray[Any]], output: ArrayType) -> list[int]:
        """Copy the inputs, allocate an output filled with NaN, and return all addresses."""
        pointers = [*(self.upload(array) for array in inputs), self.allocate_nan_filled(output, stream=0)]
        check_cuda(cuda.runtime.cudaStreamSynchronize(0))
        return pointers

    def upload_sets(self, inputs: Sequence[NDArray[Any]], output: ArrayType, num_sets: int) -> list[list[int]]:
        """Do the same for several sets of arrays, of which only the first is copied from the host."""
        first = self.upload_all(inputs, output)
        others = [
            [
                *(self._copy(pointer, array.nbytes) for pointer, array in zip(first, inputs, strict=False)),
                self.allocate_nan_filled(output, stream=0),
            ]
            for _ in range(num_sets - 1)
        ]
        check_cuda(cuda.runtime.cudaStreamSynchronize(0))
        return [first, *others]

    def _copy(self, source: int, nbytes: int) -> int:
        """Allocate memory, copy other memory of the GPU to it, and return its address."""
        pointer = self.allocate(nbytes)
        copy_on_device(pointer, source, nbytes)
        return pointer

    def download(self, pointer: int, array: NDArray[Any]) -> None:
        """Copy device memory to `array` after all work of the default stream."""
        kind = cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check_cuda(cuda.runtime.cudaMemcpy(array.ctypes.data, pointer, array.nbytes, kind))


def copy_to_device(pointer: int, array: NDArray[Any]) -> None:
    """Copy an array to device memory and wait for the end of the copy."""
    dense, kind = np.ascontiguousarray(array), cuda.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
    check_cuda(cuda.runtime.cudaMemcpy(pointer, dense.ctypes.data, dense.nbytes, kind))
    check_cuda(cuda.runtime.cudaStreamSynchronize(0))  # cudaMemcpy from pageable memory may return early


def copy_on_device(pointer: int, source: int, nbytes: int) -> None:
    """Copy device memory to other device memory and wait for the end of the copy."""
    kind = cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    check_cuda(cuda.runtime.cudaMemcpy(pointer, source, nbytes, kind))
    check_cuda(cuda.runtime.cudaStreamSynchronize(0))  # which other streams do not wait for


def fill_nan(pointer: int, nbytes: int, stream: int) -> None:
    """Queue the filling of memory with set bits, which are NaN in every floating-point dtype."""
    check_cuda(cuda.runtime.cudaMemsetAsync(pointer, 0xFF, nbytes, stream))


@contextmanager
def translate_errors(device: Device, context: str = "") -> Iterator[None]:
    """Make a GPU the current device, and add its name to CUDA errors of the block.

    A kernel fault such as an illegal address makes the CUDA context of the process unusable.
    """
    try:
        check_cuda(cuda.runtime.cudaSetDevice(device.index))
        yield
    except DeviceError as error:
        message = f"{device.text}: {error}{context}"
        if cuda.runtime.cudaDeviceSynchronize()[0] == cuda.runtime.cudaError_t.cudaSuccess:
            raise DeviceError(message) from error
        raise DeviceLostError(f"{message} (this process can use the GPU no more: start another)") from error
