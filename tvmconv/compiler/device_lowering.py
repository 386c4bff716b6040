"""Lowering of scheduled TIR to device functions with TVM's pipeline and the options that schedules need, and checks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv.annotations import CONSTANT_ARGS, DISABLE_BUFFER_REUSE, HOIST_GUARDS, KEEP_ALLOCATED_SIZES
from tvmconv.compiler import host_code as host_side
from tvmconv.compiler import memory_scopes
from tvmconv.compiler.executable import ArrayType, LaunchConfig
from tvmconv.compiler.lowered_module import LoweredKernel, LoweredModule
from tvmconv.compiler.source import KernelParameter
from tvmconv.compiler.tir_nodes import collect_nodes, count_elements
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.target import ASYNC_COPY_MIN_ARCH, DEPENDENT_LAUNCH_MIN_ARCH, parse_arch_number
from tvmconv.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm.ir import IRModule
    from tvm.ir.transform import PassContext
    from tvm.target import Target
    from tvm.tirx import PrimFunc


_ASYNC_STAGES_ANNOTATION = "software_pipeline_async_stages"
WARP_SCOPE = "warp"  # scope of buffers that are distributed over the lanes of a warp


class PipelineModules(NamedTuple):
    """Host code in which launches can still be parsed, and host and device code ready for code generation."""

    host_launches: IRModule
    host_module: IRModule
    device_module: IRModule


def run_pipeline(mod: IRModule, target: Target) -> PipelineModules:
    """Run TVM's pipeline on a scheduled module with the function `main`, for a target with a host."""
    from tvm import tirx
    from tvm.ir import IRModule

    split_host_device = importlib.import_module("tvm.tirx.build").split_host_device_mods
    arch_number = parse_arch_number(str(target.attrs.get("arch", "")))
    uses_async_copies = arch_number >= ASYNC_COPY_MIN_ARCH
    if arch_number < DEPENDENT_LAUNCH_MIN_ARCH:
        mod = _remove_dependent_launches(mod)
    try:
        bound_module = tirx.transform.BindTarget(target)(mod if uses_async_copies else _remove_async_stages(mod))
        pipeline, finalize_host, finalize_device = tirx.get_default_tir_pipeline(target)
        with _make_pass_context(mod, uses_async_copies=uses_async_copies):
            lowered = pipeline(bound_module)
        host, devices = split_host_device(lowered)
        device = next(iter(devices.values()), IRModule({}))  # empty if no loop is bound to threads
        return PipelineModules(host, finalize_host()(host), finalize_device()(_lower_warp_buffers(device)))
    except (ValueError, RuntimeError) as error:  # TVM's errors have no common base class
        raise CompileError(f"TVM cannot lower the schedule: {str(error).strip().splitlines()[-1]}") from error


def _remove_async_stages(mod: IRModule) -> IRModule:
    import tvm
    import tvm_ffi
    from tvm import tirx

    def make_synchronous(loop: Any) -> Any:
        if _ASYNC_STAGES_ANNOTATION not in loop.annotations:
            return loop
        annotations = {key: value for key, value in loop.annotations.items() if key != _ASYNC_STAGES_ANNOTATION}
        fields = (loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding)
        return tirx.For(*fields, annotations, loop.step, loop.span)

    body = tvm_ffi.structural_map(mod["main"].body, (tirx.For, make_synchronous), order="post")
    return tvm.IRModule({"main": mod["main"].with_body(body)}, attrs=mod.attrs)


def _remove_dependent_launches(mod: IRModule) -> IRModule:
    """Remove the instructions of programmatic dependent launch, without which launches follow one another."""
    import tvm
    import tvm_ffi
    from tvm import tirx

    def remove(statement: Any) -> Any:
        call = statement.value
        is_call = isinstance(call, tvm.ir.Call) and getattr(call.op, "name", "") == "tirx.ptx.griddepcontrol"
        return tirx.Evaluate(tirx.const(0, "int32")) if is_call else statement

    body = tvm_ffi.structural_map(mod["main"].body, (tirx.Evaluate, remove), order="post")
    return tvm.IRModule({"main": mod["main"].with_body(body)}, attrs=mod.attrs)


def list_warp_buffers(function: PrimFunc) -> list[str]:
    """Return the names of buffers that are not yet distributed over the lanes of a warp."""
    from tvm import tirx

    buffers = [node.buffer for node in collect_nodes(function.body, tirx.AllocBuffer)]
    return [str(buffer.name) for buffer in buffers if buffer.scope() == WARP_SCOPE]


def _lower_warp_buffers(device: IRModule) -> IRModule:
    """Distribute warp buffers over the lanes where TVM can; each run of its pass handles one buffer."""
    from tvm import tirx

    for _ in range(sum(len(list_warp_buffers(function)) for function in device.functions.values())):
        device = tirx.transform.LowerWarpMemory()(device)
    return device


def needs_pass_options(mod: IRModule) -> bool:
    """Return whether TVM lowers a scheduled module wrongly, or not at all, with the default options of its passes."""
    return DISABLE_BUFFER_REUSE in memory_scopes.get_root_annotations(mod) or _allocates_warp_buffers(mod)


def _allocates_warp_buffers(mod: IRModule) -> bool:
    from tvm import s_tir

    blocks = collect_nodes(mod["main"].body, s_tir.SBlock)
    return any(buffer.scope() == WARP_SCOPE for block in blocks for buffer in block.alloc_buffers)


def _make_pass_context(mod: IRModule, *, uses_async_copies: bool) -> PassContext:
    from tvm.ir.transform import PassContext

    current, annotations = PassContext.current(), memory_scopes.get_root_annotations(mod)
    config, disabled = dict(current.config), list(current.disabled_pass)
    if uses_async_copies:  # the option also enables a pass for DMA engines of other devices, which takes seconds
        config["tirx.use_async_copy"] = True
        disabled.append("s_tir.LowerAsyncDMA")
    if KEEP_ALLOCATED_SIZES in annotations:  # skips the slow analysis of the accessed region of each buffer
        disabled.append("s_tir.CompactBufferAllocation")
    if DISABLE_BUFFER_REUSE in annotations:
        config["tirx.disable_storage_rewrite"] = True
    if HOIST_GUARDS in annotations:
        config["s_tir.HoistIfThenElse"] = {"support_block_scope_hoisting": True}
    if _allocates_warp_buffers(mod):
        # Eliminated subexpressions hide the lane from LowerWarpMemory, which breaks the code.
        config["tirx.disable_cse_tir"] = True
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=disabled,
        instruments=list(current.instruments or ()),
        config=config,
    )


def lower_module(mod: IRModule, target: Target) -> LoweredModule:
    """Lower a scheduled module with the function `main` to a device function per root loop nest.

    CompileError is raised if host code remains besides launches, if TVM omits a barrier or does not distribute a warp
    buffer over the lanes, or if a tensor map is unsupported or exceeds its array.
    """
    parameters = list(mod["main"].params)
    modules = run_pipeline(mod, target)
    (main,) = modules.host_launches.functions.values()
    host = host_side.parse_host_function(main, len(parameters))
    arrays = tuple(_make_array_type(p) for p in parameters)
    for launch in host.launches:
        _check_tensor_maps(launch, (*arrays, *host.workspace), target.kind.name)
    functions = {str(f.attrs["global_symbol"]): f for f in modules.device_module.functions.values()}
    return LoweredModule(
        target=target,
        kernels=tuple(
            _make_lowered_kernel(functions[launch.function], launch, target.kind.name) for launch in host.launches
        ),
        arrays=arrays,
        workspace=host.workspace,
        memory_scopes=memory_scopes.read_memory_scopes(mod),
        num_prepack_kernels=_count_prepack_kernels(mod, host.launches),
        host_module=modules.host_module,
        device_module=modules.device_module,
    )


def _count_prepack_kernels(mod: IRModule, launches: Sequence[host_side.KernelLaunch]) -> int:
    """Return the number of leading launches whose only arguments are those marked as constant."""
    constant_names = set(map(str, memory_scopes.get_root_annotations(mod).get(CONSTANT_ARGS, ())))
    variable_indices = {i for i, p in enumerate(mod["main"].params) if str(p.name) not in constant_names}
    if not constant_names:
        return 0
    return next((i for i, launch in enumerate(launches) if variable_indices & set(launch.arguments)), len(launches) - 1)


def _make_lowered_kernel(function: PrimFunc, launch: host_side.KernelLaunch, target_kind: str) -> LoweredKernel:
    _check_barriers(function)
    for buffer in list_warp_buffers(function):
        raise CompileError(f"TVM cannot distribute {buffer}, with the scope warp, over the lanes of a warp")
    dynamic_shared_bytes = sum_allocated_bytes(function, "shared.dyn")
    if dynamic_shared_bytes and target_kind != "cuda":
        raise CompileError(
            f"the schedule uses dynamic shared memory (shared.dyn): expected the scope shared for {target_kind}"
        )
    if dynamic_shared_bytes != launch.dynamic_shared_bytes:
        raise CompileError(
            f"{launch.function} has {dynamic_shared_bytes} bytes of dynamic shared memory, and TVM launches it with "
            f"{launch.dynamic_shared_bytes}"
        )
    return LoweredKernel(
        function=function,
        launch=_read_launch_config(function),
        parameters=tuple(map(_make_parameter, function.params, launch.arguments, launch.tensor_maps)),
        shared_bytes=sum_allocated_bytes(function, "shared"),
        dynamic_shared_bytes=dynamic_shared_bytes,
    )


def _make_parameter(variable: Any, index: int, tensor_map: TensorMap | None) -> KernelParameter:
    dtype = tensor_map.dtype if tensor_map else str(variable.ty.element_type.dtype)
    return KernelParameter(str(variable.name), dtype, index, tensor_map)


def _check_tensor_maps(launch: host_side.KernelLaunch, arrays: Sequence[ArrayType], target_kind: str) -> None:
    for index, tensor_map in zip(launch.arguments, launch.tensor_maps, strict=True):
        if tensor_map and target_kind != "cuda":
            raise CompileError(f"the schedule uses tensor maps: expected the target cuda, not {target_kind}")
        if tensor_map and tensor_map.nbytes > arrays[index].nbytes:
            raise CompileError(f"{tensor_map}, exceeds its array of {arrays[index].nbytes} bytes")


def _make_array_type(parameter: Any) -> ArrayType:
    return ArrayType(tuple(int(extent) for extent in parameter.shape), str(parameter.dtype))


def _check_barriers(function: PrimFunc) -> None:
    """Raise CompileError for a kernel with a shared-memory race, or one that cannot be analysed.

    Verification does not reliably find races, because a kernel with a race may compute correct outputs.
    """
    from tvmconv.compiler.barriers import find_missing_barriers

    try:
        races = find_missing_barriers(function)
    except AnalysisError as error:
        raise CompileError(f"cannot determine whether the kernel lacks a barrier: {error}") from error
    for race in races:
        raise CompileError(
            f"TVM omits a barrier: threads along {' and '.join(race.thread_axes)} share {race.buffer}[{race.index}]; "
            "nest the loop of these threads inside the others"
        )


_LAUNCH_AXES = ("blockIdx", "threadIdx", "clusterCtaIdx")


def _read_launch_config(function: PrimFunc) -> LaunchConfig:
    from tvm import tirx

    attributes = collect_nodes(function.body, tirx.AttrStmt)
    extents = {str(a.node.thread_tag): int(a.value) for a in attributes if a.attr_key == "thread_extent"}
    x, y, z = (tuple(extents.get(f"{kind}.{axis}", 1) for kind in _LAUNCH_AXES) for axis in "xyz")
    return LaunchConfig(grid=(x[0], y[0], z[0]), block=(x[1], y[1], z[1]), cluster=(x[2], y[2], z[2]))


def sum_allocated_bytes(function: PrimFunc, scope: str) -> int:
    """Return the bytes of all buffers of a memory scope, such as "shared" or "local", that a function allocates."""
    from tvm import tirx

    buffers = [node.buffer for node in collect_nodes(function.body, tirx.AllocBuffer)]
    return sum(count_elements(buffer) * buffer.dtype.itemsize for buffer in buffers if buffer.scope() == scope)
