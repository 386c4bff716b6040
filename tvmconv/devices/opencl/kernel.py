"""Kernels on an OpenCL device, one at a time or measured one after another.

TVM's wheel generates OpenCL and has no runtime for it, so launch shape and parameters are set here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.base import (
    Bench,
    BufferSets,
    Loaded,
    Timing,
    check_inputs,
    effort,
    first_line,
    poisoned,
    relative_error,
    set_bytes,
)
from tvmconv.errors import CompileError, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.program import Program
    from tvmconv.devices.opencl.device import OpenclDevice

MIN_SAMPLES, MAX_SAMPLES = 3, 1000
BENCH_SECONDS, MAX_BENCH_SAMPLES = 0.2, 20  # for a kernel that may become the best


class OpenclLoaded(Loaded):
    """A kernel on an OpenCL device."""

    device: OpenclDevice

    def __init__(self, device: OpenclDevice, program: Program, queue: Any) -> None:
        import pyopencl as cl

        self.device = device
        self.program = program
        self._queue = queue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # PoCL's compiler speaks of unused variables
            try:
                # No cache of pyopencl's besides the driver's own: it would need a home directory to write to.
                built = cl.Program(queue.context, program.code.decode()).build(cache_dir=False)
            except cl.Error as error:
                raise CompileError(f"{device.text} rejects the kernel: {_first_error(str(error))}") from error
        self._kernel = cl.Kernel(built, program.name)

    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once; see `Loaded.run`."""
        check_inputs(self.program, inputs)
        output = poisoned(self.program.output)
        with self.border():
            return self.run_on(upload(self._queue, [*inputs, output]), output)

    def run_on(self, buffers: Sequence[Any], output: NDArray[Any]) -> NDArray[Any]:
        """Run once on buffers on the device, and fill `output` from the last of them; within `border`."""
        import pyopencl as cl

        self._launch(buffers).wait()
        cl.enqueue_copy(self._queue, output, buffers[-1])
        return output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches by their profiling events; see `Loaded.time`."""
        check_inputs(self.program, inputs)
        output = poisoned(self.program.output)
        size = set_bytes(inputs, output.shape, str(output.dtype))
        sets = BufferSets.choose(size, self.device.l2_bytes or 0, cold=cold)
        samples: list[float] = []
        with self.border():
            buffers = [upload(self._queue, [*inputs, output]) for _ in range(sets.count)]
            self._launch(buffers[-1]).wait()  # PoCL compiles for the work-group's size at the first launch
            while len(samples) < MIN_SAMPLES or (sum(samples) < seconds and len(samples) < MAX_SAMPLES):
                samples.append(self.sample(buffers[len(samples) % sets.count]))
        method = f"OpenCL profiling events of {len(samples)} launches, {sets.describe('cache')}"
        return Timing(tuple(samples), method, cold)

    def sample(self, buffers: Sequence[Any]) -> float:
        """Seconds that one launch takes; within `border`."""
        event = self._launch(buffers)
        event.wait()
        return (event.profile.end - event.profile.start) / 1e9

    def _launch(self, buffers: Sequence[Any]) -> Any:
        """Queue the kernel on buffers in the order of the program's `arrays`; its event."""
        import pyopencl as cl

        launch = self.program.launch
        self._kernel.set_args(*(buffers[i] for i in self.program.arguments))
        work_items = tuple(grid * block for grid, block in zip(launch.grid, launch.block, strict=True))
        return cl.enqueue_nd_range_kernel(self._queue, self._kernel, work_items, launch.block)

    @contextmanager
    def border(self) -> Iterator[None]:
        """Turn errors of OpenCL into a DeviceError of one line."""
        import pyopencl as cl

        try:
            yield
        except cl.Error as error:
            launch = self.program.launch
            raise DeviceError(f"{self.device.text}: {first_line(error)}, launched as {launch}") from error


class OpenclBench(Bench):
    """A workload's arrays in an OpenCL device's memory; see `Bench`."""

    def __init__(
        self, device: OpenclDevice, queue: Any, inputs: Sequence[NDArray[Any]], reference: NDArray[np.float64]
    ) -> None:
        self._device = device
        self._queue = queue
        self._inputs = inputs
        self._reference = reference
        self._poison = np.full(reference.shape, np.nan, inputs[0].dtype)
        self.restore()

    def restore(self) -> None:
        """Copy the inputs again; see `Bench.restore`."""
        import pyopencl as cl

        try:
            self._buffers = upload(self._queue, [*self._inputs, self._poison])
        except cl.Error as error:
            raise DeviceError(f"{self._device.text}: {first_line(error)}") from error

    def deviation(self, kernel: Loaded) -> float:
        """Run once and compare on the host; see `Bench.deviation`."""
        import pyopencl as cl

        assert isinstance(kernel, OpenclLoaded)
        with kernel.border():
            cl.enqueue_copy(self._queue, self._buffers[-1], self._poison)
            output = kernel.run_on(self._buffers, np.empty_like(self._poison))
        return relative_error(output, self._reference)

    def time(self, kernel: Loaded, best: float) -> tuple[float, ...]:
        """Time single launches by their profiling events; see `Bench.time`."""
        assert isinstance(kernel, OpenclLoaded)
        with kernel.border():
            samples = [kernel.sample(self._buffers)]
            if seconds := effort(samples[0], best) * BENCH_SECONDS:
                count = min(max(seconds / samples[0], MIN_SAMPLES), MAX_BENCH_SAMPLES)
                samples += [kernel.sample(self._buffers) for _ in range(int(count))]
        return tuple(samples)

    def close(self) -> None:
        """Free the device's memory."""
        for buffer in self._buffers:
            buffer.release()


def upload(queue: Any, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """Copies of the arrays on the device of `queue`."""
    import pyopencl as cl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return [cl.Buffer(queue.context, flags, hostbuf=np.ascontiguousarray(array)) for array in arrays]


def _first_error(log: str) -> str:
    """The first line of a build log that tells an error."""
    lines = [line.strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.strip().splitlines())[0]
