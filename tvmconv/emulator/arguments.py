"""What the parameters of a kernel's step are given: arrays, and those behind tensor maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.arithmetic import ceil_div
from tvmconv.emulator.memory.arrays import Argument, GlobalArray, TensorMapArray
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel


def bind_arguments(lowered_kernel: LoweredKernel, arrays: Sequence[GlobalArray]) -> list[Argument]:
    """What a step's parameters are given, of arrays in the order of `LoweredKernel.arguments`' indices."""
    tensor_maps = dict(lowered_kernel.tensor_maps)
    return [
        TensorMapArray(arrays[array_index], tensor_maps[position]) if position in tensor_maps else arrays[array_index]
        for position, array_index in enumerate(lowered_kernel.arguments)
    ]


def make_zero_arguments(lowered_kernel: LoweredKernel) -> list[Argument]:
    """Arrays of zeros for a step's parameters, as large as its text and its tensor maps have them."""
    import tvm_ffi
    from tvm import tirx

    sizes: dict[Any, int] = {}

    def declare(declaration: Any) -> None:
        sizes[declaration.data] = max(
            sizes.get(declaration.data, 0), math.prod(int(extent) for extent in declaration.buffer.shape)
        )

    tvm_ffi.structural_walk(lowered_kernel.function.body, (tirx.DeclBuffer, declare), order="post")
    tensor_maps = dict(lowered_kernel.tensor_maps)
    arrays: dict[int, GlobalArray] = {}
    for position, (parameter, variable) in enumerate(
        zip(lowered_kernel.parameters, lowered_kernel.function.params, strict=True)
    ):
        dtype = get_numpy_dtype(parameter.dtype)
        size = (
            ceil_div(tensor_maps[position].nbytes, dtype.itemsize)
            if position in tensor_maps
            else sizes.get(variable, 0)
        )
        if parameter.index not in arrays or arrays[parameter.index].size < size:
            arrays[parameter.index] = GlobalArray.allocate_zeros(parameter.name, dtype, size)
    arguments = [arrays[array_index] for array_index in lowered_kernel.arguments]
    return [
        TensorMapArray(array, tensor_maps[position]) if position in tensor_maps else array
        for position, array in enumerate(arguments)
    ]
