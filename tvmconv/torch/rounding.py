"""TF32 of operands that nobody has rounded.

Tensor cores take the upper 19 bits of a float32 as they are: they truncate. A number loses half a unit in the tenth
place of its mantissa m then, which is 2^-11 / m of it, and 2^-11 / (2 ln 2) on average where mantissas lie as
Benford's law says, with density 1 / (m ln 2). Each layer would give a little less than it should, and a network
multiplies what its layers lose: of YOLOv8's backbone 16 percent are wrong then, where rounding to nearest makes 0.8.
What is left when the average is made good is an error as large as that of rounding. So the weights, which are rounded
to nearest when they are packed, are multiplied by what inputs will lose; that costs nothing.

Source of the law: Hamming, "On the Distribution of Numbers", Bell System Technical Journal 49, 1970.
"""

from __future__ import annotations

import math

import torch

from tvmconv.torch.operator import Launcher
from tvmconv.torch.signature import ConvSignature

MEAN_TRUNCATION_LOSS = 2.0**-11 / (2 * math.log(2))  # by truncation to 10 bits of mantissa, on average
NUM_DROPPED_BITS = 13  # bits


def round_to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to TF32, to nearest, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = bits + (1 << NUM_DROPPED_BITS - 1) - 1 + ((bits >> NUM_DROPPED_BITS) & 1)
    rounded = torch.where(tensor.isfinite(), rounded, bits)
    return (rounded & -(1 << NUM_DROPPED_BITS)).view(torch.float32)


def compensate_truncation(weight: torch.Tensor) -> torch.Tensor:
    """A weight in float64 as a kernel reads it that truncates its inputs: in float32, rounded to TF32."""
    return round_to_tf32((weight * (1 + MEAN_TRUNCATION_LOSS)).float())


def is_truncating(signature: ConvSignature, launcher_function: Launcher, torch_device: torch.device) -> bool:
    """Whether a kernel for TF32 truncates its inputs: schedules without tensor cores compute in float32.

    It is seen by one run, of an input just above a number of TF32, and a weight that is an identity.
    """
    representable, unrepresentable = 0.25, 0.25 * (1 + 2.0**-11 + 2.0**-12)  # which would be rounded up
    x = torch.full(signature.x_shape, unrepresentable, device=torch_device)
    centre = [size // 2 for size in signature.workload.kernel]
    weight = torch.zeros(signature.weight_shape, device=torch_device)
    weight[tuple([slice(None), 0, *centre])] = 1
    bias = torch.zeros(signature.workload.O, device=torch_device) if signature.takes_bias else None
    add = signature.allocate_output(torch_device).zero_() if signature.takes_add else None
    result = (
        launcher_function(signature.to_kernel_layout(x), signature.to_kernel_layout(weight), bias, add)
        .max()
        .double()
        .cpu()
    )
    distance_below, distance_above = (
        signature.apply_activations(torch.tensor(value, dtype=torch.float64))
        for value in (representable, unrepresentable)
    )
    return bool((result - distance_below).abs() < (result - distance_above).abs())
