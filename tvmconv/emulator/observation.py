"""Execution of some blocks of a device kernel on zeros, to observe their accesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tvmconv.emulator.arguments import make_zero_arguments
from tvmconv.emulator.blocks import BlockIndex
from tvmconv.emulator.execution import execute
from tvmconv.emulator.memory.arrays import TensorMapArray

if TYPE_CHECKING:
    from tvmconv.compiler.lowered_module import LoweredKernel
    from tvmconv.emulator.observers import AccessObserver


def run_with_observer(
    lowered_kernel: LoweredKernel, argument_names: Iterable[str], blocks: Sequence[BlockIndex], observer: AccessObserver
) -> None:
    """Execute some blocks of a device kernel on zeros and notify an observer.

    Args:
        lowered_kernel: One of a kernel's device kernels.
        argument_names: Names of the kernel's arrays, as in `kernel.memory_scopes`.
        blocks: Indices of the blocks in the grid as (x, y, z).
        observer: Observer that is notified of accesses, with the arrays under these names.

    Raises:
        AnalysisError: The emulator cannot execute the device kernel.
    """
    arrays, names = make_zero_arguments(lowered_kernel), dict(enumerate(argument_names))
    for index, argument in zip(lowered_kernel.arguments, arrays, strict=True):
        array = argument.array if isinstance(argument, TensorMapArray) else argument
        array.name = names.get(index, array.name)
    execute(lowered_kernel.function, lowered_kernel.launch, arrays, blocks=blocks, observer=observer, check_races=False)
