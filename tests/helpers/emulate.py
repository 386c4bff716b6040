"""Kernels run without a GPU, for tests: what was lowered for CUDA, executed by `tvmconv.analysis.emulation.execute`.

Where a kernel does what no kernel may (it races, leaves its arrays, ...), `ExecutionError` is raised.
"""

from collections.abc import Sequence

import numpy as np

from tvmconv.analysis.emulation.arguments import arguments
from tvmconv.analysis.emulation.execute import execute
from tvmconv.analysis.emulation.memory.arrays import Array
from tvmconv.analysis.emulation.watch import Watch
from tvmconv.compiler.lowered import Lowered
from tvmconv.workloads.dtypes import numpy_dtype


def run(
    lowered: Lowered,
    inputs: Sequence[np.ndarray],
    *,
    watch: Watch | None = None,
) -> np.ndarray:
    """The output of a lowered kernel.

    Args:
        lowered: device functions and how they are launched, such as `Kernel.module`.
        inputs: one array for each of the kernel's arguments but the last, in their shape in memory.
        watch: is told of what happens.

    Returns:
        The output; NaN where nobody has written.
    """
    *given, output = lowered.arrays
    *names, last = lowered.spaces
    places = [
        Array.of(name, np.asarray(values, numpy_dtype(array.dtype)).reshape(array.shape))
        for name, values, array in zip(names, inputs, given, strict=True)
    ]
    for name, array in [(last, output), *(("scratch memory", array) for array in lowered.scratch)]:
        places.append(Array.unwritten(name, numpy_dtype(array.dtype), int(np.prod(array.shape))))
    for step in lowered.steps:
        execute(step.function, step.launch, arguments(step, places), watch=watch)
    return places[len(given)].values.reshape(output.shape)


def error(lowered: Lowered, workload, *, seed: int = 0) -> float:
    """The relative L2 error of a lowered kernel against the workload's float64 reference, on random inputs."""
    inputs = workload.inputs(seed=seed)
    found = run(lowered, inputs).astype(np.float64)
    expected = np.asarray(workload.reference(*inputs), np.float64).reshape(found.shape)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
