"""Races for shared memory, found by executing blocks: also where addresses are numbers in registers.

`tvmconv.compiler.barriers` finds the barriers that TVM leaves out, from the text alone, before a kernel is compiled. It
compares indices of buffers, and knows nothing of addresses: of kernels with GPU instructions by name this is the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.analysis.emulation.arguments import zeros
from tvmconv.analysis.emulation.blocks import Block, some_blocks
from tvmconv.analysis.emulation.errors import RaceError
from tvmconv.analysis.emulation.execute import execute
from tvmconv.analysis.emulation.memory.arrays import Mapped

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel


def races(kernel: Kernel, blocks: Sequence[Block] | None = None) -> list[str]:
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
        AnalysisError: it cannot be executed (`tvmconv.analysis.emulation.execute.execute`).
    """
    found = []
    for step in kernel.steps:
        arrays, rng = zeros(step), np.random.default_rng(0)
        for array in (each.array if isinstance(each, Mapped) else each for each in arrays):
            if array.dtype.kind != "i":
                array.values[:] = rng.random(array.size, np.float32).astype(array.dtype)
        x, y, z = step.launch.grid
        chosen = blocks or [(0, 0, 0), (x - 1, y - 1, z - 1), *some_blocks(step.launch.grid)]
        try:
            execute(step.function, step.launch, arrays, blocks=chosen)
        except RaceError as error:
            found.append(str(error))
    return found
