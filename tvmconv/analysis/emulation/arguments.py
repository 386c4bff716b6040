"""What the parameters of a kernel's step are given: arrays, and those behind tensor maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.analysis.emulation.memory.arrays import Argument, Array, Mapped
from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import numpy_dtype

if TYPE_CHECKING:
    from tvmconv.compiler.lowered import LoweredStep


def arguments(step: LoweredStep, arrays: Sequence[Array]) -> list[Argument]:
    """What a step's parameters are given, of arrays in the order of `LoweredStep.arguments`' indices."""
    maps = dict(step.tensor_maps)
    return [Mapped(arrays[i], maps[at]) if at in maps else arrays[i] for at, i in enumerate(step.arguments)]


def zeros(step: LoweredStep) -> list[Argument]:
    """Arrays of zeros for a step's parameters, as large as its text and its tensor maps have them."""
    import tvm_ffi
    from tvm import tirx

    sizes: dict[Any, int] = {}

    def declare(node: Any) -> None:
        sizes[node.data] = max(sizes.get(node.data, 0), math.prod(int(extent) for extent in node.buffer.shape))

    tvm_ffi.structural_walk(step.function.body, (tirx.DeclBuffer, declare), order="post")
    maps = dict(step.tensor_maps)
    arrays: dict[int, Array] = {}
    for at, (parameter, variable) in enumerate(zip(step.parameters, step.function.params, strict=True)):
        dtype = numpy_dtype(parameter.dtype)
        size = ceil_div(maps[at].nbytes, dtype.itemsize) if at in maps else sizes.get(variable, 0)
        if parameter.index not in arrays or arrays[parameter.index].size < size:
            arrays[parameter.index] = Array.zeros(parameter.name, dtype, size)
    given = [arrays[i] for i in step.arguments]
    return [Mapped(array, maps[at]) if at in maps else array for at, array in enumerate(given)]
