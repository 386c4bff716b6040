"""Races for shared memory, found by executing blocks: also where addresses are numbers in registers.

`tvmconv.compiler.barriers` finds the barriers that TVM leaves out, from the text alone, before a kernel is compiled. It
compares indices of buffers, and knows nothing of addresses: of kernels with GPU instructions by name this is the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.emulator.arguments import make_zero_arguments
from tvmconv.emulator.blocks import BlockIndex, sample_blocks
from tvmconv.emulator.errors import RaceError
from tvmconv.emulator.execution import execute
from tvmconv.emulator.memory.arrays import TensorMapArray

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def find_races(kernel: Kernel, blocks: Sequence[BlockIndex] | None = None) -> list[str]:
    """What the threads of a kernel race for, the first of each of its steps; empty where no race is found.

    A race is an access to shared memory that no barrier orders behind another thread's store to it, or a store behind
    another thread's load; an asynchronous copy that nobody has waited for where it goes; a fence or a wait that TMA or
    wgmma lacks; a barrier that not all threads reach, or any other wait that never ends. Only what the executed blocks
    do is seen, on random numbers, and of global memory only stores at one time.

    Args:
        kernel: a built kernel, for any target.
        blocks: of the grid, which are executed; by default the first, the last, and some in between.

    Raises:
        ExecutionError: the kernel leaves its arrays, or an access is misaligned.
        AnalysisError: it cannot be executed (`tvmconv.emulator.execution.execute`).
    """
    race_messages = []
    for lowered_kernel in kernel.kernels:
        arrays, rng = make_zero_arguments(lowered_kernel), np.random.default_rng(0)
        for array in (argument.array if isinstance(argument, TensorMapArray) else argument for argument in arrays):
            if array.dtype.kind != "i":
                array.values[:] = rng.random(array.size, np.float32).astype(array.dtype)
        x, y, z = lowered_kernel.launch.grid
        executed_blocks = blocks or [(0, 0, 0), (x - 1, y - 1, z - 1), *sample_blocks(lowered_kernel.launch.grid)]
        try:
            execute(lowered_kernel.function, lowered_kernel.launch, arrays, blocks=executed_blocks)
        except RaceError as error:
            race_messages.append(str(error))
    return race_messages
