"""Kernels: a schedule built for a workload and a device, which runs, verifies, times and disassembles."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from tvmconv import devices, registry
from tvmconv.compiler import lowering as lowering
from tvmconv.compiler.executable import ArrayType, Executable, LaunchConfig
from tvmconv.compiler.lowered_module import LoweredKernel, LoweredModule
from tvmconv.compiler.source import strip_preamble
from tvmconv.devices import sharing
from tvmconv.errors import CompileError, DeviceError, WorkloadError
from tvmconv.html import make_html_details, make_html_properties
from tvmconv.space import Config, Value, format_value
from tvmconv.verification import Problem, Verification
from tvmconv.workloads.epilogue import STATS
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
    from tvmconv.devices.device import LoadedKernel, TurnTimer
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
        workload: The workload or its text.
        schedule: The schedule, or its name. The default is the first schedule of `schedules_to_tune`, such as
            `depthwise` for depthwise convolutions, `direct` for other convolutions and `register` for filters.
        device: Device to run on, such as `cuda:0` or `opencl:0`; by default the best available one (`auto`).
        arch: CUDA architecture to compile for without a device, such as `sm_90`; excludes `device`.
        config: Values by knob name; missing knobs take their defaults.

    Returns:
        The kernel, lowered to source code; it is compiled and loaded on first use.

    Raises:
        WorkloadError: The text of the workload is malformed.
        ScheduleError: The schedule does not exist for this workload or does not support this kind of device.
        KnobError: A knob does not exist or does not accept its value.
        DeviceError: The device does not exist, its memory is too small, or the kernel exceeds its limits.
        CompileError: The schedule cannot be lowered.

    Examples:
        >>> build("conv2d:1x16x8x8,16x16x3x3,s1,p1", "tiling", arch="sm_90").kernels[0].name
        'main_kernel'
    """
    workload, resolved_device = as_workload(workload), resolve_device(device, arch)
    selected_schedule = None if schedule is None else registry.as_schedule(workload, schedule)
    check_device_memory(workload, resolved_device)
    if selected_schedule is None:
        selected_schedule = registry.schedules_to_tune(workload, resolved_device.kind, resolved_device.arch)[0]
    return build_for_device(workload, selected_schedule, resolved_device, config)


def resolve_device(device: str | Device | None, arch: str | None) -> Device:
    """Return the device that the arguments `device` and `arch` of `build` name; `arch` needs no GPU."""
    if device is not None and arch is not None:
        raise DeviceError(f"expected a device or an architecture, not both: device={device}, arch={arch}")
    if isinstance(device, devices.Device):
        return device
    device_name = arch or device or "auto"
    if not isinstance(device_name, str):
        raise DeviceError(
            f"expected a device such as 'cuda:0' or 'opencl:0', or an architecture, not {quote(device_name)}"
        )
    return devices.find_device(device_name)


class Kernel:
    """A schedule built for a workload and a device; `build` creates it.

    It consists of one or several device functions, which are launched one after another. `source`, `cubin`, `sass` and
    `ptx` cover all of them. `lowered` and `launch` describe the first one; `shared_bytes` and `dynamic_shared_bytes`
    are the maximum over all; `kernels` lists each.

    Attributes:
        workload: The workload that it computes.
        schedule: The schedule that it was built from.
        config: The value of every knob.
        device: The device that it runs on, or the architecture that it was compiled for.
        tir: The scheduled TIR.
        lowered_module: The device functions, and the host code that launches them.
        record: The tuning `Record` that the config comes from; None if it does not come from a log.
        prediction: The `Prediction` that the config comes from; None if it was not predicted.

    Examples:
        >>> import tvmconv as tc
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> kernel = tc.build(w, "tiling", device="opencl:0")
        >>> kernel(*w.inputs(seed=0)).shape
        (1, 8, 8, 8)
        >>> kernel.verify().ok
        True
        >>> kernel.time(seconds=0.01).median > 0
        True
        >>> "__kernel void" in kernel.format_ir_level("source")
        True
        >>> kernel.add_kernel_title(kernel.kernels[0], "text")
        'text'
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

    def _repr_html_(self) -> str:
        values = {
            "schedule": f"{self.schedule.name}: {self.schedule.summary}",
            "device": f"{self.device.text}, {self.device.name}",
            "config": " ".join(f"{name}={format_value(value)}" for name, value in self.config.items()),
            **{f"launch of {kernel.name}": str(kernel.launch) for kernel in self.kernels},
            "shared memory": f"{self.shared_bytes + self.dynamic_shared_bytes:,} bytes per block",
        }
        source = make_html_details("Source", self.format_ir_level("source"))
        return make_html_properties(self.workload.text, values) + source

    @property
    def kernels(self) -> tuple[LoweredKernel, ...]:
        """Device functions in launch order, each with its launch configuration and shared memory."""
        return self.lowered_module.kernels

    @property
    def timed_kernels(self) -> tuple[LoweredKernel, ...]:
        """Device functions that `time` measures: all except those that prepack a weight once for all calls."""
        return self.kernels[self.lowered_module.num_prepack_kernels :]

    @property
    def lowered(self) -> PrimFunc:
        """Lowered TIR of the first device function."""
        return self.kernels[0].function

    @property
    def source(self) -> str:
        """Generated CUDA or OpenCL source of all device functions, complete enough to compile."""
        return self.lowered_module.source

    @property
    def launch(self) -> LaunchConfig:
        """Launch configuration of the first device function: grid and block."""
        return self.kernels[0].launch

    @property
    def memory_scopes(self) -> Mapping[str, MemoryScope]:
        """Memory scope of each argument by its name: `global`, `constant` or `texture`."""
        return self.lowered_module.memory_scopes

    @property
    def shared_bytes(self) -> int:
        """Static shared memory per block in bytes."""
        return max(kernel.shared_bytes for kernel in self.kernels)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Dynamic shared memory per block in bytes, which the launch requests."""
        return max(kernel.dynamic_shared_bytes for kernel in self.kernels)

    @property
    def executable(self) -> Executable:
        """Compiled code that a device loads; raises `CompileError` if CUDA source does not compile."""
        return self.lowered_module.executable

    @property
    def cubin(self) -> Cubin:
        """CUDA binary, compiled by NVRTC without a GPU; raises `CompileError` for an OpenCL kernel."""
        self._require_cuda_arch("a cubin")
        return self.lowered_module.cubin

    @property
    def resources(self) -> Resources:
        """Registers, spills and shared memory that ptxas reports; raises `CompileError` for an OpenCL kernel."""
        return self.cubin.resources

    @functools.cached_property
    def ptx(self) -> str:
        """PTX text, compiled by NVRTC; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import nvrtc

        return nvrtc.compile_ptx(self.source, self._require_cuda_arch("PTX"))

    @functools.cached_property
    def sass(self) -> str:
        """Disassembled CUDA binary; raises `CompileError` for an OpenCL kernel."""
        from tvmconv.compiler import sass

        return sass.disassemble(self.cubin.image)

    @functools.cached_property
    def instructions(self) -> dict[str, Listing]:
        """SASS instructions of each device function by its name; raises as `sass`.

        They have no source lines unless `listings` was read before, because lines take another compilation.
        """
        from tvmconv.compiler import sass
        from tvmconv.compiler.sass_listing import parse_disassembly

        if known_listings := self.__dict__.get("listings"):
            return known_listings
        return parse_disassembly(sass.disassemble(self.cubin.image, with_lines=True))  # nvdisasm, not cuobjdump

    @functools.cached_property
    def listings(self) -> dict[str, Listing]:
        """SASS instructions of each device function by its name, with their lines in `source`; raises as `sass`."""
        from tvmconv.compiler.sass_listing import disassemble_with_lines, parse_disassembly

        arch = self._require_cuda_arch("machine code")
        return parse_disassembly(
            disassemble_with_lines(self.source, arch, self.lowered_module.compile_cubin(with_lines=True))
        )

    def format_ir_level(self, name: str, *, full: bool = False) -> str:
        """Return the kernel's text at one of `IR_LEVELS`.

        Args:
            name: Name of the level: "te", "tir", "lowered", "source", "ptx", "sass" or "resources".
            full: Whether `source` includes the definitions that TVM puts before the kernels.

        Returns:
            The text of the level: TVMScript, CUDA or OpenCL source, PTX, SASS, or a line of resources per kernel.

        Raises:
            CompileError: The level does not exist for this kernel's target.
            ValueError: `name` is not one of `IR_LEVELS`.
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
        raise ValueError(f"expected an IR level among {', '.join(IR_LEVELS)}, not {name!r}")

    def add_kernel_title(self, kernel: LoweredKernel, text: str) -> str:
        """Return a device function's text, with the function's name as title if the kernel has several functions.

        Args:
            kernel: One of `kernels`.
            text: Text about that function, of one or several lines.
        """
        return f"{kernel.name}\n{text}" if len(self.kernels) > 1 else text

    def _format_resources(self, kernel: LoweredKernel) -> str:
        lines = [str(self.cubin.kernels[kernel.name]), f"launch: {kernel.launch}"]
        if kernel.dynamic_shared_bytes:
            lines.append(f"dynamic shared memory: {kernel.dynamic_shared_bytes} bytes per block")
        return self.add_kernel_title(kernel, "\n".join(lines))

    def _require_cuda_arch(self, artifact: str) -> str:
        if self.device.arch is None:
            raise CompileError(
                f"{artifact} exists for CUDA only, not for {self.device.text}: build with arch='sm_90', say"
            )
        return self.device.arch

    @functools.cached_property
    def loaded_kernel(self) -> LoadedKernel:
        """The kernel, loaded on its device."""
        return self.device.load(self.executable)

    def __call__(self, *inputs: Any) -> Any:
        """Run the kernel.

        Args:
            inputs: NumPy arrays or nested lists of numbers with the workload's input shapes, converted to its dtypes;
                or, on CUDA, tensors that support DLPack (PyTorch, CuPy), which are used without a copy.

        Returns:
            The output: a NumPy array, or a tensor of the library that the inputs come from. A kernel whose epilogue has
            `stats` writes them to its last argument.

        Raises:
            WorkloadError: An input is not an array of numbers, or its shape differs from the workload's.
        """
        expected_shapes = list(self.workload.argument_shapes[:-1])
        inputs = tuple(x if hasattr(x, "shape") else _to_array(x) for x in inputs)
        input_shapes = [tuple(x.shape) for x in inputs]
        if input_shapes != expected_shapes:
            raise WorkloadError(f"{self.workload} takes inputs of shapes {expected_shapes}, not {input_shapes}")
        if all(isinstance(x, np.ndarray) for x in inputs):
            array_types = self.lowered_module.arrays[:-1]
            arrays = [np.ascontiguousarray(x, a.dtype) for x, a in zip(inputs, array_types, strict=True)]
            written = inputs[-1:] if STATS in self.workload.epilogue else ()
            with sharing.hold_gpu():
                return self.loaded_kernel.run(arrays, *written)
        return self.loaded_kernel.call_dlpack(inputs)

    def verify(self, problem: Problem | None = None, *, full: bool = False) -> Verification:
        """Run the kernel and compare its output with a float64 reference.

        Args:
            problem: Inputs and reference; by default fresh random inputs.
            full: Whether to compare every output if no problem is given. By default, workloads above 20 GFLOP compare a
                random sample; `tvmconv.verification` states what a sample guarantees.

        Returns:
            The relative L2 error, and whether it and each compared output are within the tolerance.
        """
        problem = problem or Problem(self.workload, mode="full" if full else "auto")
        if STATS not in self.workload.epilogue:
            return problem.check(self(*problem.inputs))
        *inputs, unwritten_stats = problem.inputs
        stats = unwritten_stats.copy()
        return problem.check(self(*inputs, stats), stats)

    def time(self, problem: Problem | None = None, *, cold: bool = False, seconds: float = 0.5) -> Timing:
        """Time the kernel on its device.

        Args:
            problem: Inputs to run on; by default fresh random inputs.
            cold: Whether inputs and outputs start outside the L2 cache.
            seconds: Approximate duration of the measurement in seconds.

        Returns:
            The timing, in seconds per launch.
        """
        problem = problem or Problem(self.workload)
        return self.loaded_kernel.time(problem.inputs, cold=cold, seconds=seconds)

    def open_timer(self, problem: Problem, *, cold: bool = False) -> AbstractContextManager[TurnTimer] | None:
        """Return a block with a timer of turns, between which other kernels run; None if the device has none.

        Args:
            problem: Inputs to run on.
            cold: Whether inputs and outputs start outside the L2 cache.

        Returns:
            A context manager, whose timer takes turns of some milliseconds.

        Examples:
            >>> import tvmconv as tc
            >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
            >>> kernel = tc.build(w, "tiling", device="opencl:0")
            >>> kernel.open_timer(tc.verification.Problem(w)) is None  # NVIDIA GPUs alone have such timers
            True
        """
        return self.loaded_kernel.open_timer(problem.inputs, cold=cold)


def _to_array(values: object) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise WorkloadError(f"expected an array of numbers, or a tensor on the kernel's device, not {quote(values)}")
    return array


def check_device_memory(workload: Workload, device: Device) -> None:
    """Raise DeviceError if the workload's arrays exceed the device's memory."""
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
    """Build a schedule for a resolved device; see `build` for the arguments and errors."""
    schedule.check_runs_on(device.kind, device.arch, device.text)
    device.check_dtypes(workload.argument_dtypes)
    lowering_result = lowering.lower_schedule(
        workload, schedule, config, device.make_target(), device.limits, device.text
    )
    return Kernel(workload, schedule, lowering_result.config, device, lowering_result.tir, lowering_result.lowered)
