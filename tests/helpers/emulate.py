"""Kernels run without a GPU, for tests: what was lowered for CUDA, executed by `tvmconv.emulator.execution`.

Where a kernel does what no kernel may (it races, leaves its arrays, ...), `ExecutionError` is raised.
"""

from collections.abc import Sequence

import numpy as np

import tvmconv as tc
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.emulator.execution import bind_arguments, execute
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.observers import AccessObserver
from tvmconv.kernel import Kernel
from tvmconv.space import Config
from tvmconv.workloads.dtypes import get_numpy_dtype


def run(
    lowered: LoweredModule,
    inputs: Sequence[np.ndarray],
    *,
    watch: AccessObserver | None = None,
) -> np.ndarray:
    """The output of a lowered kernel.

    Args:
        lowered: device functions and how they are launched, such as `Kernel.lowered_module`.
        inputs: one array for each of the kernel's arguments but the last, in their shape in memory.
        watch: is told of what happens.

    Returns:
        The output; NaN where nobody has written. Further results, among the inputs, are changed in place.
    """
    *given, output = lowered.arrays
    *names, last = lowered.memory_scopes
    places = [
        GlobalArray.from_values(name, np.asarray(values, get_numpy_dtype(array.dtype)).reshape(array.shape))
        for name, values, array in zip(names, inputs, given, strict=True)
    ]
    for name, array in [(last, output), *(("scratch memory", array) for array in lowered.workspace)]:
        places.append(GlobalArray.allocate_unwritten(name, get_numpy_dtype(array.dtype), int(np.prod(array.shape))))
    for step in lowered.kernels:
        execute(step.function, step.launch, bind_arguments(step, places), observer=watch)
    if names[-1:] == ["stats"]:  # a second result
        inputs[-1][:] = places[len(given) - 1].values.reshape(inputs[-1].shape)
    return places[len(given)].values.reshape(output.shape)


def build_checked(text: str, schedule: str, config: Config | None = None, arch: str = "sm_90") -> Kernel:
    """The kernel of a workload's text, whose result has been checked."""
    w = tc.parse(text)
    kernel = tc.build(w, schedule, arch=arch, config=config)
    assert error(kernel.lowered_module, w) <= w.tolerance, config
    return kernel


def error(lowered: LoweredModule, workload, *, seed: int = 0) -> float:
    """The relative L2 error of a lowered kernel against the workload's float64 reference, on random inputs."""
    inputs = workload.inputs(seed=seed)
    found = run(lowered, inputs).astype(np.float64)
    expected = np.asarray(workload.reference(*inputs), np.float64).reshape(found.shape)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
