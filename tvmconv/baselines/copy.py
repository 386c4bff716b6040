"""A copy on the device: what the memory gives, and so what no filter of that size can exceed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.baselines.base import Baseline, check_filter, check_gpu, time_sets
from tvmconv.compiler.program import ArrayType
from tvmconv.devices.base import BufferSets, Device, set_bytes
from tvmconv.devices.cuda_kernel import Arrays, border
from tvmconv.devices.graphs import capture_on, check, new_stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads import Workload


def time_copy(
    w: Workload, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time CUDA's own copy of X to where Y would be: the bytes of a filter but for its mask.

    Args:
        w: a filter.
        inputs: X and K, of `w.argument_shapes` and `w.dtype`.
        device: an NVIDIA GPU.
        cold: as for `Loaded.time`.
        seconds: as for `Loaded.time`.

    Returns:
        A baseline without an output.

    Raises:
        WrongDeviceError: `device` is no NVIDIA GPU.
        DeviceError: the workload is no filter, or CUDA fails.
    """
    gpu = check_gpu(device, "copy")
    check_filter(w, "copy")
    from cuda.bindings import runtime

    x = inputs[0]
    y = ArrayType(w.argument_shapes[-1], w.dtype)
    sets = BufferSets.choose(set_bytes([x], y.shape, y.dtype), gpu.l2_bytes or 0, cold=cold)
    with border(gpu), Arrays() as arrays, new_stream(gpu.index) as stream:
        copies = [arrays.uploaded([x], y) for _ in range(sets.count)]

        def launch(i: int) -> None:
            source, target = copies[i % sets.count]
            kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            check(runtime.cudaMemcpyAsync(target, source, y.nbytes, kind, stream))

        timing = time_sets(capture_on(stream, launch), stream, sets, seconds)
    return Baseline(timing, None, "cudaMemcpyAsync of X to Y")
