"""From scheduled TIR to device code: TVM's own pipeline, stopped where there is something to look at."""

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.compiler import nvrtc, spaces
from tvmconv.compiler.hook import compile_with
from tvmconv.compiler.program import ArrayType, Launch, Program
from tvmconv.errors import CompileError
from tvmconv.marks import HOIST_GUARDS, Space

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tvm.ir import IRModule
    from tvm.ir.transform import PassContext
    from tvm.target import Target
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.nvrtc import Cubin


@dataclass(frozen=True)
class Lowered:
    """One device function, and what is needed to run it.

    Attributes:
        target: the TVM target.
        function: the lowered device function (TIR).
        launch: grid and block, read off the function.
        arrays: the PrimFunc's arguments, inputs first and the output last.
        spaces: where each of these lies, by its name.
        arguments: for each parameter of the device function, in its order, the index of the PrimFunc's argument that
            goes there (a generated kernel's parameters do not keep the PrimFunc's order).
        shared_bytes: static shared memory that the function allocates.
        host: the host side, which checks arguments and launches.
        device: the module of the function alone.
    """

    target: Target
    function: PrimFunc
    launch: Launch
    arrays: tuple[ArrayType, ...]
    spaces: Mapping[str, Space]
    arguments: tuple[int, ...]
    shared_bytes: int
    host: IRModule
    device: IRModule

    @functools.cached_property
    def name(self) -> str:
        """The kernel's symbol in the source."""
        return str(self.function.attrs["global_symbol"])

    @functools.cached_property
    def source(self) -> str:
        """The generated CUDA or OpenCL text."""
        with compile_with(lambda text: b""):  # only the text is wanted
            text = _fill_alignment(str(self._codegen(self.device, self.target).inspect_source()))
        return spaces.apply(text, self.target.kind.name, self.spaces, self.arrays)

    @functools.cached_property
    def cubin(self) -> Cubin:
        """The binary of a CUDA kernel, from NVRTC; raises `CompileError` when it does not compile."""
        return nvrtc.compile_cubin(self.source, str(self.target.attrs["arch"]))

    @functools.cached_property
    def program(self) -> Program:
        """What a device loads; raises `CompileError` when the text of a CUDA kernel does not compile."""
        cubin = self.cubin if self.target.kind.name == "cuda" else None
        placed = [(i, name, space) for i, (name, space) in enumerate(self.spaces.items())]
        constants = {i: spaces.symbol(name) for i, name, space in placed if space == "constant"} if cubin else {}
        return Program(
            code=cubin.image if cubin else self.source.encode(),
            name=self.name,
            launch=self.launch,
            arrays=self.arrays,
            arguments=tuple(i for i in self.arguments if i not in constants),
            shared_bytes=self.shared_bytes,
            constants=tuple(constants.items()),
            textures=tuple(i for i, _, space in placed if space == "texture"),
            resources=cubin.resources if cubin else None,
        )

    def executable(self) -> Any:
        """A CUDA kernel as a runtime module of TVM, callable on DLPack tensors through its `main`.

        Raises:
            CompileError: NVRTC rejects the kernel, or an argument does not lie in global memory.
        """
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


_PLACES = {"constant": "constant memory", "texture": "a texture"}

# From sm_80 on, a copy to shared memory may go on in the background: PTX ISA, "cp.async".
_ASYNC_SINCE = 80
_ASYNC_STAGES = "software_pipeline_async_stages"


def _copies_asynchronously(target: Target) -> bool:
    arch = re.match(r"sm_(\d+)", str(target.attrs.get("arch", "")))
    return arch is not None and int(arch[1]) >= _ASYNC_SINCE


def _without_async_stages(mod: IRModule) -> IRModule:
    """The module with its pipelines' asynchronous copies made synchronous."""
    import tvm_ffi
    from tvm import s_tir

    blocks: list[str] = []
    tvm_ffi.structural_walk(
        mod["main"].body, (s_tir.SBlock, lambda block: blocks.append(str(block.name_hint))), order="post"
    )
    s = s_tir.Schedule(mod)
    for name in blocks:
        if name != "root":
            for loop in s.get_loops(s.get_sblock(name)):
                if _ASYNC_STAGES in s.get(loop).annotations:
                    s.unannotate(loop, _ASYNC_STAGES)
    return s.mod


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
    if HOIST_GUARDS in spaces.root_annotations(mod):
        config["s_tir.HoistIfThenElse"] = {"support_block_scope_hoisting": True}
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=disabled,
        instruments=list(current.instruments or ()),
        config=config,
    )


def lower(mod: IRModule, target: Target) -> Lowered:
    """Lower a scheduled module of one PrimFunc to one device function.

    Args:
        mod: the scheduled module, its function named `main`.
        target: a TVM target with a host.

    Raises:
        CompileError: the module does not lower, or not to exactly one device function, or TVM leaves out a barrier.
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
        device_mods = [finalize_device()(device) for device in devices.values()]
    except (ValueError, RuntimeError) as error:  # TVM's errors have no class of their own in common
        raise CompileError(f"TVM cannot lower the schedule: {str(error).strip().splitlines()[-1]}") from error
    functions = [function for device in device_mods for function in device.functions.values()]
    if len(functions) != 1:
        raise CompileError(f"the schedule lowers to {len(functions)} device functions instead of one")
    function = functions[0]
    _check_barriers(function)
    names = [p.name for p in parameters]
    return Lowered(
        target=target,
        function=function,
        launch=_launch(function),
        arrays=tuple(_array_type(p) for p in parameters),
        spaces=spaces.read(mod),
        arguments=tuple(names.index(p.name.removesuffix(spaces.POINTER)) for p in function.params),
        shared_bytes=_shared_bytes(function),
        host=finalize_host()(host),
        device=device_mods[0],
    )


# `__shared__ alignas(64) float K_shared_ptr[51];`
_SHARED_ARRAY = re.compile(r"(__shared__ alignas\(64\) float \w+\[)(\d+)(?=\];)")


def _fill_alignment(source: str) -> str:
    """Round the shared arrays of a CUDA text up to their alignment.

    NVIDIA's compiler may load an array's last words together with what follows them inside the alignment. That harms
    nothing, but behind the last array compute-sanitizer calls it an access out of bounds.
    """
    return _SHARED_ARRAY.sub(lambda match: f"{match[1]}{-(-int(match[2]) // 16) * 16}", source)


def _array_type(parameter: Any) -> ArrayType:
    return ArrayType(tuple(int(extent) for extent in parameter.shape), str(parameter.dtype))


def _check_barriers(function: PrimFunc) -> None:
    """Raise CompileError for a kernel whose threads would race for shared memory: it may even be right at times."""
    from tvmconv.compiler.barriers import unsynchronised

    for race in unsynchronised(function):
        raise CompileError(
            f"TVM leaves out a barrier: threads along {' and '.join(race.axes)} share {race.buffer}[{race.index}]; "
            "nest the loop of these threads inside the others"
        )


def _launch(function: PrimFunc) -> Launch:
    import tvm_ffi
    from tvm import tirx

    extents: dict[str, int] = {}

    def visit(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = int(node.value)

    tvm_ffi.structural_walk(function.body, (tirx.AttrStmt, visit), order="post")
    x, y, z = (tuple(extents.get(f"{kind}.{axis}", 1) for kind in ("blockIdx", "threadIdx")) for axis in "xyz")
    return Launch(grid=(x[0], y[0], z[0]), block=(x[1], y[1], z[1]))


def _shared_bytes(function: PrimFunc) -> int:
    import numpy as np
    import tvm_ffi
    from tvm import tirx

    sizes: list[int] = []

    def visit(node: Any) -> None:
        if node.buffer.scope() == "shared":
            sizes.append(int(np.prod([int(n) for n in node.buffer.shape])) * np.dtype(str(node.buffer.dtype)).itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, visit), order="post")
    return sum(sizes)
