"""Building: a workload and a schedule become a kernel, to be run, verified, timed and looked at."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices, registry
from tvmconv.compiler import lowering as lowering
from tvmconv.compiler.executable import ArrayType, Executable, LaunchConfig
from tvmconv.compiler.lowered_module import LoweredKernel, LoweredModule
from tvmconv.compiler.source import strip_preamble
from tvmconv.errors import CompileError, DeviceError, WorkloadError
from tvmconv.space import Config, Value
from tvmconv.verification import Problem, Verification
from tvmconv.workloads.registry import as_workload
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvmconv.annotations import MemoryScope
    from tvmconv.compiler.nvrtc import Cubin, Resources
    from tvmconv.compiler.sass_listing import Listing
    from tvmconv.cost_model.predict import Prediction
    from tvmconv.devices import Device, Timing
    from tvmconv.devices.device import LoadedKernel
    from tvmconv.workloads import Workload

IR_LEVELS = ("te", "tir", "lowered", "source", "ptx", "sass", "resources")


def build(
    workload: Workload | str,
    schedule: str | registry.Schedule | None = None,
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
    workload, resolved_device = as_workload(workload), resolve_device(device, arch)
    selected_schedule = None if schedule is None else registry.as_schedule(workload, schedule)
    check_device_memory(workload, resolved_device)
    selected_schedule = (
        selected_schedule or registry.schedules_to_tune(workload, resolved_device.kind, resolved_device.arch)[0]
    )
    return build_for_device(workload, selected_schedule, resolved_device, config)


def resolve_device(device: str | Device | None, arch: str | None) -> Device:
    """The device, or the architecture to compile for, that `build` was given."""
    if device is not None and arch is not None:
        raise DeviceError(f"give a device or an architecture, not both ({device} and {arch})")
    if isinstance(device, devices.Device):
        return device
    device_name = arch or device or "auto"
    if not isinstance(device_name, str):
        raise DeviceError(
            f"expected a device such as 'cuda:0' or 'opencl:0', or an architecture, not {quote(device_name)}"
        )
    return devices.find_device(device_name)


class Kernel:
    """A built schedule; made by `build`.

    It has one step, or several device functions that are launched one after another. What is asked of the kernel as a
    whole is then of all steps (`source`, `cubin`, `sass`), of the first (`lowered`, `launch`), or the most that one of
    them takes (`shared_bytes`, `dynamic_shared_bytes`, `resources`); `kernels` has each.

    Attributes:
        workload: what it computes.
        schedule: how.
        config: the value of every knob.
        device: where it runs, or the architecture it was compiled for.
        tir: the scheduled TIR.
        lowered_module: what it lowers to: the device functions, and the host side that launches them.
        record: the `Record` that the config is from; None for one that is not from a log.
        prediction: the `Prediction` that the config is from; None for one that was not predicted.
    """

    def __init__(
        self,
        workload: Workload,
        schedule: registry.Schedule,
        config: Config,
        device: Device,
        tir: IRModule,
        lowered_module: LoweredModule,
    ):
        self.workload = workload
        self.schedule = schedule
        self.config = config
        self.device = device
        self.tir = tir
        self.record: Any = None
        self.prediction: Prediction | None = None
        self.lowered_module = lowered_module

    def __repr__(self) -> str:
        return f"<Kernel {self.schedule.name} of {self.workload} for {self.device.text}>"

    @property
    def kernels(self) -> tuple[LoweredKernel, ...]:
        """The device functions in the order of their launches, with launch shape and shared memory of each."""
        return self.lowered_module.kernels

    @property
    def timed_kernels(self) -> tuple[LoweredKernel, ...]:
        """The steps that are in a kernel's time: all but those that prepare a weight once for all its calls."""
        return self.kernels[self.lowered_module.num_prepack_kernels :]

    @property
    def lowered(self) -> PrimFunc:
        """The first step's lowered device function, as TIR."""
        return self.kernels[0].function

    @property
    def source(self) -> str:
        """The generated CUDA or OpenCL text of all steps, with all that it takes to compile it."""
        return self.lowered_module.source

    @property
    def launch(self) -> LaunchConfig:
        """The first step's grid and block."""
        return self.kernels[0].launch

    @property
    def memory_scopes(self) -> Mapping[str, MemoryScope]:
        """Where each argument lies, by its name: in `global` memory, in `constant` memory, or behind a `texture`."""
        return self.lowered_module.memory_scopes

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block, in bytes."""
        return max(kernel.shared_bytes for kernel in self.kernels)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory of a block that a launch asks for, in bytes."""
        return max(kernel.dynamic_shared_bytes for kernel in self.kernels)

    @property
    def executable(self) -> Executable:
        """What a device loads; raises `CompileError` when the text of a CUDA kernel does not compile."""
        return self.lowered_module.executable

    @property
    def cubin(self) -> Cubin:
        """The CUDA binary, from NVRTC; needs no GPU. Raises `CompileError` for an OpenCL kernel."""
        self._require_cuda_arch("a cubin")
        return self.lowered_module.cubin

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared memory, as ptxas reports them; raises `CompileError` for an OpenCL kernel."""
        return self.cubin.resources

    @functools.cached_property
    def ptx(self) -> str:
        """The PTX text, from NVRTC; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import nvrtc

        return nvrtc.compile_ptx(self.source, self._require_cuda_arch("PTX"))

    @functools.cached_property
    def sass(self) -> str:
        """The disassembled binary; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import sass

        return sass.disassemble(self.cubin.image)

    @functools.cached_property
    def listings(self) -> dict[str, Listing]:
        """The instructions of each step, by its name, with their lines in `source`; raises as `sass`."""
        from tvmconv.compiler.sass_listing import disassemble_with_lines, parse_disassembly

        arch = self._require_cuda_arch("machine code")
        return parse_disassembly(
            disassemble_with_lines(self.source, arch, self.lowered_module.compile_cubin(with_lines=True))
        )

    def format_ir_level(self, name: str, *, full: bool = False) -> str:
        """One of `IR_LEVELS` as text.

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
                return "\n\n".join(kernel.text for kernel in self.kernels)
            case "source":
                return self.source if full else strip_preamble(self.source)
            case "ptx" | "sass":
                return getattr(self, name)
            case "resources":
                return "\n".join(self._format_resources(kernel) for kernel in self.kernels)
        raise ValueError(f"no stage {name!r}; there are {', '.join(IR_LEVELS)}")

    def add_kernel_title(self, kernel: LoweredKernel, text: str) -> str:
        """A step's text, under its name where there are several."""
        return f"{kernel.name}\n{text}" if len(self.kernels) > 1 else text

    def _format_resources(self, kernel: LoweredKernel) -> str:
        lines = [str(self.cubin.kernels[kernel.name]), f"launch: {kernel.launch}"]
        if kernel.dynamic_shared_bytes:
            lines.append(f"dynamic shared memory: {kernel.dynamic_shared_bytes} bytes a block")
        return self.add_kernel_title(kernel, "\n".join(lines))

    def _require_cuda_arch(self, artifact: str) -> str:
        if self.device.arch is None:
            raise CompileError(
                f"{artifact} exists for CUDA only, not for {self.device.text}: build with arch='sm_90', say"
            )
        return self.device.arch

    @functools.cached_property
    def loaded_kernel(self) -> LoadedKernel:
        """The kernel on its device."""
        return self.device.load(self.executable)

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
        expected_shapes = list(self.workload.argument_shapes[:-1])
        inputs = tuple(x if hasattr(x, "shape") else _to_array(x) for x in inputs)
        input_shapes = [tuple(x.shape) for x in inputs]
        if input_shapes != expected_shapes:
            raise WorkloadError(f"{self.workload} takes inputs of shapes {expected_shapes}, not {input_shapes}")
        if all(isinstance(x, np.ndarray) for x in inputs):
            array_types = self.lowered_module.arrays[:-1]
            return self.loaded_kernel.run(
                [np.ascontiguousarray(x, a.dtype) for x, a in zip(inputs, array_types, strict=True)]
            )
        return self.loaded_kernel.call_dlpack(inputs)

    def verify(self, problem: Problem | None = None, *, full: bool = False) -> Verification:
        """Run the kernel and compare its output with float64.

        Args:
            problem: the inputs, and what is compared; fresh random inputs by default.
            full: without a problem, compare every output, also above 20 GFLOP, where a random sample is compared
                otherwise. See `tvmconv.verification` for what a sample guarantees.

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
        return self.loaded_kernel.time(problem.inputs, cold=cold, seconds=seconds)


def _to_array(values: object) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise WorkloadError(f"expected an array of numbers, or a tensor on the kernel's device, not {quote(values)}")
    return array


def check_device_memory(workload: Workload, device: Device) -> None:
    """Raise DeviceError if the arrays of a workload exceed a device's memory."""
    if device.memory_bytes is None:
        return
    arguments = zip(workload.argument_shapes, workload.argument_dtypes, strict=True)
    required_bytes = sum(ArrayType(shape, dtype).nbytes for shape, dtype in arguments)
    if required_bytes > device.memory_bytes:
        raise DeviceError(
            f"{workload} needs {required_bytes / 1e9:.1f} GB; {device.text} has "
            f"{device.memory_bytes / 1e9:.1f} GB of memory"
        )


def build_for_device(
    workload: Workload, schedule: registry.Schedule, device: Device, config: Mapping[str, Value] | None
) -> Kernel:
    """Build a schedule for a device that is there; see `build`."""
    schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    lowering_result = lowering.lower_schedule(
        workload, schedule, config, device.make_target(), device.limits, device.text
    )
    return Kernel(workload, schedule, lowering_result.config, device, lowering_result.tir, lowering_result.lowered)
