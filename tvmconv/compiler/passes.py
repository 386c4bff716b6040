"""TVM's lowering passes with the options that schedules need."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv.annotations import DISABLE_BUFFER_REUSE, HOIST_GUARDS, KEEP_ALLOCATED_SIZES
from tvmconv.compiler import memory_scopes
from tvmconv.compiler.tir_nodes import collect_nodes
from tvmconv.errors import CompileError
from tvmconv.target import ASYNC_COPY_MIN_ARCH, parse_arch_number

if TYPE_CHECKING:
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
    """Return the module with the asynchronous copies of its pipelines made synchronous."""
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


def _make_pass_context(mod: IRModule, *, uses_async_copies: bool) -> PassContext:
    """Return TVM's current pass context with the options that a schedule needs."""
    from tvm import s_tir
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
    blocks = collect_nodes(mod["main"].body, s_tir.SBlock)
    if any(buffer.scope() == WARP_SCOPE for block in blocks for buffer in block.alloc_buffers):
        # Eliminated subexpressions hide the lane from LowerWarpMemory, which breaks the code.
        config["tirx.disable_cse_tir"] = True
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=disabled,
        instruments=list(current.instruments or ()),
        config=config,
    )
