"""Abstract interfaces of devices, loaded kernels and benchmarks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import ArrayType, Executable, check_block_limits
from tvmconv.errors import DeviceError
from tvmconv.target import BlockLimits, Target, get_max_cluster_blocks

if TYPE_CHECKING:
    import tvm

    from tvmconv.compiler.lowered_module import LoweredModule
    from tvmconv.devices.comparison import OutputComparison, ReferenceOutput
    from tvmconv.devices.power import PowerSample

LONG_LAUNCH_SECONDS = 0.5  # a kernel with longer launches is launched as rarely as possible
# Arrays that exceed the last cache this many times are read from global memory wherever they are.
MAX_CACHED_RATIO = 4
MAX_BUFFER_SETS = 512  # limit for cold timings; arrays of a few KiB would need thousands of sets to exceed a cache


class DeviceNotFoundError(DeviceError):
    """No device of a kind is available; the message is "no cuda device: REASON; REMEDY".

    `has_driver`: whether a driver for such devices is installed, so that only other software is missing.
    """

    def __init__(self, kind: str, reason: str, remedy: str, *, has_driver: bool = False) -> None:
        super().__init__(f"no {kind} device: {reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy
        self.has_driver = has_driver


class DeviceLostError(DeviceError):
    """A kernel fault made the device unusable for this process; other processes can still use it."""


@dataclass(frozen=True)
class Timing:
    """Measured times of a kernel."""

    seconds: tuple[float, ...]  # seconds per launch, one number per sample
    method: str  # measurement method, such as "CUDA graph of 20 launches, 50 replays, hot L2"
    cold: bool  # whether the arrays of each launch were outside the cache

    @property
    def median(self) -> float:
        """Median of the samples, in seconds per launch."""
        return float(np.median(self.seconds))

    @property
    def best(self) -> float:
        """Fastest sample, in seconds per launch."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range divided by the median; about half of the samples are within ± this fraction."""
        lower, upper = np.percentile(self.seconds, (25, 75))
        return float(upper - lower) / 2 / self.median

    def __str__(self) -> str:
        """Return a text such as "69.2 µs ± 0.1% (CUDA graph of 20 launches, 50 replays, hot L2)"."""
        scale, unit = (1e6, "µs") if self.median < 1e-3 else (1e3, "ms") if self.median < 1 else (1, "s")
        return f"{self.median * scale:.4g} {unit} ± {self.spread:.1%} ({self.method})"

    def __repr__(self) -> str:
        return f"<Timing {self}>"


@dataclass(frozen=True)
class Device(ABC):
    """A device on which kernels run and are timed, or an architecture that they are compiled for."""

    text: str  # name for users, such as "cuda:0", "opencl:0" or "sm_90"
    name: str
    arch: str | None  # NVIDIA architecture, such as "sm_90"; None for OpenCL
    memory_bytes: int | None  # size of global memory; None for an architecture without hardware, as below
    multiprocessors: int | None  # number of streaming multiprocessors (OpenCL: compute units)
    max_threads_per_block: int  # maximum number of threads per block (OpenCL: work-items per work-group)
    shared_bytes_per_block: int  # maximum static shared memory per block in bytes (OpenCL: local memory)
    peak_flops: float | None = None  # peak float32 FLOP/s, with a multiply-add counted as two; None if unknown
    peak_bandwidth: float | None = None  # peak bandwidth of global memory in bytes/s; None if unknown
    l2_bytes: int | None = None  # size of the last cache before global memory
    index: int = 0  # index among the devices of its kind on its host
    # Maximum static and dynamic shared memory per block in bytes if the launch opts in; None if this is not supported.
    opt_in_shared_bytes_per_block: int | None = field(default=None, kw_only=True)
    has_float16: bool = field(default=True, kw_only=True)  # whether kernels can use float16

    kind: ClassVar[str]

    @property
    def limits(self) -> BlockLimits:
        """Maximum resources of a block, which bound legal configs and the search space."""
        return BlockLimits(
            self.max_threads_per_block,
            self.shared_bytes_per_block,
            self.opt_in_shared_bytes_per_block,
            get_max_cluster_blocks(self.arch),
        )

    @property
    def target(self) -> Target | None:
        """The GPU with its peak rates; None if they are unknown."""
        if not (self.arch and self.multiprocessors and self.peak_flops and self.peak_bandwidth):
            return None
        return Target(self.name, self.arch, self.multiprocessors, self.peak_flops, self.peak_bandwidth)

    @abstractmethod
    def make_target(self) -> tvm.target.Target:
        """Return the TVM target to lower for, including its host."""

    @abstractmethod
    def load(self, executable: Executable) -> LoadedKernel:
        """Load an executable that was lowered for `make_target()`."""

    @abstractmethod
    def create_benchmark(
        self, inputs: Sequence[NDArray[Any]], reference: ReferenceOutput | NDArray[np.float64]
    ) -> Benchmark:
        """Copy a workload's inputs and its reference to the device, to measure many kernels on them.

        `inputs`: all arguments of the kernels except the output.
        `reference`: reference, or the array of the full output.
        """

    def is_location_relevant(self, nbytes: int) -> bool:
        """Return whether the time of a kernel may depend on the physical location of its arrays.

        Arrays that the last cache could hold compete for its sets, which the physical addresses select. On an H100,
        one kernel took 8.8 µs or 11.5 µs in different arrays.

        `nbytes`: size of all arrays in bytes.
        """
        return self.l2_bytes is not None and nbytes <= MAX_CACHED_RATIO * self.l2_bytes

    def occupy_memory(self, sizes_bytes: Sequence[int]) -> AbstractContextManager[object]:
        """Return a context in which arrays of these sizes are allocated, so that later arrays are elsewhere."""
        return nullcontext()

    def open_sensors(self) -> Callable[[], PowerSample]:
        """Return a function that reads clock and energy; raise DeviceError if the device has no such sensors."""
        raise DeviceError(f"{self.text} has no sensors of clock and energy: expected an NVIDIA GPU")

    def check_dtypes(self, dtypes: Iterable[str]) -> None:
        """Raise DeviceError if the device does not support arguments of these dtypes."""
        if "float16" in dtypes and not self.has_float16:
            raise DeviceError(f"{self.text} has no float16 (cl_khr_fp16): choose bfloat16, or another device")

    def check_block_limits(self, kernel: LoweredModule | Executable) -> None:
        """Raise DeviceError if a block of one of the device functions exceeds the limits of the device."""
        check_block_limits(kernel.kernels, self.limits, self.text)


class TurnTimer(Protocol):
    """Timer of a kernel or a library in turns with others, so that all of them run at the same clocks."""

    def take_turn(self, seconds: float, *, counts: bool = True) -> None:
        """Time launches for about these seconds; the times count if `counts`."""

    def finish(self) -> Timing:
        """Return the times of all turns."""


class LoadedKernel(ABC):
    """An executable that is loaded on a device."""

    device: Device
    executable: Executable

    @abstractmethod
    def run(self, inputs: Sequence[NDArray[Any]], written: NDArray[Any] | None = None) -> NDArray[Any]:
        """Run once with output and workspace filled with NaN, so that unwritten elements are detected.

        `inputs`: arrays for all `arrays` of the executable except the last, which is the output.
        `written`: array that receives the last input as it is after the run, if the kernel writes to it.
        """

    def call_dlpack(self, inputs: Sequence[Any]) -> Any:
        """Run on arrays of another library, without a copy, on the current stream of that library.

        The call does not wait for the kernel. The output is not filled with NaN before.

        `inputs`: C-contiguous arrays on this device that support DLPack (PyTorch, CuPy, TVM, ...).
        """
        raise DeviceError(f"{self.device.text} takes NumPy arrays only, and got {type(inputs[0]).__module__}'s")

    @abstractmethod
    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time the kernel alone with the clock of the device, after a warm-up.

        `inputs`: arrays as for `run`.
        `cold`: cycle through copies of the arrays that exceed twice the cache, so that no launch finds cached data.
        `seconds`: approximate device time to spend. A slow kernel is still launched a few times, and one whose launch
            takes `LONG_LAUNCH_SECONDS` once.
        """

    def open_timer(
        self, inputs: Sequence[NDArray[Any]], *, cold: bool = False
    ) -> AbstractContextManager[TurnTimer] | None:
        """Return a block with a timer of turns; None if the device has no such timer.

        The arguments are those of `time`.
        """
        return None


class Benchmark(ABC):
    """Inputs and reference of a workload on a device, for the verification and timing of many kernels."""

    @abstractmethod
    def compare(self, kernel: LoadedKernel) -> OutputComparison:
        """Run a kernel once with output and workspace filled with NaN, and compare the output with the reference."""

    @abstractmethod
    def time(self, kernel: LoadedKernel, best_seconds: float) -> tuple[float, ...]:
        """Time a kernel that ran before, for a duration that depends on `measurement_fraction`.

        The cache is hot, unless the arrays exceed it on a GPU.

        A kernel whose launch takes `LONG_LAUNCH_SECONDS` is launched once.

        `best_seconds`: best time so far in seconds per launch, or `math.inf`.
        """

    def time_final(self, kernel: LoadedKernel) -> tuple[float, ...]:
        """Time a kernel that ran before for a final comparison, with a warm-up and for longer than `time`.

        A kernel that draws the maximum power slows the GPU's clock down after some milliseconds.
        """
        return self.time(kernel, math.inf)

    @abstractmethod
    def restore_inputs(self) -> None:
        """Copy inputs and reference to the device again, because a wrong kernel may have overwritten them."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory on the device."""


SLOW_RATIO, CLOSE_RATIO = 3.0, 1.2


def measurement_fraction(seconds: float, best_seconds: float) -> float:
    """Return the fraction of the full measuring time to spend on a kernel after its first sample.

    The fraction is 0 if the kernel is `SLOW_RATIO` times slower than the best, and 1 if it may become the best.

    `seconds`: first sample in seconds per launch.
    `best_seconds`: best time so far in seconds per launch.
    """
    if seconds >= SLOW_RATIO * best_seconds:
        return 0.0
    return 1.0 if seconds <= CLOSE_RATIO * best_seconds else 0.2


def check_inputs(executable: Executable, inputs: Sequence[Any]) -> None:
    """Raise DeviceError if the shapes and dtypes of `inputs` differ from those of the executable."""
    actual = [f"{x.dtype} {tuple(x.shape)}" for x in inputs]
    expected = [f"{array.dtype} {array.shape}" for array in executable.arrays[:-1]]
    if actual != expected:
        raise DeviceError(f"the kernel takes inputs {', '.join(expected)}, not {', '.join(actual)}")


def nan_filled(array: ArrayType) -> NDArray[Any]:
    """Return an array with all bits set, which is NaN in every floating-point dtype."""
    return np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class BufferSets:
    """Number of copies of a kernel's arrays through which the launches of a timing cycle."""

    num_sets: int
    set_bytes: int  # size of one copy in bytes: inputs, output and workspace
    # Total size that leaves no data of a launch in the cache until its next turn; 0 for hot timings.
    min_cold_bytes: int

    @classmethod
    def choose_count(cls, set_bytes: int, cache_bytes: int, *, cold: bool) -> BufferSets:
        """Choose one copy for a hot cache, or up to `MAX_BUFFER_SETS` that exceed twice the size of a cold cache."""
        cold_bytes = 2 * cache_bytes if cold else 0
        return cls(min(cold_bytes // set_bytes + 1, MAX_BUFFER_SETS), set_bytes, cold_bytes)

    def describe(self, cache: str) -> str:
        """Return a text such as "hot L2" or "cold L2: 240 sets of buffers in turn, 126 MB" for `Timing.method`."""
        if not self.min_cold_bytes:
            return f"hot {cache}"
        total = self.num_sets * self.set_bytes
        text = f"cold {cache}: {self.num_sets} sets of buffers in turn, {total / 1e6:.3g} MB"
        is_enough = total > self.min_cold_bytes
        return text if is_enough else f"{text} of the {self.min_cold_bytes / 1e6:.3g} MB that would empty it"


def get_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
