"""Baseline `cupy`: filters through CuPy's `ndimage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.baselines.base import Baseline, baseline, require_filter, require_gpu, translate_library_errors
from tvmconv.devices.cuda.graphs import make_capture, time_buffer_sets
from tvmconv.devices.device import BufferSets, Device, get_first_line
from tvmconv.errors import DeviceError
from tvmconv.workloads import Workload
from tvmconv.workloads.filters import Filter


@baseline("cupy")
def time_cupy(
    w: Workload, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time `cupyx.scipy.ndimage.correlate` with a preallocated output, followed by a clip if the filter has a clamp.

    The same function is used for signals, because `correlate1d` launches the same kernel.
    """
    gpu = require_gpu(device, "CuPy")
    image_filter = require_filter(w, "CuPy")
    try:
        import cupy
        from cupyx.scipy import ndimage
    except ImportError as error:
        reason = get_first_line(error)
        raise DeviceError(f"the CuPy baseline needs CuPy: pip install cupy-cuda13x ({reason})") from error
    nbytes = sum(array.nbytes for array in inputs) + inputs[0].nbytes  # the output is like the image
    sets = BufferSets.choose_count(nbytes, gpu.l2_bytes or 0, cold=cold)
    with (
        translate_library_errors("CuPy", gpu, RuntimeError, MemoryError, cupy.cuda.compiler.CompileException),
        cupy.cuda.Device(gpu.index),
        cupy.cuda.Stream(non_blocking=True) as stream,
        cupy.cuda.using_allocator(None),  # without a pool, memory is freed and an allocation in a capture is an error
    ):
        x, k = inputs
        copies = [(cupy.asarray(x), cupy.asarray(k), cupy.full(x.shape, np.nan, x.dtype)) for _ in range(sets.num_sets)]

        def launch(i: int) -> None:
            apply_filter(ndimage, image_filter, *copies[i % sets.num_sets])

        launch(0)  # compiles the kernels, which is not allowed in a capture
        output = cupy.asnumpy(copies[0][-1])
        timing = time_buffer_sets(make_capture(stream.ptr, launch), stream.ptr, sets, seconds)
    clip = ("clipped by a kernel of its own",) if image_filter.clamp else ()
    return Baseline(timing, output, ", ".join([f"CuPy {cupy.__version__}", "ndimage.correlate", *clip]))


def apply_filter(ndimage: Any, w: Filter, x: Any, k: Any, y: Any) -> None:
    """Filter a signal `x` with a mask `k` into `y` by a module, `cupyx.scipy.ndimage` or `scipy.ndimage`."""
    channel_axes = (1,) * (len(w.signal_shape) - len(w.mask_shape))  # the mask does not mix channels
    ndimage.correlate(x, k.reshape(*w.mask_shape, *channel_axes), output=y, mode="constant")
    if w.clamp:
        y.clip(0, 1, out=y)
