"""Arguments of an emulated kernel: arrays, and arrays behind tensor maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.tir_nodes import collect_nodes, count_elements
from tvmconv.emulator.memory.arrays import Argument, GlobalArray, TensorMapArray
from tvmconv.workloads.dtypes import get_numpy_dtype

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel


def bind_arguments(lowered_kernel: LoweredKernel, arrays: Sequence[GlobalArray]) -> list[Argument]:
    """Return the arguments of a device kernel, from the arrays that `LoweredKernel.arguments` indexes."""
    return _apply_tensor_maps(lowered_kernel, [arrays[index] for index in lowered_kernel.arguments])


def _apply_tensor_maps(lowered_kernel: LoweredKernel, arguments: Sequence[GlobalArray]) -> list[Argument]:
    tensor_maps = dict(lowered_kernel.tensor_maps)
    return [
        TensorMapArray(array, tensor_maps[position]) if position in tensor_maps else array
        for position, array in enumerate(arguments)
    ]


def make_zero_arguments(lowered_kernel: LoweredKernel) -> list[Argument]:
    """Return zero-filled arguments of a device kernel, of the sizes that its TIR and its tensor maps declare."""
    from tvm import tirx

    sizes: dict[Any, int] = {}
    for node in collect_nodes(lowered_kernel.function.body, tirx.DeclBuffer):
        sizes[node.data] = max(sizes.get(node.data, 0), count_elements(node.buffer))
    tensor_maps = dict(lowered_kernel.tensor_maps)
    arrays: dict[int, GlobalArray] = {}
    parameters = zip(lowered_kernel.parameters, lowered_kernel.function.params, strict=True)
    for position, (parameter, variable) in enumerate(parameters):
        dtype = get_numpy_dtype(parameter.dtype)
        size = sizes.get(variable, 0)
        if position in tensor_maps:
            size = ceil_div(tensor_maps[position].nbytes, dtype.itemsize)
        if parameter.index not in arrays or arrays[parameter.index].size < size:
            arrays[parameter.index] = GlobalArray.allocate_zeros(parameter.name, dtype, size)
    return _apply_tensor_maps(lowered_kernel, [arrays[index] for index in lowered_kernel.arguments])
