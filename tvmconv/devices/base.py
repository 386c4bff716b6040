"""What a device, and a kernel loaded on one, can do, whatever runs underneath."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.compiler.program import ArrayType, Program, check_fits
from tvmconv.errors import DeviceError
from tvmconv.gpu import Limits, max_cluster

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.lowered import Lowered
    from tvmconv.devices.comparison import Comparison, Reference

LONG_LAUNCH_SECONDS = 0.5  # a kernel of which a launch takes longer is launched as rarely as possible
MAX_BUFFER_SETS = 512  # for cold timings: kernels of a few KiB would need thousands to fill a cache


class AbsentError(DeviceError):
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


class LostError(DeviceError):
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
    def limits(self) -> Limits:
        """What a block may have at most here: what is legal, and what a search goes through."""
        return Limits(
            self.max_threads_per_block,
            self.shared_bytes_per_block,
            self.opt_in_shared_bytes_per_block,
            max_cluster(self.arch),
        )

    @abstractmethod
    def target(self) -> Target:
        """The TVM target to lower for, with its host."""

    @abstractmethod
    def load(self, program: Program) -> Loaded:
        """Make a program that was lowered for `target()` ready to run here.

        Raises:
            CompileError: the device's compiler rejects it.
            DeviceError: the device cannot run it.
        """

    @abstractmethod
    def bench(self, inputs: Sequence[NDArray[Any]], reference: Reference | NDArray[np.float64]) -> Bench:
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

    def check_fits(self, kernel: Lowered | Program) -> None:
        """Raise DeviceError if a block of one of the kernel's steps is larger than the device allows."""
        check_fits(kernel.steps, self.limits, self.text)


class Loaded(ABC):
    """A kernel on a device.

    Attributes:
        device: the device.
        program: the kernel.
    """

    device: Device
    program: Program

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


class Bench(ABC):
    """A workload's inputs and reference on a device, where many kernels are verified and timed one after another."""

    @abstractmethod
    def compare(self, kernel: Loaded) -> Comparison:
        """Run a kernel once on an output and scratch memory full of NaN, and compare the output with the reference.

        Raises:
            LostError: the kernel's fault took the device.
            DeviceError: the kernel failed.
        """

    def deviation(self, kernel: Loaded) -> float:
        """Run a kernel as `compare` does; the relative L2 error, not finite when it left an element unwritten."""
        return self.compare(kernel).error

    @abstractmethod
    def time(self, kernel: Loaded, best: float) -> tuple[float, ...]:
        """Time a kernel that ran before, hot, as long as it deserves (`effort`).

        A kernel whose launch takes `LONG_LAUNCH_SECONDS` is launched once.

        Args:
            kernel: the kernel.
            best: the best time known, in seconds a launch, or `math.inf`.

        Returns:
            Seconds per launch, one number a sample.

        Raises:
            DeviceError: as for `compare`.
        """

    def time_long(self, kernel: Loaded) -> tuple[float, ...]:
        """Time a kernel that ran before as a comparison of the fastest does: warmed up, and for longer than `time`.

        What draws all the power that a GPU may have slows down after some milliseconds.

        Returns:
            Seconds per launch, one number a sample.

        Raises:
            DeviceError: as for `compare`.
        """
        return self.time(kernel, math.inf)

    @abstractmethod
    def restore(self) -> None:
        """Bring inputs and reference here again: a wrong kernel may have written over them."""

    @abstractmethod
    def close(self) -> None:
        """Free what is here."""


SLOW, CLOSE = 3.0, 1.2


def effort(seconds: float, best: float) -> float:
    """The share of the full measuring time that a kernel deserves after its first sample.

    None of it when it is `SLOW` times slower than the best, all of it when it may become the best.

    Args:
        seconds: the first sample, in seconds a launch.
        best: the best time known.
    """
    if seconds >= SLOW * best:
        return 0.0
    return 1.0 if seconds <= CLOSE * best else 0.2


def check_inputs(program: Program, inputs: Sequence[Any]) -> None:
    """Raise DeviceError unless `inputs`, which have a shape and a dtype, are what the kernel was built for."""
    given = [f"{x.dtype} {tuple(x.shape)}" for x in inputs]
    wanted = [f"{array.dtype} {array.shape}" for array in program.arrays[:-1]]
    if given != wanted:
        raise DeviceError(f"the kernel takes inputs {', '.join(wanted)}, not {', '.join(given)}")


def poisoned(array: ArrayType) -> NDArray[Any]:
    """An array with all bits set, which is NaN in every floating-point type."""
    return np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape)


@dataclass(frozen=True)
class BufferSets:
    """How many copies of a kernel's arrays a timing goes through in turn.

    Attributes:
        count: number of copies.
        set_bytes: size of one copy: all inputs, the output and what scratch memory a kernel has.
        cold_bytes: what all copies must exceed for a launch to find nothing of its own in the cache; 0 for hot timings.
    """

    count: int
    set_bytes: int
    cold_bytes: int

    @classmethod
    def choose(cls, set_bytes: int, cache_bytes: int, *, cold: bool) -> BufferSets:
        """One copy for a hot cache; for a cold one enough to exceed twice the cache, but at most `MAX_BUFFER_SETS`."""
        cold_bytes = 2 * cache_bytes if cold else 0
        return cls(min(cold_bytes // set_bytes + 1, MAX_BUFFER_SETS), set_bytes, cold_bytes)

    def describe(self, cache: str) -> str:
        """For `Timing.method`: "hot L2", or "cold L2: 240 sets of buffers in turn, 126 MB"."""
        if not self.cold_bytes:
            return f"hot {cache}"
        total = self.count * self.set_bytes
        short = "" if total > self.cold_bytes else f" of the {self.cold_bytes / 1e6:.3g} MB that would empty it"
        return f"cold {cache}: {self.count} sets of buffers in turn, {total / 1e6:.3g} MB{short}"


def set_bytes(inputs: Sequence[NDArray[Any]], output_shape: Sequence[int], output_dtype: str) -> int:
    """Bytes of all inputs and the output."""
    return sum(array.nbytes for array in inputs) + ArrayType(tuple(output_shape), output_dtype).nbytes


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
