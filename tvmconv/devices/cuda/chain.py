"""Kernels one after another on one GPU, as a network has them: each on arrays of its own, all in one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.base import Timing
from tvmconv.devices.cuda.graphs import Graph, check, new_stream, time_replay
from tvmconv.devices.cuda.kernel import Arrays, Bound, border, poison

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.program import ArrayType, Program
    from tvmconv.devices.cuda.device import CudaDevice
    from tvmconv.devices.cuda.kernel import CudaLoaded


def links(inputs: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> list[bool]:
    """Whether each kernel's first input can be what the one before it leaves: of the same shape and dtype.

    Args:
        inputs: the first input of each, in their order.
        outputs: the output of each.
    """
    return [False, *(before == after for before, after in zip(outputs[:-1], inputs[1:], strict=True))]


class Chain:
    """Kernels with their arrays, in the order of their launches.

    Every kernel has weights, other inputs and an output of its own, equal kernels as well: as many bytes go through the
    cache as in the network. Its first input is the output of the kernel before it where that fits.

    Attributes:
        programs: the kernels.
        linked: whether each reads what the one before it wrote.
        overlapping: whether each begins before the one before it has ended, where that is asked for: those do that wait
            for its end by themselves. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and
            Synchronization".
    """

    def __init__(
        self, device: CudaDevice, programs: Sequence[Program], inputs: Sequence[Sequence[NDArray[Any]]]
    ) -> None:
        """Load the kernels, and copy their inputs to the GPU.

        Args:
            device: where.
            programs: the kernels; those that are the same object are loaded once.
            inputs: of each all `arrays` but the output, also where the first is not read.

        Raises:
            DeviceError: a kernel cannot be loaded, or memory ran out.
        """
        self._device = device
        self.programs = list(programs)
        self.linked = links([program.arrays[0] for program in programs], [program.output for program in programs])
        self.overlapping = [False, *(program.steps[program.prepared].overlaps for program in self.programs[1:])]
        loaded: dict[int, CudaLoaded] = {}
        self._outputs: list[int] = []
        self._bound: dict[bool, list[Bound]] = {False: [], True: []}  # by whether they overlap
        with self._border(), ExitStack() as stack:
            self._arrays = stack.enter_context(Arrays())
            self._stream = stack.enter_context(new_stream(device.index))
            for number, (program, given) in enumerate(zip(self.programs, inputs, strict=True)):
                shares = not any(step.constants for step in program.steps)  # else it has constant memory of its own
                kernel = loaded.get(id(program)) if shares else None
                kernel = loaded[id(program)] = kernel or device.load(program)
                first = self._outputs[-1] if self.linked[number] else self._arrays.upload(given[0])
                others = [self._arrays.upload(array) for array in given[1:]]
                self._outputs.append(self._arrays.allocate(program.output.nbytes))
                pointers = [first, *others, self._outputs[-1]]
                for overlap, bound in self._bound.items():
                    made = kernel.bind(pointers, self._stream, overlap=overlap, follows=number > 0)
                    bound.append(stack.enter_context(made))
            self._resources = stack.pop_all()

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, *, overlap: bool = False) -> list[NDArray[Any]]:
        """Launch all once; the output of each, which was full of NaN before.

        Args:
            overlap: whether kernels that can begin before the one before them has ended.
        """
        from cuda.bindings import runtime

        results = [np.empty(program.output.shape, program.output.dtype) for program in self.programs]
        with self._border():
            for pointer, result in zip(self._outputs, results, strict=True):
                poison(pointer, result.nbytes, self._stream)
            self._launch(overlap)
            check(runtime.cudaStreamSynchronize(self._stream))
            for pointer, result in zip(self._outputs, results, strict=True):
                self._arrays.download(pointer, result)
        return results

    def time(self, *, overlap: bool = False, seconds: float = 0.5) -> Timing:
        """Time replays of a CUDA graph of all kernels, once each; they have run before.

        Args:
            overlap: as for `run`.
            seconds: device time to spend, about.
        """
        with self._border():
            graph = Graph(self._stream, 1, lambda _: self._launch(overlap))
            samples = time_replay(graph.replay, self._stream, seconds)
        return chain_timing(samples, len(self.programs))

    def close(self) -> None:
        """Free the GPU's memory."""
        self._resources.close()

    def _launch(self, overlap: bool) -> None:
        for bound in self._bound[overlap]:
            bound.launch()

    def _border(self) -> Any:
        return border(self._device, f", in a chain of {len(self.programs)} kernels")


def chain_timing(samples: Sequence[float], kernels: int) -> Timing:
    """The times of a chain's graph.

    Args:
        samples: seconds a replay.
        kernels: how many there are in it.
    """
    return Timing(tuple(samples), f"one CUDA graph of {kernels} kernels, {len(samples)} replays", cold=False)
