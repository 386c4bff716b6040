"""A kernel on an NVIDIA GPU: loaded and launched through CUDA's driver, which needs nothing of TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.cuda.dlpack import import_dlpack
from tvmconv.devices.cuda.function import CudaFunction, ParameterValue
from tvmconv.devices.cuda.gpu import NvidiaGpu
from tvmconv.devices.cuda.graphs import check_cuda, create_stream, make_capture, time_between_events, time_buffer_sets
from tvmconv.devices.cuda.tensor_map import encode_tensor_map
from tvmconv.devices.cuda.texture import TextureObject
from tvmconv.devices.device import LONG_LAUNCH_SECONDS, BufferSets, DeviceLostError, LoadedKernel, Timing, check_inputs
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable


class CudaLoadedKernel(LoadedKernel):
    """A kernel on an NVIDIA GPU."""

    device: NvidiaGpu

    def __init__(self, device: NvidiaGpu, executable: Executable) -> None:
        self.device = device
        self.executable = executable
        with self.translate_errors():
            self._functions = [
                CudaFunction(kernel.code, kernel.name, kernel.dynamic_shared_bytes) for kernel in executable.kernels
            ]

    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once on the default stream; see `LoadedKernel.run`."""
        check_inputs(self.executable, inputs)
        output = np.empty(self.executable.output.shape, self.executable.output.dtype)
        with self.translate_errors(), DeviceArrays() as arrays:
            pointers = arrays.upload_all(inputs, self.executable.output)
            with self.bind(pointers, stream=0) as bound:
                bound.launch()
                arrays.download(pointers[-1], output)  # waits for the kernel, and meets its errors
        return output

    def call_dlpack(self, inputs: Sequence[Any]) -> Any:
        """Run on the GPU's own arrays; see `LoadedKernel.call_dlpack`.

        An input that is read through a texture makes the call wait for the kernel's end.
        """
        dlpack_args = import_dlpack(inputs, self.executable, self.device)
        with (
            self.translate_errors(),
            self.bind(dlpack_args.pointers, dlpack_args.stream, dlpack_args.workspace) as bound,
        ):
            bound.launch()
        return dlpack_args.output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches captured in a CUDA graph; see `LoadedKernel.time`."""
        check_inputs(self.executable, inputs)
        sets = BufferSets.choose_count(self.executable.nbytes, self.device.l2_bytes or 0, cold=cold)
        with self.translate_errors(), ExitStack() as stack:
            arrays, stream = stack.enter_context(DeviceArrays()), stack.enter_context(create_stream(self.device.index))
            copies = [arrays.upload_all(inputs, self.executable.output) for _ in range(sets.num_sets)]
            bound = [stack.enter_context(self.bind(pointers, stream)) for pointers in copies]

            def launch(i: int) -> None:
                bound[i % sets.num_sets].launch()

            # A launch fails here, if it does, and not within a capture, where errors say less.
            (first,) = time_between_events(stream, lambda: launch(0), 1)
            if first >= LONG_LAUNCH_SECONDS:
                return Timing((first,), f"CUDA events around 1 launch, {sets.describe('L2')}", cold)
            return time_buffer_sets(make_capture(stream, launch), stream, sets, seconds)

    def bind(
        self,
        pointers: Sequence[int],
        stream: int,
        workspace: Sequence[int] | None = None,
        *,
        use_pdl: bool = True,
        has_predecessor: bool = False,
    ) -> BoundKernel:
        """Make ready to launch on the program's `arrays`, in their order, at these addresses; within
        `translate_errors`.

        Args:
            pointers: of the arrays.
            stream: to launch on.
            workspace: addresses of the program's scratch memory; by default, fresh memory full of NaN.
            use_pdl: whether a step that can begins before the step before it has ended.
            has_predecessor: whether there is one before the first step, too: another kernel's, launched right before
                it.
        """
        return BoundKernel(
            self.executable,
            self._functions,
            pointers,
            stream,
            workspace,
            use_pdl=use_pdl,
            has_predecessor=has_predecessor,
        )

    def translate_errors(self) -> AbstractContextManager[None]:
        """`translate_errors` with this kernel's launch in its errors."""
        return translate_errors(self.device, f", launched as {self.executable.launch_text}")


class BoundKernel:
    """A kernel with its arrays where it reads them.

    What it reads from constant memory was copied there, on the stream, what it reads through textures has texture
    objects, what TMA copies has tensor maps, and it has scratch memory of its own, in which is what the steps make that
    are prepared. All launches of a loaded kernel
    share its constant memory: it is bound to one set of constants at a time.
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
        self._stream = stream
        with ExitStack() as resources:
            owns_workspace = bool(executable.workspace) and workspace is None
            if workspace is None:
                arrays = resources.enter_context(DeviceArrays())
                workspace = [arrays.allocate_nan_filled(array, stream) for array in executable.workspace]
            addresses = dict(enumerate((*pointers, *workspace)))
            texture_handles = {
                i: resources.enter_context(TextureObject(pointers[i], executable.arrays[i], stream)).handle
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
            self._resources = resources.pop_all()
        self._synchronizes_on_close = bool(texture_handles) or owns_workspace

    def __enter__(self) -> BoundKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> None:
        """Queue one launch of every step on the stream, but for those that are prepared."""
        for launch in self._launches:
            launch()

    def close(self) -> None:
        """Free texture objects and scratch memory, when the stream's work that uses them is done."""
        from cuda.bindings import runtime

        if self._synchronizes_on_close:
            runtime.cudaStreamSynchronize(self._stream)  # its errors are met by whoever waits for the results
        self._resources.close()


def _make_parameters(
    kernel: CompiledKernel, addresses: Mapping[int, int], texture_handles: Mapping[int, int]
) -> list[ParameterValue]:
    """What a step takes: addresses, texture objects and tensor maps, of what lies at these addresses."""
    parameters: list[ParameterValue] = [
        texture_handles[i] if i in kernel.textures else addresses[i] for i in kernel.arguments
    ]
    for position, tensor_map in kernel.tensor_maps:
        parameters[position] = encode_tensor_map(tensor_map, addresses[kernel.arguments[position]])
    return parameters


class DeviceArrays:
    """Arrays in the current device's memory, freed together at the end of a `with` block."""

    def __init__(self) -> None:
        self._pointers: list[int] = []

    def __enter__(self) -> DeviceArrays:
        return self

    def __exit__(self, *_: object) -> None:
        self.free_all()

    def allocate(self, nbytes: int) -> int:
        """The address of fresh memory."""
        from cuda.bindings import runtime

        self._pointers.append(int(check_cuda(runtime.cudaMalloc(nbytes))))
        return self._pointers[-1]

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        pointer = self.allocate(array.nbytes)
        copy_to_device(pointer, array)
        return pointer

    def allocate_nan_filled(self, array: ArrayType, stream: int) -> int:
        """The address of memory for an array, which is filled with NaN on the stream."""
        pointer = self.allocate(array.nbytes)
        fill_nan(pointer, array.nbytes, stream)
        return pointer

    def upload_all(self, inputs: Sequence[NDArray[Any]], output: ArrayType) -> list[int]:
        """The addresses of copies of the inputs, and of an output full of NaN."""
        from cuda.bindings import runtime

        pointers = [*(self.upload(array) for array in inputs), self.allocate_nan_filled(output, stream=0)]
        check_cuda(runtime.cudaStreamSynchronize(0))
        return pointers

    def download(self, pointer: int, array: NDArray[Any]) -> None:
        """Fill `array` from the device, after all work of the default stream."""
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check_cuda(runtime.cudaMemcpy(array.ctypes.data, pointer, array.nbytes, kind))

    def free_all(self) -> None:
        """Free all; after a lost device there is nothing to free, and no error of that is reported."""
        from cuda.bindings import runtime

        while self._pointers:
            runtime.cudaFree(self._pointers.pop())


def copy_to_device(pointer: int, array: NDArray[Any]) -> None:
    """Copy an array to the device, and wait until it is there."""
    from cuda.bindings import runtime

    dense = np.ascontiguousarray(array)
    check_cuda(
        runtime.cudaMemcpy(pointer, dense.ctypes.data, dense.nbytes, runtime.cudaMemcpyKind.cudaMemcpyHostToDevice)
    )
    check_cuda(runtime.cudaStreamSynchronize(0))  # the copy of pageable memory returns before its last bytes arrive


def fill_nan(pointer: int, nbytes: int, stream: int) -> None:
    """Queue the filling of floating-point memory with NaN, which all bits set are."""
    from cuda.bindings import runtime

    check_cuda(runtime.cudaMemsetAsync(pointer, 0xFF, nbytes, stream))


@contextmanager
def translate_errors(device: NvidiaGpu, context: str = "") -> Iterator[None]:
    """Make `device` the current one, and name it in the errors of CUDA.

    A kernel's fault (an illegal address, say) ends the process's CUDA context for good.

    Args:
        device: the GPU.
        context: what is said after an error's text.

    Raises:
        DeviceLostError: the context has ended.
        DeviceError: any other error of CUDA.
    """
    from cuda.bindings import runtime

    try:
        check_cuda(runtime.cudaSetDevice(device.index))
        yield
    except DeviceError as error:
        message = f"{device.text}: {error}{context}"
        if runtime.cudaDeviceSynchronize()[0] == runtime.cudaError_t.cudaSuccess:
            raise DeviceError(message) from error
        raise DeviceLostError(f"{message} (this process can use the GPU no more: start another)") from error
