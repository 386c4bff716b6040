"""Building: a workload and a schedule become a kernel, to be run, verified, timed and looked at."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices, library
from tvmconv.compiler import build as road
from tvmconv.compiler.lowered import Lowered, LoweredStep
from tvmconv.compiler.program import ArrayType, Launch, Program
from tvmconv.compiler.source import without_preamble
from tvmconv.errors import CompileError, DeviceError, WorkloadError
from tvmconv.knobs import Config, Value
from tvmconv.verify import Problem, Verification
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.listing import Listing
    from tvmconv.compiler.nvrtc import Cubin, Resources
    from tvmconv.devices import Device, Timing
    from tvmconv.devices.base import Loaded
    from tvmconv.knowledge.predict import Prediction
    from tvmconv.marks import Space
    from tvmconv.workloads import Workload

STAGES = ("te", "tir", "lowered", "source", "ptx", "sass", "resources")


def build(
    workload: Workload | str,
    schedule: str | library.Schedule | None = None,
    *,
    device: str | Device | None = None,
    arch: str | None = None,
    config: Mapping[str, Value] | None = None,
) -> Kernel:
    """Build the kernel of a schedule for a workload.

    Args:
        workload: what to compute, or its text.
        schedule: how, by name or as found by `schedules`. By default the first schedule that is made to be tuned:
            `depthwise` for what is depthwise, `direct` for other convolutions and `register` for filters.
        device: where to run it, such as `cuda:0` or `opencl:0`; by default the best there is (`auto`).
        arch: instead of a device, a CUDA architecture to compile for only, such as `sm_90`.
        config: values by knob name; the other knobs take their defaults.

    Raises:
        WorkloadError: the text of the workload is malformed.
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        KnobError: no such knob, or not a value that it takes.
        DeviceError: no such device, the workload does not fit in its memory, or the kernel exceeds its limits.
        CompileError: the schedule does not lower.
    """
    workload, place = as_workload(workload), find_place(device, arch)
    chosen = None if schedule is None else library.as_schedule(workload, schedule)
    check_memory(workload, place)
    chosen = chosen or library.to_tune(workload, place.kind, place.arch)[0]
    return build_on(workload, chosen, place, config)


def find_place(device: str | Device | None, arch: str | None) -> Device:
    """The device, or the architecture to compile for, that `build` was given."""
    if device is not None and arch is not None:
        raise DeviceError(f"give a device or an architecture, not both ({device} and {arch})")
    if isinstance(device, devices.Device):
        return device
    named = arch or device or "auto"
    if not isinstance(named, str):
        raise DeviceError(f"expected a device such as 'cuda:0' or 'opencl:0', or an architecture, not {quote(named)}")
    return devices.find(named)


class Kernel:
    """A built schedule; made by `build`.

    It has one step, or several device functions that are launched one after another. What is asked of the kernel as a
    whole is then of all steps (`source`, `cubin`, `sass`), of the first (`lowered`, `launch`), or the most that one of
    them takes (`shared_bytes`, `dynamic_shared_bytes`, `resources`); `steps` has each.

    Attributes:
        workload: what it computes.
        schedule: how.
        config: the value of every knob.
        device: where it runs, or the architecture it was compiled for.
        tir: the scheduled TIR.
        module: what it lowers to: the device functions, and the host side that launches them.
        record: the `Record` that the config is from; None for one that is not from a log.
        prediction: the `Prediction` that the config is from; None for one that was not predicted.
    """

    def __init__(
        self,
        workload: Workload,
        schedule: library.Schedule,
        config: Config,
        device: Device,
        tir: IRModule,
        lowered: Lowered,
    ):
        self.workload = workload
        self.schedule = schedule
        self.config = config
        self.device = device
        self.tir = tir
        self.record: Any = None
        self.prediction: Prediction | None = None
        self.module = lowered

    def __repr__(self) -> str:
        return f"<Kernel {self.schedule.name} of {self.workload} for {self.device.text}>"

    @property
    def steps(self) -> tuple[LoweredStep, ...]:
        """The device functions in the order of their launches, with launch shape and shared memory of each."""
        return self.module.steps

    @property
    def timed_steps(self) -> tuple[LoweredStep, ...]:
        """The steps that are in a kernel's time: all but those that prepare a weight once for all its calls."""
        return self.steps[self.module.prepared :]

    @property
    def lowered(self) -> PrimFunc:
        """The first step's lowered device function, as TIR."""
        return self.steps[0].function

    @property
    def source(self) -> str:
        """The generated CUDA or OpenCL text of all steps, with all that it takes to compile it."""
        return self.module.source

    @property
    def launch(self) -> Launch:
        """The first step's grid and block."""
        return self.steps[0].launch

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Where each argument lies, by its name: in `global` memory, in `constant` memory, or behind a `texture`."""
        return self.module.spaces

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block, in bytes."""
        return max(step.shared_bytes for step in self.steps)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory of a block that a launch asks for, in bytes."""
        return max(step.dynamic_shared_bytes for step in self.steps)

    @property
    def program(self) -> Program:
        """What a device loads; raises `CompileError` when the text of a CUDA kernel does not compile."""
        return self.module.program

    @property
    def cubin(self) -> Cubin:
        """The CUDA binary, from NVRTC; needs no GPU. Raises `CompileError` for an OpenCL kernel."""
        self._arch("a cubin")
        return self.module.cubin

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared memory, as ptxas reports them; raises `CompileError` for an OpenCL kernel."""
        return self.cubin.resources

    @functools.cached_property
    def ptx(self) -> str:
        """The PTX text, from NVRTC; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import nvrtc

        return nvrtc.compile_ptx(self.source, self._arch("PTX"))

    @functools.cached_property
    def sass(self) -> str:
        """The disassembled binary; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import sass

        return sass.disassemble(self.cubin.image)

    @functools.cached_property
    def listings(self) -> dict[str, Listing]:
        """The instructions of each step, by its name, with their lines in `source`; raises as `sass`."""
        from tvmconv.compiler.listing import disassembly, parse

        arch = self._arch("machine code")
        return parse(disassembly(self.source, arch, self.module.compiled(lines=True)))

    def stage(self, name: str, *, full: bool = False) -> str:
        """One of `STAGES` as text.

        Args:
            name: which.
            full: of the source, also the definitions that TVM puts before the kernels.

        Raises:
            CompileError: the stage does not exist for this kernel's target.
            ValueError: `name` is not a stage.
        """
        match name:
            case "te":
                return self.workload.prim_func().script()
            case "tir":
                return self.tir["main"].script()
            case "lowered":
                return "\n\n".join(step.text for step in self.steps)
            case "source":
                return self.source if full else without_preamble(self.source)
            case "ptx" | "sass":
                return getattr(self, name)
            case "resources":
                return "\n".join(self._resources(step) for step in self.steps)
        raise ValueError(f"no stage {name!r}; there are {', '.join(STAGES)}")

    def titled(self, step: LoweredStep, text: str) -> str:
        """A step's text, under its name where there are several."""
        return f"{step.name}\n{text}" if len(self.steps) > 1 else text

    def _resources(self, step: LoweredStep) -> str:
        lines = [str(self.cubin.kernels[step.name]), f"launch: {step.launch}"]
        if step.dynamic_shared_bytes:
            lines.append(f"dynamic shared memory: {step.dynamic_shared_bytes} bytes a block")
        return self.titled(step, "\n".join(lines))

    def _arch(self, wanted: str) -> str:
        if self.device.arch is None:
            raise CompileError(
                f"{wanted} exists for CUDA only, not for {self.device.text}: build with arch='sm_90', say"
            )
        return self.device.arch

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The kernel on its device."""
        return self.device.load(self.program)

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel.

        Args:
            inputs: NumPy arrays of the workload's input shapes, or nested lists of numbers, which are converted to its
                dtypes; or on CUDA tensors that speak DLPack (PyTorch, CuPy), which are used where they lie.

        Returns:
            The output: a NumPy array, or a tensor of the inputs' library.

        Raises:
            WorkloadError: an input is no array of numbers, or has another shape than the workload.
        """
        shapes = list(self.workload.argument_shapes[:-1])
        inputs = tuple(x if hasattr(x, "shape") else _as_array(x) for x in inputs)
        given = [tuple(x.shape) for x in inputs]
        if given != shapes:
            raise WorkloadError(f"{self.workload} takes inputs of shapes {shapes}, not {given}")
        if all(isinstance(x, np.ndarray) for x in inputs):
            types = self.module.arrays[:-1]
            return self.loaded.run([np.ascontiguousarray(x, a.dtype) for x, a in zip(inputs, types, strict=True)])
        return self.loaded.call_dlpack(inputs)

    def verify(self, problem: Problem | None = None, *, full: bool = False) -> Verification:
        """Run the kernel and compare its output with float64.

        Args:
            problem: the inputs, and what is compared; fresh random inputs by default.
            full: without a problem, compare every output, also above 20 GFLOP, where a random sample is compared
                otherwise. See `tvmconv.verify` for what a sample guarantees.

        Returns:
            The relative L2 error, and whether it and each output of the sample are within their tolerance.
        """
        problem = problem or Problem(self.workload, mode="full" if full else "auto")
        return problem.check(self(*problem.inputs))

    def time(self, problem: Problem | None = None, *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time the kernel on its device.

        Args:
            problem: inputs to run on; fresh random ones by default.
            cold: with inputs and outputs that are not in the L2 cache.
            seconds: about how long to measure.
        """
        problem = problem or Problem(self.workload)
        return self.loaded.time(problem.inputs, cold=cold, seconds=seconds)


def _as_array(values: object) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise WorkloadError(f"expected an array of numbers, or a tensor on the kernel's device, not {quote(values)}")
    return array


def check_memory(workload: Workload, device: Device) -> None:
    """Raise DeviceError if the arrays of a workload exceed a device's memory."""
    if device.memory_bytes is None:
        return
    arguments = zip(workload.argument_shapes, workload.argument_dtypes, strict=True)
    needed = sum(ArrayType(shape, dtype).nbytes for shape, dtype in arguments)
    if needed > device.memory_bytes:
        raise DeviceError(
            f"{workload} needs {needed / 1e9:.1f} GB; {device.text} has {device.memory_bytes / 1e9:.1f} GB of memory"
        )


def build_on(workload: Workload, chosen: library.Schedule, place: Device, config: Mapping[str, Value] | None) -> Kernel:
    """Build a schedule for a device that is there; see `build`."""
    chosen.check_runs_on(place.kind, place.arch, place.text)
    place.check_dtypes(workload.argument_dtypes)
    built = road.build(workload, chosen, config, place.target(), place.limits, place.text)
    return Kernel(workload, chosen, built.config, place, built.tir, built.lowered)
