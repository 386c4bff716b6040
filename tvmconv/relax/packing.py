"""Weight prepacking at compile time: the launches in which a kernel packs its weight run once, for the library.

The emulator runs them with NumPy, so that no GPU is needed. The library contains the packed weight as a constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.compiler.executable import CompiledKernel, Executable
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.workloads.dtypes import get_numpy_dtype

WEIGHT_INDEX = 1  # of the arrays of a convolution


@dataclass(frozen=True)
class PackedExecutable:
    """An executable without the launches that pack its weight."""

    executable: Executable  # its arrays are the inputs that are still read, the packed arrays, and the output
    input_indices: tuple[int, ...]  # indices of those inputs in the original arrays
    packed_indices: tuple[int, ...]  # indices of the packed arrays in the original workspace


def remove_prepack_kernels(executable: Executable) -> PackedExecutable:
    """Return an executable that takes what its prepack kernels write as further inputs."""
    num_inputs, num_arrays = len(executable.arrays) - 1, len(executable.arrays)
    prepack_kernels = executable.kernels[: executable.num_prepack_kernels]
    kernels = executable.kernels[executable.num_prepack_kernels :]
    read = {index for kernel in kernels for index in kernel.arguments}
    written = {index for kernel in prepack_kernels for index in kernel.arguments if index >= num_arrays}
    inputs = [index for index in range(num_inputs) if index in read]
    packed = sorted(read & written)
    workspace = sorted(read - {*range(num_arrays), *packed})
    order = [*inputs, *packed, num_inputs, *workspace]
    all_arrays = [*executable.arrays, *executable.workspace]
    new_index = {old: new for new, old in enumerate(order)}
    num_new_arrays = len(inputs) + len(packed) + 1
    new_executable = Executable(
        tuple(_rename_arguments(kernel, new_index) for kernel in kernels),
        arrays=tuple(all_arrays[index] for index in order[:num_new_arrays]),
        workspace=tuple(all_arrays[index] for index in order[num_new_arrays:]),
    )
    return PackedExecutable(new_executable, tuple(inputs), tuple(index - num_arrays for index in packed))


def _rename_arguments(kernel: CompiledKernel, new_index: dict[int, int]) -> CompiledKernel:
    return replace(kernel, arguments=tuple(new_index[index] for index in kernel.arguments))


def pack_weight(lowered: LoweredModule, weight: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the workspace of a kernel after its prepack kernels.

    Args:
        lowered: Device functions of the kernel.
        weight: Weight with the shape and the dtype of the kernel's.

    Returns:
        One array per workspace array, with its shape and dtype. Elements that nothing writes are NaN.

    Raises:
        AnalysisError: The emulator does not support an instruction of the prepack kernels.
    """
    from tvmconv.emulator.execution import bind_arguments, execute
    from tvmconv.emulator.memory.arrays import GlobalArray

    prepack_kernels = lowered.kernels[: lowered.num_prepack_kernels]
    used = {index for kernel in prepack_kernels for index in kernel.arguments}
    arrays = []
    for index, array in enumerate((*lowered.arrays, *lowered.workspace)):
        size = math.prod(array.shape) if index in used else 0
        arrays.append(GlobalArray.allocate_unwritten(f"array{index}", get_numpy_dtype(array.dtype), size))
    arrays[WEIGHT_INDEX] = GlobalArray.from_values("weight", weight)
    for kernel in prepack_kernels:
        execute(kernel.function, kernel.launch, bind_arguments(kernel, arrays))
    return [
        values.values.reshape(array.shape) if values.size else np.empty(0, values.dtype)
        for values, array in zip(arrays[len(lowered.arrays) :], lowered.workspace, strict=True)
    ]
