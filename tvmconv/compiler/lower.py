"""From scheduled TIR to device code: TVM's own pipeline, stopped where there is something to look at."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from tvmconv import gpu
from tvmconv.compiler import host as host_side
from tvmconv.compiler import nvrtc, spaces
from tvmconv.compiler.hook import compile_with
from tvmconv.compiler.program import ArrayType, Launch, Program, Step
from tvmconv.compiler.source import (
    Parameter,
    copy_fours_whole,
    declare_cluster,
    declare_tensor_maps,
    fill_alignment,
    waits_for_the_grid_before,
)
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.marks import AS_ALLOCATED, HOIST_GUARDS, KEPT, OWN_PLACES, Space
from tvmconv.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tvm.ir import IRModule
    from tvm.ir.transform import PassContext
    from tvm.target import Target
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.nvrtc import Cubin


@dataclass(frozen=True)
class LoweredStep:
    """One device function, and what it takes to launch it.

    Attributes:
        function: the device function (TIR).
        launch: grid and block, read off the function.
        parameters: the pointers and tensor maps that it takes, in its order.
        shared_bytes: static shared memory of a block.
        dynamic_shared_bytes: shared memory of a block that the launch asks for.
    """

    function: PrimFunc
    launch: Launch
    parameters: tuple[Parameter, ...]
    shared_bytes: int
    dynamic_shared_bytes: int

    @property
    def name(self) -> str:
        """The kernel's symbol in the source."""
        return str(self.function.attrs["global_symbol"])

    @functools.cached_property
    def text(self) -> str:
        """The function as TVM prints it, which takes a tenth of a second where it is long."""
        return str(self.function.script())

    @property
    def arguments(self) -> tuple[int, ...]:
        """For each parameter the index of the array that goes there, or behind the arrays of the scratch memory."""
        return tuple(parameter.index for parameter in self.parameters)

    @property
    def tensor_maps(self) -> tuple[tuple[int, TensorMap], ...]:
        """The parameters that are tensor maps over these: the position and the map of each."""
        return _tensor_maps(self.parameters)


@dataclass(frozen=True)
class Lowered:
    """The device functions of a schedule, and what is needed to run them.

    Attributes:
        target: the TVM target.
        steps: in the order in which they are launched, at least one.
        arrays: the PrimFunc's arguments, inputs first and the output last.
        scratch: memory that steps leave for later ones.
        spaces: where each of the arrays lies, by its name.
        prepared: how many steps, at the beginning, read nothing but arguments that stay as they are.
        host: the host side, which checks arguments, allocates scratch memory and launches.
        device: the module of the device functions alone.
    """

    target: Target
    steps: tuple[LoweredStep, ...]
    arrays: tuple[ArrayType, ...]
    scratch: tuple[ArrayType, ...]
    spaces: Mapping[str, Space]
    prepared: int
    host: IRModule
    device: IRModule
    _making: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)
    _made: list[Cubin] = field(default_factory=list, init=False, repr=False, compare=False)

    @functools.cached_property
    def source(self) -> str:
        """The generated CUDA or OpenCL text, of all steps; raises `CompileError` when TVM cannot write it."""
        kind = self.target.kind.name
        try:
            with compile_with(lambda text: b""):  # only the text is wanted
                text = str(self._codegen(self.device, self.target).inspect_source())
        except (ValueError, RuntimeError) as error:
            raise CompileError(f"TVM cannot write the kernel: {str(error).strip().splitlines()[-1]}") from error
        for step in self.steps:
            text = declare_cluster(text, step.name, step.launch.cluster)
        kernels = {step.name: step.parameters for step in self.steps}
        text = declare_tensor_maps(copy_fours_whole(fill_alignment(text)))
        return spaces.apply(text, kind, self.spaces, self.arrays, kernels)

    @property
    def cubin(self) -> Cubin:
        """The binary of a CUDA kernel, from NVRTC; raises `CompileError` when it does not compile."""
        return self.compiled()

    def compiled(self, *, lines: bool = False) -> Cubin:
        """The binary of a CUDA kernel, which is made once, whoever asks; raises as `cubin`.

        Args:
            lines: it is to tell of each instruction which line of the text it is of, if it has yet to be made.
        """
        with self._making:
            if not self._made:
                self._made.append(nvrtc.compile_cubin(self.source, str(self.target.attrs["arch"]), lines=lines))
        return self._made[0]

    @functools.cached_property
    def program(self) -> Program:
        """What a device loads; raises `CompileError` when the text of a CUDA kernel does not compile."""
        cubin = self.cubin if self.target.kind.name == "cuda" else None
        code = cubin.image if cubin else self.source.encode()
        steps = tuple(self._compiled(step, code, cubin) for step in self.steps)
        return Program(steps, self.arrays, self.scratch, self.prepared)

    def _compiled(self, step: LoweredStep, code: bytes, cubin: Cubin | None) -> Step:
        placed = dict(enumerate(self.spaces.values()))
        constants = {p.index: p.name for p in step.parameters if cubin and placed.get(p.index) == "constant"}
        parameters = [p for p in step.parameters if p.index not in constants]
        return Step(
            code=code,
            name=step.name,
            launch=step.launch,
            arguments=tuple(p.index for p in parameters),
            shared_bytes=step.shared_bytes,
            dynamic_shared_bytes=step.dynamic_shared_bytes,
            constants=tuple(constants.items()),
            textures=tuple(i for i in sorted(step.arguments) if placed.get(i) == "texture"),
            tensor_maps=_tensor_maps(parameters),
            overlaps=cubin is not None and waits_for_the_grid_before(self.source, step.name),
            resources=cubin.kernels[step.name] if cubin else None,
        )

    def executable(self) -> Any:
        """A CUDA kernel as a runtime module of TVM, callable on DLPack tensors through its `main`.

        Raises:
            CompileError: NVRTC rejects the kernel, an argument does not lie in global memory, or the kernel takes
                tensor maps.
        """
        for step in self.steps:
            if step.tensor_maps:
                raise CompileError(f"{step.name} takes tensor maps, which TVM's runtime does not encode")
        for name, space in self.spaces.items():
            if space != "global":
                raise CompileError(f"{name} is placed in {_PLACES[space]}, which TVM's runtime cannot do")
        host = self._codegen(self.host, self.target.host)
        with compile_with(lambda text: self.cubin.image):
            host.import_module(self._codegen(self.device, self.target))
        return host

    @staticmethod
    def _codegen(mod: IRModule, target: Target) -> Any:
        import tvm

        with target:  # TVM asks a GPU for its architecture otherwise, which takes far longer than generating the text
            return tvm.get_global_func(f"target.build.{target.kind.name}")(mod, target)


def _tensor_maps(parameters: Sequence[Parameter]) -> tuple[tuple[int, TensorMap], ...]:
    return tuple((at, each.tensor_map) for at, each in enumerate(parameters) if each.tensor_map)


_PLACES = {"constant": "constant memory", "texture": "a texture"}

_ASYNC_STAGES = "software_pipeline_async_stages"
WARP = "warp"  # the scope of what the lanes of a warp hold together


def _copies_asynchronously(target: Target) -> bool:
    return gpu.number(str(target.attrs.get("arch", ""))) >= gpu.ASYNC_COPY_SINCE


def _without_async_stages(mod: IRModule) -> IRModule:
    """The module with its pipelines' asynchronous copies made synchronous."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    def synchronous(loop: Any) -> Any:
        if _ASYNC_STAGES not in loop.annotations:
            return loop
        left = {key: value for key, value in loop.annotations.items() if key != _ASYNC_STAGES}
        kept = (loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding)
        return tirx.For(*kept, left, loop.step, loop.span)

    body = tvm_ffi.structural_map(mod["main"].body, (tirx.For, synchronous), order="post")
    return tvm.IRModule({"main": mod["main"].with_body(body)}, attrs=mod.attrs)


def _spreads_over_lanes(mod: IRModule) -> bool:
    """Whether a schedule has buffers that the lanes of a warp hold together."""
    import tvm_ffi
    from tvm import s_tir

    scopes: set[str] = set()
    tvm_ffi.structural_walk(
        mod["main"].body,
        (s_tir.SBlock, lambda block: scopes.update(buffer.scope() for buffer in block.alloc_buffers)),
        order="post",
    )
    return WARP in scopes


def _warp_buffers(function: PrimFunc) -> list[str]:
    """The buffers of a device function that are not yet spread over the lanes of a warp."""
    import tvm_ffi
    from tvm import tirx

    names: list[str] = []

    def visit(node: Any) -> None:
        if node.buffer.scope() == WARP:
            names.append(str(node.buffer.name))

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, visit), order="post")
    return names


def _spread_over_lanes(device: IRModule) -> IRModule:
    """A device module with its warp buffers made each lane's own, as many as TVM can: it takes one in a pass."""
    from tvm import tirx

    def left() -> int:
        return sum(len(_warp_buffers(function)) for function in device.functions.values())

    for _ in range(left()):
        device = tirx.transform.LowerWarpMemory()(device)
    return device


def _pass_context(mod: IRModule, *, asynchronous: bool) -> PassContext:
    """TVM's current pass context with the options that a schedule needs.

    Args:
        mod: the scheduled module.
        asynchronous: whether what the schedule marks as asynchronous becomes cp.async. That option also brings in a
            pass for the DMA engines of other devices, which takes seconds to find nothing.
    """
    from tvm.ir.transform import PassContext

    current = PassContext.current()
    config, disabled = dict(current.config), list(current.disabled_pass)
    if asynchronous:
        config["tirx.use_async_copy"] = True
        disabled.append("s_tir.LowerAsyncDMA")
    if AS_ALLOCATED in spaces.root_annotations(mod):  # what each statement uses of an array takes long to find out
        disabled.append("s_tir.CompactBufferAllocation")
    if OWN_PLACES in spaces.root_annotations(mod):
        config["tirx.disable_storage_rewrite"] = True
    if HOIST_GUARDS in spaces.root_annotations(mod):
        config["s_tir.HoistIfThenElse"] = {"support_block_scope_hoisting": True}
    if _spreads_over_lanes(mod):  # a common subexpression hides the lane from LowerWarpMemory: silently wrong code
        config["tirx.disable_cse_tir"] = True
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=disabled,
        instruments=list(current.instruments or ()),
        config=config,
    )


def lower(mod: IRModule, target: Target) -> Lowered:
    """Lower a scheduled module of one PrimFunc: to a device function for each root loop nest, usually one.

    Args:
        mod: the scheduled module, its function named `main`.
        target: a TVM target with a host.

    Raises:
        CompileError: the module does not lower, the host is left with more than launches, TVM leaves out a barrier, a
            buffer of a warp is not spread over its lanes, or a tensor map is not for TMA or not for its array.
    """
    from tvm import tirx

    parameters = list(mod["main"].params)
    try:
        asynchronous = _copies_asynchronously(target)
        bound = tirx.transform.BindTarget(target)(mod if asynchronous else _without_async_stages(mod))
        pipeline, finalize_host, finalize_device = tirx.get_default_tir_pipeline(target)
        with _pass_context(mod, asynchronous=asynchronous):
            lowered = pipeline(bound)
        host, devices = importlib.import_module("tvm.tirx.build").split_host_device_mods(lowered)
        device_mods = [finalize_device()(_spread_over_lanes(device)) for device in devices.values()]
        finalized = finalize_host()(host)
    except (ValueError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        raise CompileError(f"TVM cannot lower the schedule: {str(error).strip().splitlines()[-1]}") from error
    (main,) = host.functions.values()
    runs = host_side.read(main, len(parameters))
    arrays = tuple(_array_type(p) for p in parameters)
    for call in runs.calls:
        _check_tensor_maps(call, (*arrays, *runs.scratch), target.kind.name)
    functions = {str(f.attrs["global_symbol"]): f for device in device_mods for f in device.functions.values()}
    return Lowered(
        target=target,
        steps=tuple(_step(functions[call.function], call, target.kind.name) for call in runs.calls),
        arrays=arrays,
        scratch=runs.scratch,
        spaces=spaces.read(mod),
        prepared=_prepared(mod, runs.calls),
        host=finalized,
        device=device_mods[0],
    )


def _prepared(mod: IRModule, calls: Sequence[host_side.Call]) -> int:
    """How many launches, at the beginning, take of the arguments only those that are marked as kept."""
    kept = set(map(str, spaces.root_annotations(mod).get(KEPT, ())))
    others = {i for i, parameter in enumerate(mod["main"].params) if str(parameter.name) not in kept}
    if not kept:
        return 0
    return next((i for i, call in enumerate(calls) if others & set(call.arguments)), len(calls) - 1)


def _step(function: PrimFunc, call: host_side.Call, kind: str) -> LoweredStep:
    _check_barriers(function)
    for buffer in _warp_buffers(function):
        raise CompileError(f"TVM does not spread {buffer}, of the scope warp, over the lanes of a warp")
    dynamic = _shared_bytes(function, "shared.dyn")
    if dynamic and kind != "cuda":
        raise CompileError("the schedule has dynamic shared memory (shared.dyn), which is for CUDA: use shared")
    if dynamic != call.dynamic_shared_bytes:
        raise CompileError(
            f"{call.function} has {dynamic} bytes of dynamic shared memory, and TVM launches it with "
            f"{call.dynamic_shared_bytes}"
        )
    return LoweredStep(
        function=function,
        launch=_launch(function),
        parameters=tuple(map(_parameter, function.params, call.arguments, call.tensor_maps)),
        shared_bytes=_shared_bytes(function, "shared"),
        dynamic_shared_bytes=dynamic,
    )


def _parameter(variable: Any, index: int, tensor_map: TensorMap | None) -> Parameter:
    dtype = tensor_map.dtype if tensor_map else str(variable.ty.element_type.dtype)
    return Parameter(str(variable.name), dtype, index, tensor_map)


def _check_tensor_maps(call: host_side.Call, arrays: Sequence[ArrayType], kind: str) -> None:
    """Raise CompileError for tensor maps on a device without any, and for one of more than its array."""
    for index, tensor_map in zip(call.arguments, call.tensor_maps, strict=True):
        if tensor_map and kind != "cuda":
            raise CompileError(f"the schedule has tensor maps, which are for CUDA, not for {kind}")
        if tensor_map and tensor_map.nbytes > arrays[index].nbytes:
            raise CompileError(f"{tensor_map}, goes beyond its array of {arrays[index].nbytes} bytes")


def _array_type(parameter: Any) -> ArrayType:
    return ArrayType(tuple(int(extent) for extent in parameter.shape), str(parameter.dtype))


def _check_barriers(function: PrimFunc) -> None:
    """Raise CompileError for a kernel whose threads would race for shared memory, or of which that cannot be told.

    A kernel with a race may even be right at times.
    """
    from tvmconv.compiler.barriers import unsynchronised

    try:
        races = unsynchronised(function)
    except AnalysisError as error:
        raise CompileError(f"it cannot be told whether the kernel lacks a barrier: {error}") from error
    for race in races:
        raise CompileError(
            f"TVM leaves out a barrier: threads along {' and '.join(race.axes)} share {race.buffer}[{race.index}]; "
            "nest the loop of these threads inside the others"
        )


_LAUNCH_AXES = ("blockIdx", "threadIdx", "clusterCtaIdx")


def _launch(function: PrimFunc) -> Launch:
    import tvm_ffi
    from tvm import tirx

    extents: dict[str, int] = {}

    def visit(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, visit), order="post")
    x, y, z = (tuple(extents.get(f"{kind}.{axis}", 1) for kind in _LAUNCH_AXES) for axis in "xyz")
    return Launch(grid=(x[0], y[0], z[0]), block=(x[1], y[1], z[1]), cluster=(x[2], y[2], z[2]))


def _shared_bytes(function: PrimFunc, scope: str) -> int:
    """Bytes of all buffers of a scope."""
    import tvm_ffi
    from tvm import tirx

    sizes: list[int] = []

    def visit(node: Any) -> None:
        if node.buffer.scope() == scope:
            sizes.append(math.prod(int(n) for n in node.buffer.shape) * node.buffer.dtype.itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, visit), order="post")
    return sum(sizes)
