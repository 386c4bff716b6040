"""Rounding of tensors to the 8-bit types, as the kernels' stores do it, and scales of weights."""

from __future__ import annotations

import torch

from tvmconv.workloads.quantization import LIMITS

TORCH_DTYPES = {name: getattr(torch, name) for name in LIMITS}  # by the names of `LIMITS`
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def get_largest(dtype: torch.dtype) -> float:
    """Return the largest finite number of an 8-bit type."""
    return LIMITS[NAMES[dtype]][1]


def round_to_8_bits(values: torch.Tensor, dtype: torch.dtype, zero_point: int = 0) -> torch.Tensor:
    """Return float32 numbers in an 8-bit type: rounded to nearest even, plus a zero point of integers, and saturated.

    NaN stays NaN in 8-bit floats, and becomes the zero point in integers.
    """
    low, high = LIMITS[NAMES[dtype]]
    if dtype is torch.int8:
        values = values.round().nan_to_num(nan=0.0, posinf=2 * high, neginf=2 * low) + zero_point
    return values.clamp(low, high).to(dtype)


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight (O, C / groups, kernel) in an 8-bit type, and the scale of each output channel in float32.

    The largest element of a channel becomes the largest number of the type. A channel of zeros has the scale 1.
    """
    per_channel = weight.double().flatten(1)
    scale = per_channel.abs().amax(1) / get_largest(dtype)
    scale = torch.where(scale > 0, scale, 1.0).float()
    rounded = round_to_8_bits((per_channel / scale.double()[:, None]).float(), dtype)
    return rounded.view(weight.shape), scale
