"""TVM's passes as a schedule needs them: which run, with which options, and what they leave undone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

from tvmconv import gpu_specs
from tvmconv.annotations import DISABLE_BUFFER_REUSE, HOIST_GUARDS, KEEP_ALLOCATED_SIZES
from tvmconv.compiler import memory_scopes
from tvmconv.errors import CompileError

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.ir.transform import PassContext
    from tvm.target import Target
    from tvm.tirx import PrimFunc


_ASYNC_STAGES_ANNOTATION = "software_pipeline_async_stages"
WARP_SCOPE = "warp"  # the scope of what the lanes of a warp hold together


class PipelineModules(NamedTuple):
    """What TVM's pipeline makes of a scheduled module.

    Attributes:
        host_launches: the host side while its launches can still be read.
        host_module: the same, ready for code to be generated.
        device_module: the device functions, ready for code to be generated.
    """

    host_launches: IRModule
    host_module: IRModule
    device_module: IRModule


def run_pipeline(mod: IRModule, target: Target) -> PipelineModules:
    """Run TVM's pipeline over a scheduled module.

    Args:
        mod: the scheduled module, its function named `main`.
        target: a TVM target with a host.

    Raises:
        CompileError: the module does not lower.
    """
    from tvm import tirx
    from tvm.ir import IRModule

    split_host_device = importlib.import_module("tvm.tirx.build").split_host_device_mods
    try:
        uses_async_copies = _can_copy_asynchronously(target)
        bound_module = tirx.transform.BindTarget(target)(mod if uses_async_copies else _remove_async_stages(mod))
        pipeline, finalize_host, finalize_device = tirx.get_default_tir_pipeline(target)
        with _make_pass_context(mod, uses_async_copies=uses_async_copies):
            lowered = pipeline(bound_module)
        host, devices = split_host_device(lowered)
        device = next(iter(devices.values()), IRModule({}))  # none where no loop is bound to threads
        return PipelineModules(host, finalize_host()(host), finalize_device()(_lower_warp_buffers(device)))
    except (ValueError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        raise CompileError(f"TVM cannot lower the schedule: {str(error).strip().splitlines()[-1]}") from error


def _can_copy_asynchronously(target: Target) -> bool:
    return gpu_specs.parse_arch_number(str(target.attrs.get("arch", ""))) >= gpu_specs.ASYNC_COPY_MIN_ARCH


def _remove_async_stages(mod: IRModule) -> IRModule:
    """The module with its pipelines' asynchronous copies made synchronous."""
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


def _uses_warp_buffers(mod: IRModule) -> bool:
    """Whether a schedule has buffers that the lanes of a warp hold together."""
    import tvm_ffi
    from tvm import s_tir

    scopes: set[str] = set()
    tvm_ffi.structural_walk(
        mod["main"].body,
        (s_tir.SBlock, lambda block: scopes.update(buffer.scope() for buffer in block.alloc_buffers)),
        order="post",
    )
    return WARP_SCOPE in scopes


def list_warp_buffers(function: PrimFunc) -> list[str]:
    """The buffers of a device function that are not yet spread over the lanes of a warp."""
    import tvm_ffi
    from tvm import tirx

    names: list[str] = []

    def visit(node: Any) -> None:
        if node.buffer.scope() == WARP_SCOPE:
            names.append(str(node.buffer.name))

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, visit), order="post")
    return names


def _lower_warp_buffers(device: IRModule) -> IRModule:
    """A device module with its warp buffers made each lane's own, as many as TVM can: it takes one in a pass."""
    from tvm import tirx

    def count_warp_buffers() -> int:
        return sum(len(list_warp_buffers(function)) for function in device.functions.values())

    for _ in range(count_warp_buffers()):
        device = tirx.transform.LowerWarpMemory()(device)
    return device


def _make_pass_context(mod: IRModule, *, uses_async_copies: bool) -> PassContext:
    """TVM's current pass context with the options that a schedule needs.

    Args:
        mod: the scheduled module.
        uses_async_copies: whether what the schedule marks as asynchronous becomes cp.async. That option also brings in
            a pass for the DMA engines of other devices, which takes seconds to find nothing.
    """
    from tvm.ir.transform import PassContext

    current = PassContext.current()
    config, disabled = dict(current.config), list(current.disabled_pass)
    if uses_async_copies:
        config["tirx.use_async_copy"] = True
        disabled.append("s_tir.LowerAsyncDMA")
    if KEEP_ALLOCATED_SIZES in memory_scopes.get_root_annotations(
        mod
    ):  # what each statement uses of an array takes long to find out
        disabled.append("s_tir.CompactBufferAllocation")
    if DISABLE_BUFFER_REUSE in memory_scopes.get_root_annotations(mod):
        config["tirx.disable_storage_rewrite"] = True
    if HOIST_GUARDS in memory_scopes.get_root_annotations(mod):
        config["s_tir.HoistIfThenElse"] = {"support_block_scope_hoisting": True}
    if _uses_warp_buffers(mod):  # a common subexpression hides the lane from LowerWarpMemory: silently wrong code
        config["tirx.disable_cse_tir"] = True
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=disabled,
        instruments=list(current.instruments or ()),
        config=config,
    )
