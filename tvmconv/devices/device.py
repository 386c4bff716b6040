"""What a device, and a kernel loaded on one, can do, whatever runs underneath."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.compiler.executable import ArrayType, Executable, check_block_limits
from tvmconv.errors import DeviceError
from tvmconv.gpu_specs import BlockLimits, get_max_cluster_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.lowered_module import LoweredModule
    from tvmconv.devices.comparison import OutputComparison, ReferenceOutput

LONG_LAUNCH_SECONDS = 0.5  # a kernel of which a launch takes longer is launched as rarely as possible
MAX_BUFFER_SETS = 512  # for cold timings: kernels of a few KiB would need thousands to fill a cache


class DeviceNotFoundError(DeviceError):
    """No device of a kind is here; the message is "no cuda device: REASON; REMEDY".

    Args:
        kind: the kind of device.
        reason: why there is none.
        remedy: what to do about it.
        has_driver: whether a driver for such devices is here, so that software alone is missing.
    """

    def __init__(self, kind: str, reason: str, remedy: str, *, has_driver: bool = False) -> None:
        super().__init__(f"no {kind} device: {reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy
        self.has_driver = has_driver


class DeviceLostError(DeviceError):
    """A kernel's fault took the device from this process for good; another process may use it."""


@dataclass(frozen=True)
class Timing:
    """A kernel's times, and how they were taken.

    Attributes:
        seconds: seconds per launch, one number a sample.
        method: how they were taken, such as "CUDA graph of 20 launches, 50 replays, hot L2".
        cold: whether each launch found its arrays outside the cache.
    """

    seconds: tuple[float, ...]
    method: str
    cold: bool

    @property
    def median(self) -> float:
        """Seconds per launch of the sample in the middle."""
        return float(np.median(self.seconds))

    @property
    def best(self) -> float:
        """Seconds per launch of the fastest sample."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Half the inter-quartile range over the median: half of all samples lie within about ± this share of it."""
        lower, upper = np.percentile(self.seconds, (25, 75))
        return float(upper - lower) / 2 / self.median

    def __str__(self) -> str:
        """Such as "69.2 µs ± 0.1% (CUDA graph of 20 launches, 50 replays, hot L2)"."""
        scale, unit = (1e6, "µs") if self.median < 1e-3 else (1e3, "ms") if self.median < 1 else (1, "s")
        return f"{self.median * scale:.4g} {unit} ± {self.spread:.1%} ({self.method})"

    def __repr__(self) -> str:
        return f"<Timing {self}>"


@dataclass(frozen=True)
class Device(ABC):
    """Where a kernel runs and is timed, or what it is compiled for.

    Attributes:
        text: how a user names it: "cuda:0", "opencl:0", "sm_90".
        name: the driver's name for it.
        arch: NVIDIA architecture, such as "sm_90"; None on OpenCL.
        memory_bytes: global memory; None when there is no hardware behind it, as below.
        multiprocessors: streaming multiprocessors (CUDA) or compute units (OpenCL).
        max_threads_per_block: largest block (OpenCL: work-group).
        shared_bytes_per_block: largest static shared memory of a block (OpenCL: local memory of a work-group).
        peak_flops: float32 FLOP/s, a multiply-add counted as two; None where it is not known.
        peak_bandwidth: bytes/s of global memory; None where it is not known.
        l2_bytes: last cache before global memory.
        opt_in_shared_bytes_per_block: largest shared memory of a block, static and dynamic, where a launch asks for it;
            None for no more than the static one.
        has_float16: whether its kernels may have float16 in them.
    """

    text: str
    name: str
    arch: str | None
    memory_bytes: int | None
    multiprocessors: int | None
    max_threads_per_block: int
    shared_bytes_per_block: int
    peak_flops: float | None
    peak_bandwidth: float | None
    l2_bytes: int | None
    opt_in_shared_bytes_per_block: int | None = field(default=None, kw_only=True)
    has_float16: bool = field(default=True, kw_only=True)

    kind: ClassVar[str]

    @property
    def limits(self) -> BlockLimits:
        """What a block may have at most here: what is legal, and what a search goes through."""
        return BlockLimits(
            self.max_threads_per_block,
            self.shared_bytes_per_block,
            self.opt_in_shared_bytes_per_block,
            get_max_cluster_blocks(self.arch),
        )

    @abstractmethod
    def make_target(self) -> Target:
        """The TVM target to lower for, with its host."""

    @abstractmethod
    def load(self, executable: Executable) -> LoadedKernel:
        """Make a program that was lowered for `make_target()` ready to run here.

        Raises:
            CompileError: the device's compiler rejects it.
            DeviceError: the device cannot run it.
        """

    @abstractmethod
    def create_benchmark(
        self, inputs: Sequence[NDArray[Any]], reference: ReferenceOutput | NDArray[np.float64]
    ) -> Benchmark:
        """Bring a workload's inputs and its reference here, to measure many kernels on them.

        Args:
            inputs: all arguments of the kernels but the output.
            reference: what is right, or an array of the whole output.

        Raises:
            DeviceError: they do not fit in the device's memory, or the device is lost.
        """

    def check_dtypes(self, dtypes: Iterable[str]) -> None:
        """Raise DeviceError if this device's kernels cannot have arguments of these dtypes."""
        if "float16" in dtypes and not self.has_float16:
            raise DeviceError(f"{self.text} has no float16 (cl_khr_fp16): choose bfloat16, or another device")

    def check_block_limits(self, kernel: LoweredModule | Executable) -> None:
        """Raise DeviceError if a block of one of the kernel's steps is larger than the device allows."""
        check_block_limits(kernel.kernels, self.limits, self.text)


class LoadedKernel(ABC):
    """A kernel on a device.

    Attributes:
        device: the device.
        executable: the kernel.
    """

    device: Device
    executable: Executable

    @abstractmethod
    def run(self, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Run once, on an output and scratch memory full of NaN, so that what the kernel leaves out is seen.

        Args:
            inputs: the program's `arrays` but for the last, which is the output.

        Raises:
            DeviceError: the launch or the kernel failed, or memory ran out.
        """

    def call_dlpack(self, inputs: Sequence[Any]) -> Any:
        """Run on another library's arrays, without a copy, on the stream on which that library is working.

        Does not wait for the kernel to end, and leaves the output's memory as the library hands it out.

        Args:
            inputs: arrays of this device that speak DLPack (PyTorch, CuPy, TVM, ...), C-contiguous.

        Returns:
            A tensor of PyTorch or array of CuPy if the first input is one, else one of TVM, which speaks DLPack.

        Raises:
            DeviceError: the device takes no such arrays, or an input is elsewhere, not contiguous, or of another shape
                or dtype than the kernel's.
        """
        raise DeviceError(f"{self.device.text} takes NumPy arrays only, and got {type(inputs[0]).__module__}'s")

    @abstractmethod
    def time(self, inputs: Sequence[NDArray[Any]], *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time the kernel alone, on the device's own clock, after a warm-up.

        Args:
            inputs: as for `run`.
            cold: go through as many copies of the arrays as exceed twice the cache, so that none is still in it.
            seconds: device time to spend, about; a slow kernel gets a few launches all the same, and one whose launch
                takes `LONG_LAUNCH_SECONDS` gets a single one.

        Raises:
            DeviceError: as for `run`.
        """


class Benchmark(ABC):
    """A workload's inputs and reference on a device, where many kernels are verified and timed one after another."""

    @abstractmethod
    def compare(self, kernel: LoadedKernel) -> OutputComparison:
        """Run a kernel once on an output and scratch memory full of NaN, and compare the output with the reference.

        Raises:
            DeviceLostError: the kernel's fault took the device.
            DeviceError: the kernel failed.
        """

    def measure_relative_error(self, kernel: LoadedKernel) -> float:
        """Run a kernel as `compare` does; the relative L2 error, not finite when it left an element unwritten."""
        return self.compare(kernel).relative_error

    @abstractmethod
    def time(self, kernel: LoadedKernel, best_seconds: float) -> tuple[float, ...]:
        """Time a kernel that ran before, hot, as long as it deserves (`measurement_fraction`).

        A kernel whose launch takes `LONG_LAUNCH_SECONDS` is launched once.

        Args:
            kernel: the kernel.
            best_seconds: the best time known, in seconds a launch, or `math.inf`.

        Returns:
            Seconds per launch, one number a sample.

        Raises:
            DeviceError: as for `compare`.
        """

    def time_final(self, kernel: LoadedKernel) -> tuple[float, ...]:
        """Time a kernel that ran before as a comparison of the fastest does: warmed up, and for longer than `time`.

        What draws all the power that a GPU may have slows down after some milliseconds.

        Returns:
            Seconds per launch, one number a sample.

        Raises:
            DeviceError: as for `compare`.
        """
        return self.time(kernel, math.inf)

    @abstractmethod
    def restore_inputs(self) -> None:
        """Bring inputs and reference here again: a wrong kernel may have written over them."""

    @abstractmethod
    def close(self) -> None:
        """Free what is here."""


SLOW_RATIO, CLOSE_RATIO = 3.0, 1.2


def measurement_fraction(seconds: float, best_seconds: float) -> float:
    """The share of the full measuring time that a kernel deserves after its first sample.

    None of it when it is `SLOW_RATIO` times slower than the best, all of it when it may become the best.

    Args:
        seconds: the first sample, in seconds a launch.
        best_seconds: the best time known.
    """
    if seconds >= SLOW_RATIO * best_seconds:
        return 0.0
    return 1.0 if seconds <= CLOSE_RATIO * best_seconds else 0.2


def check_inputs(executable: Executable, inputs: Sequence[Any]) -> None:
    """Raise DeviceError unless `inputs`, which have a shape and a dtype, are what the kernel was built for."""
    actual = [f"{x.dtype} {tuple(x.shape)}" for x in inputs]
    expected = [f"{array.dtype} {array.shape}" for array in executable.arrays[:-1]]
    if actual != expected:
        raise DeviceError(f"the kernel takes inputs {', '.join(expected)}, not {', '.join(actual)}")


def nan_filled(array: ArrayType) -> NDArray[Any]:
    """An array with all bits set, which is NaN in every floating-point type."""
    return np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class BufferSets:
    """How many copies of a kernel's arrays a timing goes through in turn.

    Attributes:
        num_sets: number of copies.
        set_bytes: size of one copy: all inputs, the output and what scratch memory a kernel has.
        min_cold_bytes: what all copies must exceed for a launch to find nothing of its own in the cache; 0 for hot
            timings.
    """

    num_sets: int
    set_bytes: int
    min_cold_bytes: int

    @classmethod
    def choose_count(cls, set_bytes: int, cache_bytes: int, *, cold: bool) -> BufferSets:
        """One copy for a hot cache; for a cold one enough to exceed twice the cache, but at most `MAX_BUFFER_SETS`."""
        cold_bytes = 2 * cache_bytes if cold else 0
        return cls(min(cold_bytes // set_bytes + 1, MAX_BUFFER_SETS), set_bytes, cold_bytes)

    def describe(self, cache: str) -> str:
        """For `Timing.method`: "hot L2", or "cold L2: 240 sets of buffers in turn, 126 MB"."""
        if not self.min_cold_bytes:
            return f"hot {cache}"
        total = self.num_sets * self.set_bytes
        shortfall = (
            "" if total > self.min_cold_bytes else f" of the {self.min_cold_bytes / 1e6:.3g} MB that would empty it"
        )
        return f"cold {cache}: {self.num_sets} sets of buffers in turn, {total / 1e6:.3g} MB{shortfall}"


def sum_buffer_bytes(inputs: Sequence[NDArray[Any]], output_shape: Sequence[int], output_dtype: str) -> int:
    """Bytes of all inputs and the output."""
    return sum(array.nbytes for array in inputs) + ArrayType(tuple(output_shape), output_dtype).nbytes


def get_first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
