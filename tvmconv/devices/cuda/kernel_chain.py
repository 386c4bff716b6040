"""Kernels one after another on one GPU, as a network has them: each on arrays of its own, all in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.cuda.graphs import CudaGraph, check_cuda, create_stream, time_replay
from tvmconv.devices.cuda.loaded_kernel import BoundKernel, DeviceArrays, fill_nan, translate_errors
from tvmconv.devices.device import Timing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.executable import ArrayType, Executable
    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.devices.cuda.loaded_kernel import CudaLoadedKernel


def find_linked_inputs(inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> list[bool]:
    """Whether each kernel's first input can be what the one before it leaves: of the same shape and dtype.

    Args:
        inputs: the first input of each, in their order.
        outputs: the output of each.
    """
    return [
        False,
        *(previous_output == next_input for previous_output, next_input in zip(outputs[:-1], inputs[1:], strict=True)),
    ]


class KernelChain:
    """Kernels with their arrays, in the order of their launches.

    Every kernel has weights, other inputs and an output of its own, equal kernels as well: as many bytes go through the
    cache as in the network. Its first input is the output of the kernel before it where that fits.

    Attributes:
        executables: the kernels.
        reads_previous_output: whether each reads what the one before it wrote.
        overlaps_previous: whether each begins before the one before it has ended, where that is asked for: those do
            that wait for its end by themselves. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and
            Synchronization".
    """

    def __init__(
        self, device: CudaDevice, executables: Sequence[Executable], inputs: Sequence[Sequence[NDArray[Any]]]
    ) -> None:
        """Load the kernels, and copy their inputs to the GPU.

        Args:
            device: where.
            executables: the kernels; those that are the same object are loaded once.
            inputs: of each all `arrays` but the output, also where the first is not read.

        Raises:
            DeviceError: a kernel cannot be loaded, or memory ran out.
        """
        self._device = device
        self.executables = list(executables)
        self.reads_previous_output = find_linked_inputs(
            [executable.arrays[0] for executable in executables], [executable.output for executable in executables]
        )
        self.overlaps_previous = [
            False,
            *(executable.kernels[executable.num_prepack_kernels].uses_pdl for executable in self.executables[1:]),
        ]
        loaded: dict[int, CudaLoadedKernel] = {}
        self._outputs: list[int] = []
        self._bound_kernels: dict[bool, list[BoundKernel]] = {False: [], True: []}  # by whether they overlap
        with self._translate_errors(), ExitStack() as stack:
            self._arrays = stack.enter_context(DeviceArrays())
            self._stream = stack.enter_context(create_stream(device.index))
            for index, (executable, arrays) in enumerate(zip(self.executables, inputs, strict=True)):
                can_share = not any(
                    compiled_kernel.constants for compiled_kernel in executable.kernels
                )  # else it has constant memory of its own
                kernel = loaded.get(id(executable)) if can_share else None
                kernel = loaded[id(executable)] = kernel or device.load(executable)
                first_pointer = (
                    self._outputs[-1] if self.reads_previous_output[index] else self._arrays.upload(arrays[0])
                )
                other_pointers = [self._arrays.upload(array) for array in arrays[1:]]
                self._outputs.append(self._arrays.allocate(executable.output.nbytes))
                pointers = [first_pointer, *other_pointers, self._outputs[-1]]
                for use_pdl, bound_kernels in self._bound_kernels.items():
                    bound_kernel = kernel.bind(pointers, self._stream, use_pdl=use_pdl, has_predecessor=index > 0)
                    bound_kernels.append(stack.enter_context(bound_kernel))
            self._exit_stack = stack.pop_all()

    def __enter__(self) -> KernelChain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *, use_pdl: bool = False) -> list[NDArray[Any]]:
        """Launch all once; the output of each, which was full of NaN before.

        Args:
            use_pdl: whether kernels that can begin before the one before them has ended.
        """
        from cuda.bindings import runtime

        results = [np.empty(executable.output.shape, executable.output.dtype) for executable in self.executables]
        with self._translate_errors():
            for pointer, result in zip(self._outputs, results, strict=True):
                fill_nan(pointer, result.nbytes, self._stream)
            self._launch_all(use_pdl)
            check_cuda(runtime.cudaStreamSynchronize(self._stream))
            for pointer, result in zip(self._outputs, results, strict=True):
                self._arrays.download(pointer, result)
        return results

    def time(self, *, use_pdl: bool = False, seconds: float = 0.5) -> Timing:
        """Time replays of a CUDA graph of all kernels, once each; they have run before.

        Args:
            use_pdl: as for `run`.
            seconds: device time to spend, about.
        """
        with self._translate_errors():
            graph = CudaGraph(self._stream, 1, lambda _: self._launch_all(use_pdl))
            samples = time_replay(graph.replay, self._stream, seconds)
        return make_chain_timing(samples, len(self.executables))

    def close(self) -> None:
        """Free the GPU's memory."""
        self._exit_stack.close()

    def _launch_all(self, use_pdl: bool) -> None:
        for bound in self._bound_kernels[use_pdl]:
            bound.launch()

    def _translate_errors(self) -> Any:
        return translate_errors(self._device, f", in a chain of {len(self.executables)} kernels")


def make_chain_timing(samples: Sequence[float], num_kernels: int) -> Timing:
    """The times of a chain's graph.

    Args:
        samples: seconds a replay.
        num_kernels: how many there are in it.
    """
    return Timing(tuple(samples), f"one CUDA graph of {num_kernels} kernels, {len(samples)} replays", cold=False)
