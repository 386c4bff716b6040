"""Building: a workload and a schedule become a kernel, to be run, verified, timed and looked at."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices, library
from tvmconv.compiler.lower import Launch, Lowered, lower
from tvmconv.errors import CompileError, DeviceError, WorkloadError
from tvmconv.knobs import Config, Value
from tvmconv.verify import Problem, Verification

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.nvrtc import Cubin, Resources
    from tvmconv.devices import Device, Timing
    from tvmconv.devices.base import Loaded
    from tvmconv.marks import Space
    from tvmconv.workloads import Workload

STAGES = ("te", "tir", "lowered", "source", "ptx", "sass", "resources")


def build(
    workload: Workload,
    schedule: str | library.Schedule | None = None,
    *,
    device: str | Device | None = None,
    arch: str | None = None,
    config: Mapping[str, Value] | None = None,
) -> Kernel:
    """Build the kernel of a schedule for a workload.

    Args:
        workload: what to compute.
        schedule: how, by name or as found by `schedules`; by default the first that is made to be tuned: `depthwise`
            for what is depthwise, `direct` for other convolutions and `register` for filters.
        device: where to run it, such as `cuda:0` or `opencl:0`; by default the best there is (`auto`).
        arch: instead of a device, a CUDA architecture to compile for only, such as `sm_90`.
        config: values by knob name; the other knobs take their defaults.

    Raises:
        ScheduleError: no such schedule for this workload, or not for devices of this kind.
        KnobError: no such knob, or not a value that it takes.
        DeviceError: no such device, the workload does not fit in its memory, or the kernel exceeds its limits.
        CompileError: the schedule does not lower.
    """
    place = find_place(device, arch)
    chosen = library.find(workload, schedule) if isinstance(schedule, str) else schedule
    check_memory(workload, place)
    return build_on(workload, chosen or library.to_tune(workload, place.kind)[0], place, config)


def find_place(device: str | Device | None, arch: str | None) -> Device:
    """The device, or the architecture to compile for, that `build` was given."""
    if device is not None and arch is not None:
        raise DeviceError(f"give a device or an architecture, not both ({device} and {arch})")
    return device if isinstance(device, devices.Device) else devices.find(arch or device or "auto")


class Kernel:
    """A built schedule; made by `build`.

    Attributes:
        workload: what it computes.
        schedule: how.
        config: the value of every knob.
        device: where it runs, or the architecture it was compiled for.
        tir: the scheduled TIR.
        record: the `Record` that the config is from; None for one that is not from a log.
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
        self._lowered = lowered

    def __repr__(self) -> str:
        return f"<Kernel {self.schedule.name} of {self.workload} for {self.device.text}>"

    @property
    def lowered(self) -> PrimFunc:
        """The lowered device function, as TIR."""
        return self._lowered.function

    @property
    def source(self) -> str:
        """The generated CUDA or OpenCL text."""
        return self._lowered.source

    @property
    def launch(self) -> Launch:
        """Grid and block."""
        return self._lowered.launch

    @property
    def spaces(self) -> Mapping[str, Space]:
        """Where each argument lies, by its name: in `global` memory, in `constant` memory, or behind a `texture`."""
        return self._lowered.spaces

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block, in bytes."""
        return self._lowered.shared_bytes

    @property
    def cubin(self) -> Cubin:
        """The CUDA binary, from NVRTC; needs no GPU. Raises `CompileError` for an OpenCL kernel."""
        self._arch("a cubin")
        return self._lowered.cubin

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

    def stage(self, name: str) -> str:
        """One of `STAGES` as text.

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
                return self.lowered.script()
            case "source" | "ptx" | "sass":
                return getattr(self, name)
            case "resources":
                return f"{self.resources}\nlaunch: {self.launch}"
        raise ValueError(f"no stage {name!r}; there are {', '.join(STAGES)}")

    def _arch(self, wanted: str) -> str:
        if self.device.arch is None:
            raise CompileError(
                f"{wanted} exists for CUDA only, not for {self.device.text}: build with arch='sm_90', say"
            )
        return self.device.arch

    @functools.cached_property
    def loaded(self) -> Loaded:
        """The kernel on its device."""
        return self.device.load(self._lowered.program)

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel.

        Args:
            inputs: NumPy arrays of the workload's input shapes and dtype, or on CUDA tensors that speak DLPack
                (PyTorch, CuPy), which are used where they lie.

        Returns:
            The output: a NumPy array, or a tensor of the inputs' library.

        Raises:
            WorkloadError: an input has another shape than the workload.
        """
        shapes = list(self.workload.argument_shapes[:-1])
        given = [tuple(x.shape) for x in inputs]
        if given != shapes:
            raise WorkloadError(f"{self.workload} takes inputs of shapes {shapes}, not {given}")
        if all(isinstance(x, np.ndarray) for x in inputs):
            arrays = [np.ascontiguousarray(x, self.workload.dtype) for x in inputs]
            return self.loaded.run(arrays)
        return self.loaded.call_dlpack(inputs)

    def verify(self, problem: Problem | None = None) -> Verification:
        """Compare the kernel with the float64 reference, on fresh random inputs unless a problem is given."""
        problem = problem or Problem(self.workload)
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


def check_memory(workload: Workload, device: Device) -> None:
    """Raise DeviceError if the arrays of a workload exceed a device's memory."""
    if device.memory_bytes is None:
        return
    itemsize = np.dtype(workload.dtype).itemsize
    needed = sum(itemsize * int(np.prod(shape, dtype=np.int64)) for shape in workload.argument_shapes)
    if needed > device.memory_bytes:
        raise DeviceError(
            f"{workload} needs {needed / 1e9:.1f} GB; {device.text} has {device.memory_bytes / 1e9:.1f} GB of memory"
        )


def build_on(workload: Workload, chosen: library.Schedule, place: Device, config: Mapping[str, Value] | None) -> Kernel:
    """Build a schedule for a device that is there; see `build`."""
    chosen.check_kind(place.kind, place.text)
    scheduled, knobs = chosen.apply(workload, config)
    lowered = lower(scheduled.mod, place.target())
    place.check_fits(lowered)
    return Kernel(workload, chosen, knobs.config, place, scheduled.mod, lowered)
