"""Baseline `cublas`: matrix products of 8-bit operands by cuBLAS, for filters of one tap.

PyTorch passes `torch._scaled_mm` (8-bit floats) and `torch._int_mm` (integers) to cuBLAS. Sums of 8-bit floats are
computed both with and without promotion to float32 (`use_fast_accum`), and the faster one counts. They are stored in 8
bits if the workload's results are 8-bit floats, and in bfloat16 otherwise; integers are stored as int32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from tvmconv.baselines.base import Baseline, baseline, require_gpu
from tvmconv.baselines.cudnn import CudnnPickThread, torch_with_cudnn
from tvmconv.baselines.torch_calls import Tensors, TorchConvCall
from tvmconv.devices.device import Device
from tvmconv.errors import DeviceError
from tvmconv.workloads import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.dtypes import BFLOAT16, DTYPES, FLOAT8_DTYPES, INT8
from tvmconv.workloads.layout import CHANNELS_LAST


@baseline("cublas")
def time_cublas(
    w: Workload, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time the product of pixels and filters, without the epilogue, which is not verified.

    Raises:
        UnsupportedDeviceError: `device` is not an NVIDIA GPU.
        DeviceError: the workload is not a matrix product of 8-bit operands, or PyTorch does not support it.
    """
    gpu = require_gpu(device, "cuBLAS")
    torch_with_cudnn()
    fastest: CudnnPickThread | None = None
    for call in list_product_calls(w):
        candidate = CudnnPickThread(w, call, inputs, gpu, cold=cold, num_algorithms=None)
        if fastest is None or candidate.seconds < fastest.seconds:
            fastest, candidate = candidate, fastest or candidate
        if candidate is not fastest:
            candidate.close()
    assert fastest is not None
    return Baseline(
        fastest.time(seconds), None, fastest.pick.description, fastest.time_elsewhere, fastest.close, fastest.open_timer
    )


def list_product_calls(w: Workload) -> list[TorchConvCall]:
    """Return the calls that compute a convolution as one product; raise DeviceError for other workloads."""
    is_product = (
        isinstance(w, Conv)
        and DTYPES[w.dtype].has_8_bits
        and w.layout == CHANNELS_LAST
        and w.groups == math.prod((*w.kernel, *w.stride)) == 1
        and w.output_size == w.input_size
    )
    if not is_product or not isinstance(w, Conv):
        raise DeviceError("the cuBLAS baseline is for filters of one tap and operands of 8 bits in layout nhwc")
    if w.dtype == INT8.name:
        return [_make_call(w, "_int_mm", {})]
    return [_make_call(w, "_scaled_mm", {"use_fast_accum": fast}) for fast in (True, False)]


def _make_call(w: Conv, function: str, options: dict[str, bool]) -> TorchConvCall:
    """Return the call of one of PyTorch's functions."""
    import torch

    channels = w.C

    def prepare(x: Any, k: Any, *others: Any) -> Tensors:
        one = torch.ones((), device=x.device)
        scales = () if function == "_int_mm" else (one, one)
        return x.reshape(-1, channels), k.reshape(-1, channels).t(), *scales

    multiply = getattr(torch, function)
    if options:
        stored = w.argument_dtypes[-1]
        out_dtype = getattr(torch, stored if stored in FLOAT8_DTYPES else BFLOAT16.name)
        multiply = functools.partial(multiply, out_dtype=out_dtype, **options)
    notes = tuple(f"{name}={value}" for name, value in options.items())
    return TorchConvCall(multiply, prepare, (f"torch.{function}", *notes, "without the epilogue"), is_verified=False)
