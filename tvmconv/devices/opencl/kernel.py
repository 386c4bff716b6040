"""Kernels on an OpenCL device, one at a time or measured one after another.

TVM's wheel generates OpenCL and has no runtime for it, so launch shape and parameters are set here.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv.devices.base import (
    LONG_LAUNCH_SECONDS,
    Bench,
    BufferSets,
    Device,
    Loaded,
    Timing,
    check_inputs,
    effort,
    first_line,
    poisoned,
)
from tvmconv.devices.comparison import Comparison, Reference, as_reference
from tvmconv.errors import CompileError, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.compiler.program import Program

MIN_SAMPLES, MAX_SAMPLES = 3, 1000
BEARABLE_SECONDS = 1.0  # after which fewer samples do, too
BENCH_SECONDS, MAX_BENCH_SAMPLES = 0.2, 20  # for a kernel that may become the best


class OpenclLoaded(Loaded):
    """A kernel on an OpenCL device."""

    def __init__(self, device: Device, program: Program, queue: Any) -> None:
        import pyopencl as cl

        self.device = device
        self.program = program
        self._queue = queue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", cl.CompilerWarning)  # PoCL's compiler speaks of unused variables
            try:
                # No cache of pyopencl's besides the driver's own: it would need a home directory to write to.
                built = {
                    code: cl.Program(queue.context, header() + code.decode()).build(cache_dir=False)
                    for code in {step.code for step in program.steps}
                }
            except cl.Error as error:
                raise CompileError(f"{device.text} rejects the kernel: {_first_error(str(error))}") from error
        self._kernels = [cl.Kernel(built[step.code], step.name) for step in program.steps]

    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once; see `Loaded.run`."""
        check_inputs(self.program, inputs)
        output = poisoned(self.program.output)
        with self.border():
            return self.run_on(upload(self._queue, [*inputs, output]), output)

    def run_on(self, buffers: Sequence[Any], output: NDArray[Any]) -> NDArray[Any]:
        """Run once on buffers on the device, and fill `output` from the last of them; within `border`."""
        self._launch([*buffers, *self.scratch(buffers)])[-1].wait()
        download(self._queue, output, buffers[-1])
        return output

    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time launches by their profiling events; see `Loaded.time`."""
        check_inputs(self.program, inputs)
        output = poisoned(self.program.output)
        sets = BufferSets.choose(self.program.nbytes, self.device.l2_bytes or 0, cold=cold)
        samples: list[float] = []
        with self.border():
            arrays = [upload(self._queue, [*inputs, output]) for _ in range(sets.count)]
            buffers = [[*each, *self.scratch(each)] for each in arrays]
            self._launch(buffers[-1])[-1].wait()  # PoCL compiles for the work-group's size at the first launch
            while _needs_more(samples, seconds):
                samples.append(self.sample(buffers[len(samples) % sets.count]))
        method = f"OpenCL profiling events of {len(samples)} launches, {sets.describe('cache')}"
        return Timing(tuple(samples), method, cold)

    def sample(self, buffers: Sequence[Any]) -> float:
        """Seconds that one launch takes, from the begin of its first step that is timed to the end of its last.

        At least a nanosecond: a device's clock may not tick meanwhile. Within `border`.

        Args:
            buffers: of the program's `arrays` and its `scratch`.
        """
        events = self._launch(buffers)
        events[-1].wait()
        return max(events[-1].profile.end - events[0].profile.start, 1) / 1e9

    def scratch(self, buffers: Sequence[Any]) -> list[Any]:
        """Fresh scratch memory, full of NaN but for what the prepared steps make of the program's `arrays`."""
        fresh = upload(self._queue, [poisoned(array) for array in self.program.scratch])
        self._launch([*buffers, *fresh], range(self.program.prepared))
        return fresh

    def _launch(self, buffers: Sequence[Any], steps: range | None = None) -> list[Any]:
        """Queue steps, by default all but those that are prepared; their events.

        Args:
            buffers: of the program's `arrays` and its `scratch`.
            steps: their numbers.
        """
        import pyopencl as cl

        events: list[Any] = []
        for number in range(self.program.prepared, len(self.program.steps)) if steps is None else steps:
            step, kernel = self.program.steps[number], self._kernels[number]
            grid, block = step.launch.grid, step.launch.block
            kernel.set_args(*(buffers[i] for i in step.arguments))
            work_items = tuple(blocks * threads for blocks, threads in zip(grid, block, strict=True))
            events.append(cl.enqueue_nd_range_kernel(self._queue, kernel, work_items, block))  # in the queue's order
        return events

    @contextmanager
    def border(self) -> Iterator[None]:
        """Turn errors of OpenCL into a DeviceError of one line."""
        import pyopencl as cl

        try:
            yield
        except cl.Error as error:
            message = f"{self.device.text}: {first_line(error)}, launched as {self.program.launches}"
            raise DeviceError(message) from error


class OpenclBench(Bench):
    """A workload's arrays in an OpenCL device's memory; see `Bench`."""

    def __init__(
        self,
        device: Device,
        queue: Any,
        inputs: Sequence[NDArray[Any]],
        reference: Reference | NDArray[np.float64],
    ) -> None:
        self._device = device
        self._queue = queue
        self._inputs = inputs
        self._reference = as_reference(reference)
        self.restore()

    def restore(self) -> None:
        """Copy the inputs again; see `Bench.restore`."""
        import pyopencl as cl

        try:
            self._buffers = upload(self._queue, self._inputs)
        except cl.Error as error:
            raise DeviceError(f"{self._device.text}: {first_line(error)}") from error

    def compare(self, kernel: Loaded) -> Comparison:
        """Run once and compare on the host; see `Bench.compare`."""
        assert isinstance(kernel, OpenclLoaded)
        output = poisoned(kernel.program.output)
        with kernel.border():
            kernel.run_on([*self._buffers, *upload(self._queue, [output])], output)
        return self._reference.compare(output)

    def time(self, kernel: Loaded, best: float) -> tuple[float, ...]:
        """Time single launches by their profiling events; see `Bench.time`."""
        assert isinstance(kernel, OpenclLoaded)
        with kernel.border():
            output = upload(self._queue, [poisoned(kernel.program.output)])
            arrays = [*self._buffers, *output]
            buffers = [*arrays, *kernel.scratch(arrays)]
            samples = [kernel.sample(buffers)]
            seconds = effort(samples[0], best) * BENCH_SECONDS
            if seconds and samples[0] < LONG_LAUNCH_SECONDS:
                count = min(max(seconds / samples[0], MIN_SAMPLES), MAX_BENCH_SAMPLES)
                samples += [kernel.sample(buffers) for _ in range(int(count))]
        return tuple(samples)

    def close(self) -> None:
        """Free the device's memory."""
        for buffer in self._buffers:
            buffer.release()


def _needs_more(samples: Sequence[float], seconds: float) -> bool:
    """Whether a timing that shall take about so many seconds needs more samples than these."""
    if not samples:
        return True
    if samples[0] >= LONG_LAUNCH_SECONDS:
        return False
    least = seconds if len(samples) >= MIN_SAMPLES else max(seconds, BEARABLE_SECONDS)
    return sum(samples) < least and len(samples) < MAX_SAMPLES


def header() -> str:
    """Return what precedes every program: the text of the file that `TVMCONV_OPENCL_HEADER` names, or nothing.

    Raises:
        OSError: the file cannot be read.
    """
    name = os.environ.get("TVMCONV_OPENCL_HEADER")
    return f"{Path(name).read_text(encoding='utf-8')}\n" if name else ""


def upload(queue: Any, arrays: Sequence[NDArray[Any]]) -> list[Any]:
    """Copies of the arrays on the device of `queue`."""
    import pyopencl as cl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    return [cl.Buffer(queue.context, flags, hostbuf=_raw(np.ascontiguousarray(array))) for array in arrays]


def download(queue: Any, array: NDArray[Any], buffer: Any) -> None:
    """Fill a C-contiguous array from a buffer."""
    import pyopencl as cl

    cl.enqueue_copy(queue, _raw(array), buffer)


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of an array: bfloat16 is none of the types that Python's buffers know."""
    return array.reshape(-1).view(np.uint8)


def _first_error(log: str) -> str:
    """The first line of a build log that tells an error."""
    lines = [line.strip() for line in log.splitlines() if "error:" in line]
    return (lines or log.strip().splitlines())[0]
