"""A kernel on an NVIDIA GPU: loaded and launched through CUDA's driver, which needs nothing of TVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.base import LONG_LAUNCH_SECONDS, BufferSets, Loaded, LostError, Timing, check_inputs
from tvmconv.devices.cuda.dlpack import adopt
from tvmconv.devices.cuda.function import Function, Parameter
from tvmconv.devices.cuda.gpu import Gpu
from tvmconv.devices.cuda.graphs import between, capture_on, check, new_stream, time_sets
from tvmconv.devices.cuda.tensor_map import encode
from tvmconv.devices.cuda.texture import Texture
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.program import ArrayType, Program, Step


class CudaLoaded(Loaded):
    """A kernel on an NVIDIA GPU."""

    device: Gpu

    def __init__(self, device: Gpu, program: Program) -> None:
        self.device = device
        self.program = program
        with self.border():
            self._functions = [Function(step.code, step.name, step.dynamic_shared_bytes) for step in program.steps]

    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once on the default stream; see `Loaded.run`."""
        check_inputs(self.program, inputs)
        output = np.empty(self.program.output.shape, self.program.output.dtype)
        with self.border(), Arrays() as arrays:
            pointers = arrays.uploaded(inputs, self.program.output)
            with self.bind(pointers, stream=0) as bound:
                bound.launch()
                arrays.download(pointers[-1], output)  # waits for the kernel, and meets its errors
        return output

    def call_dlpack(self, inputs: Sequence[Any]) -> Any:
        """Run on the GPU's own arrays; see `Loaded.call_dlpack`.

        An input that is read through a texture makes the call wait for the kernel's end.
        """
        adopted = adopt(inputs, self.program, self.device)
        with self.border(), self.bind(adopted.pointers, adopted.stream, adopted.scratch) as bound:
            bound.launch()
        return adopted.output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches captured in a CUDA graph; see `Loaded.time`."""
        check_inputs(self.program, inputs)
        sets = BufferSets.choose(self.program.nbytes, self.device.l2_bytes or 0, cold=cold)
        with self.border(), ExitStack() as stack:
            arrays, stream = stack.enter_context(Arrays()), stack.enter_context(new_stream(self.device.index))
            copies = [arrays.uploaded(inputs, self.program.output) for _ in range(sets.count)]
            bound = [stack.enter_context(self.bind(pointers, stream)) for pointers in copies]

            def launch(i: int) -> None:
                bound[i % sets.count].launch()

            # A launch fails here, if it does, and not within a capture, where errors say less.
            (first,) = between(stream, lambda: launch(0), 1)
            if first >= LONG_LAUNCH_SECONDS:
                return Timing((first,), f"CUDA events around 1 launch, {sets.describe('L2')}", cold)
            return time_sets(capture_on(stream, launch), stream, sets, seconds)

    def bind(
        self,
        pointers: Sequence[int],
        stream: int,
        scratch: Sequence[int] | None = None,
        *,
        overlap: bool = True,
        follows: bool = False,
    ) -> Bound:
        """Make ready to launch on the program's `arrays`, in their order, at these addresses; within `border`.

        Args:
            pointers: of the arrays.
            stream: to launch on.
            scratch: addresses of the program's scratch memory; by default, fresh memory full of NaN.
            overlap: whether a step that can begins before the step before it has ended.
            follows: whether there is one before the first step, too: another kernel's, launched right before it.
        """
        return Bound(self.program, self._functions, pointers, stream, scratch, overlap=overlap, follows=follows)

    def border(self) -> AbstractContextManager[None]:
        """`border` with this kernel's launch in its errors."""
        return border(self.device, f", launched as {self.program.launches}")


class Bound:
    """A kernel with its arrays where it reads them.

    What it reads from constant memory was copied there, on the stream, what it reads through textures has texture
    objects, what TMA copies has tensor maps, and it has scratch memory of its own, in which is what the steps make that
    are prepared. All launches of a loaded kernel
    share its constant memory: it is bound to one set of constants at a time.
    """

    def __init__(
        self,
        program: Program,
        functions: Sequence[Function],
        pointers: Sequence[int],
        stream: int,
        scratch: Sequence[int] | None = None,
        *,
        overlap: bool = True,
        follows: bool = False,
    ) -> None:
        self._stream = stream
        with ExitStack() as owned:
            own = bool(program.scratch) and scratch is None
            if scratch is None:
                arrays = owned.enter_context(Arrays())
                scratch = [arrays.poisoned(array, stream) for array in program.scratch]
            read = dict(enumerate((*pointers, *scratch)))
            seen = {
                i: owned.enter_context(Texture(pointers[i], program.arrays[i], stream)).handle
                for i in {i for step in program.steps for i in step.textures}
            }
            for step, function in zip(program.steps, functions, strict=True):
                for index, symbol in step.constants:
                    function.fill(symbol, pointers[index], program.arrays[index].nbytes, stream)
            first = program.steps[program.prepared]
            launches = [
                function.prepare(
                    step.launch,
                    _parameters(step, read, seen),
                    stream,
                    overlap=overlap and step.overlaps and (follows or step is not first),
                )
                for step, function in zip(program.steps, functions, strict=True)
            ]
            for launch in launches[: program.prepared]:
                launch()
            self._launches = launches[program.prepared :]
            self._owned = owned.pop_all()
        self._waits = bool(seen) or own

    def __enter__(self) -> Bound:
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

        if self._waits:
            runtime.cudaStreamSynchronize(self._stream)  # its errors are met by whoever waits for the results
        self._owned.close()


def _parameters(step: Step, read: Mapping[int, int], seen: Mapping[int, int]) -> list[Parameter]:
    """What a step takes: addresses, texture objects and tensor maps, of what lies at these addresses."""
    parameters: list[Parameter] = [seen[i] if i in step.textures else read[i] for i in step.arguments]
    for position, told in step.tensor_maps:
        parameters[position] = encode(told, read[step.arguments[position]])
    return parameters


class Arrays:
    """Arrays in the current device's memory, freed together at the end of a `with` block."""

    def __init__(self) -> None:
        self._pointers: list[int] = []

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def allocate(self, nbytes: int) -> int:
        """The address of fresh memory."""
        from cuda.bindings import runtime

        self._pointers.append(int(check(runtime.cudaMalloc(nbytes))))
        return self._pointers[-1]

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of `array`."""
        pointer = self.allocate(array.nbytes)
        copy_to_device(pointer, array)
        return pointer

    def poisoned(self, array: ArrayType, stream: int) -> int:
        """The address of memory for an array, which is filled with NaN on the stream."""
        pointer = self.allocate(array.nbytes)
        poison(pointer, array.nbytes, stream)
        return pointer

    def uploaded(self, inputs: Sequence[NDArray[Any]], output: ArrayType) -> list[int]:
        """The addresses of copies of the inputs, and of an output full of NaN."""
        from cuda.bindings import runtime

        pointers = [*(self.upload(array) for array in inputs), self.poisoned(output, stream=0)]
        check(runtime.cudaStreamSynchronize(0))
        return pointers

    def download(self, pointer: int, array: NDArray[Any]) -> None:
        """Fill `array` from the device, after all work of the default stream."""
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(runtime.cudaMemcpy(array.ctypes.data, pointer, array.nbytes, kind))

    def free(self) -> None:
        """Free all; after a lost device there is nothing to free, and no error of that is reported."""
        from cuda.bindings import runtime

        while self._pointers:
            runtime.cudaFree(self._pointers.pop())


def copy_to_device(pointer: int, array: NDArray[Any]) -> None:
    """Copy an array to the device, and wait until it is there."""
    from cuda.bindings import runtime

    dense = np.ascontiguousarray(array)
    check(runtime.cudaMemcpy(pointer, dense.ctypes.data, dense.nbytes, runtime.cudaMemcpyKind.cudaMemcpyHostToDevice))
    check(runtime.cudaStreamSynchronize(0))  # the copy of pageable memory returns before its last bytes arrive


def poison(pointer: int, nbytes: int, stream: int) -> None:
    """Queue the filling of floating-point memory with NaN, which all bits set are."""
    from cuda.bindings import runtime

    check(runtime.cudaMemsetAsync(pointer, 0xFF, nbytes, stream))


@contextmanager
def border(device: Gpu, doing: str = "") -> Iterator[None]:
    """Make `device` the current one, and name it in the errors of CUDA.

    A kernel's fault (an illegal address, say) ends the process's CUDA context for good.

    Args:
        device: the GPU.
        doing: what is said after an error's text.

    Raises:
        LostError: the context has ended.
        DeviceError: any other error of CUDA.
    """
    from cuda.bindings import runtime

    try:
        check(runtime.cudaSetDevice(device.index))
        yield
    except DeviceError as error:
        message = f"{device.text}: {error}{doing}"
        if runtime.cudaDeviceSynchronize()[0] == runtime.cudaError_t.cudaSuccess:
            raise DeviceError(message) from error
        raise LostError(f"{message} (this process can use the GPU no more: start another)") from error
