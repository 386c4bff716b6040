"""From scheduled TIR to device code: TVM's own pipeline, stopped where there is something to look at."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvmconv.compiler import host as host_side
from tvmconv.compiler import passes, spaces
from tvmconv.compiler.lowered import Lowered, LoweredStep
from tvmconv.compiler.program import ArrayType, Launch
from tvmconv.compiler.source import Parameter
from tvmconv.errors import AnalysisError, CompileError
from tvmconv.marks import KEPT
from tvmconv.tensor_map import TensorMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tvm.ir import IRModule
    from tvm.target import Target
    from tvm.tirx import PrimFunc


def lower(mod: IRModule, target: Target) -> Lowered:
    """Lower a scheduled module of one PrimFunc: to a device function for each root loop nest, usually one.

    Args:
        mod: the scheduled module, its function named `main`.
        target: a TVM target with a host.

    Raises:
        CompileError: the module does not lower, the host is left with more than launches, TVM leaves out a barrier, a
            buffer of a warp is not spread over its lanes, or a tensor map is not for TMA or not for its array.
    """
    parameters = list(mod["main"].params)
    made = passes.run(mod, target)
    (main,) = made.launches.functions.values()
    runs = host_side.read(main, len(parameters))
    arrays = tuple(_array_type(p) for p in parameters)
    for call in runs.calls:
        _check_tensor_maps(call, (*arrays, *runs.scratch), target.kind.name)
    functions = {str(f.attrs["global_symbol"]): f for f in made.device.functions.values()}
    return Lowered(
        target=target,
        steps=tuple(_step(functions[call.function], call, target.kind.name) for call in runs.calls),
        arrays=arrays,
        scratch=runs.scratch,
        spaces=spaces.read(mod),
        prepared=_prepared(mod, runs.calls),
        host=made.host,
        device=made.device,
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
    for buffer in passes.warp_buffers(function):
        raise CompileError(f"TVM does not spread {buffer}, of the scope warp, over the lanes of a warp")
    dynamic = buffer_bytes(function, "shared.dyn")
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
        shared_bytes=buffer_bytes(function, "shared"),
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


def buffer_bytes(function: PrimFunc, scope: str) -> int:
    """Return the bytes of all buffers of a memory scope, such as "shared" or "local", that a function allocates."""
    import tvm_ffi
    from tvm import tirx

    sizes: list[int] = []

    def visit(node: Any) -> None:
        if node.buffer.scope() == scope:
            sizes.append(math.prod(int(n) for n in node.buffer.shape) * node.buffer.dtype.itemsize)

    tvm_ffi.structural_walk(function.body, (tirx.AllocBuffer, visit), order="post")
    return sum(sizes)
