"""Detection of data races for shared memory, by executing blocks in the emulator.

`tvmconv.compiler.barriers` finds the barriers that TVM omits in the TIR, before a kernel is compiled. It compares
buffer indices but cannot see addresses in registers, so kernels with GPU instructions by name need this check.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvmconv.emulator.errors import RaceError
from tvmconv.emulator.execution import execute, make_zero_arguments
from tvmconv.emulator.memory.arrays import TensorMapArray
from tvmconv.emulator.threads import BlockIndex, sample_blocks
from tvmconv.kernel import Kernel


def find_races(kernel: Kernel, blocks: Sequence[BlockIndex] | None = None) -> list[str]:
    """Return a message for the first race of each device kernel; an empty list if no race is found.

    A race is one of the following:

    * an access to shared memory that no barrier orders after another thread's store to it, or a store that no barrier
      orders after another thread's load;
    * an asynchronous copy whose result is used before a wait for it;
    * a missing fence or wait for TMA or wgmma;
    * a barrier that not all threads reach, or any other wait that never ends.

    The check sees only what the executed blocks do on random numbers, and in global memory only simultaneous stores.
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
