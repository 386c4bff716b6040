"""Chains of kernels on one GPU as in a network, each with its own arrays and all in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import ArrayType, Executable
from tvmconv.devices import cuda
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.graphs import CudaGraph, check_cuda, create_stream, time_replay
from tvmconv.devices.cuda.loaded_kernel import BoundKernel, CudaLoadedKernel, DeviceArrays, fill_nan, translate_errors
from tvmconv.devices.device import Timing


def find_linked_inputs(inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> list[bool]:
    """Return for each kernel whether its first input can be the output of the previous kernel."""
    return [False, *(previous == following for previous, following in zip(outputs[:-1], inputs[1:], strict=True))]


class KernelChain(ExitStack):
    """Kernels with their arrays, in launch order.

    Every kernel has its own weights, other inputs and output, even if kernels are equal, so that the cache traffic is
    that of the network. The first input is the output of the previous kernel if shapes and dtypes match.

    `reads_previous_output`: whether each kernel reads the output of its predecessor.
    `overlaps_previous`: whether each kernel can begin before its predecessor has ended, because it waits for the end by
        itself. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
    """

    def __init__(
        self, device: CudaDevice, executables: Sequence[Executable], inputs: Sequence[Sequence[NDArray[Any]]]
    ) -> None:
        """Load the kernels and copy their inputs to the GPU.

        `executables`: executables in launch order; an object that occurs repeatedly is loaded once.
        `inputs`: all `arrays` of each executable except the output, including a first input that is not read.
        """
        super().__init__()
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
        self._bound_kernels: dict[bool, list[BoundKernel]] = {False: [], True: []}  # by `use_pdl`
        with self._translate_errors(), ExitStack() as stack:
            self._arrays = stack.enter_context(DeviceArrays())
            self._stream = stack.enter_context(create_stream(device.index))
            for index, (executable, arrays) in enumerate(zip(self.executables, inputs, strict=True)):
                # A kernel with arrays in constant memory must be loaded once per set of arrays.
                can_share = not any(kernel.constants for kernel in executable.kernels)
                kernel = loaded.get(id(executable)) if can_share else None
                kernel = loaded[id(executable)] = kernel or device.load(executable)
                reads_previous = self.reads_previous_output[index]
                first = self._outputs[-1] if reads_previous else self._arrays.upload(arrays[0])
                others = [self._arrays.upload(array) for array in arrays[1:]]
                self._outputs.append(self._arrays.allocate(executable.output.nbytes))
                pointers = [first, *others, self._outputs[-1]]
                for use_pdl, bound_kernels in self._bound_kernels.items():
                    bound_kernel = kernel.bind(pointers, self._stream, use_pdl=use_pdl, has_predecessor=index > 0)
                    bound_kernels.append(stack.enter_context(bound_kernel))
            self.push(stack.pop_all())

    def run(self, *, use_pdl: bool = False) -> list[NDArray[Any]]:
        """Launch all kernels once, on outputs filled with NaN, and return the output of each.

        `use_pdl`: let kernels begin before their predecessor has ended if they support it.
        """
        results = [np.empty(executable.output.shape, executable.output.dtype) for executable in self.executables]
        with self._translate_errors():
            for pointer, result in zip(self._outputs, results, strict=True):
                fill_nan(pointer, result.nbytes, self._stream)
            self._launch_all(use_pdl)
            check_cuda(cuda.runtime.cudaStreamSynchronize(self._stream))
            for pointer, result in zip(self._outputs, results, strict=True):
                self._arrays.download(pointer, result)
        return results

    def time(self, *, use_pdl: bool = False, seconds: float = 0.5) -> Timing:
        """Time replays of a CUDA graph that launches every kernel once; the kernels have run before.

        `use_pdl`: let kernels overlap, as for `run`.
        """
        with self._translate_errors():
            graph = CudaGraph(self._stream, 1, lambda _: self._launch_all(use_pdl))
            samples = time_replay(graph.replay, self._stream, seconds)
        return make_chain_timing(samples, len(self.executables))

    def _launch_all(self, use_pdl: bool) -> None:
        for bound in self._bound_kernels[use_pdl]:
            bound.launch()

    def _translate_errors(self) -> Any:
        return translate_errors(self._device, f", in a chain of {len(self.executables)} kernels")


def make_chain_timing(samples: Sequence[float], num_kernels: int) -> Timing:
    """Return the timing of a chain's graph."""
    return Timing(tuple(samples), f"one CUDA graph of {num_kernels} kernels, {len(samples)} replays", cold=False)
