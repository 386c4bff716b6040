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

from tvmconv.torch.form import Form
from tvmconv.torch.operator import Launcher

LOSS = 2.0**-11 / (2 * math.log(2))  # by truncation to 10 bits of mantissa, on average
DROPPED = 13  # bits


def to_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """A float32 tensor rounded to TF32, to nearest, ties to even."""
    bits = tensor.contiguous().view(torch.int32)
    rounded = bits + (1 << DROPPED - 1) - 1 + ((bits >> DROPPED) & 1)
    rounded = torch.where(tensor.isfinite(), rounded, bits)
    return (rounded & -(1 << DROPPED)).view(torch.float32)


def for_truncated_inputs(weight: torch.Tensor) -> torch.Tensor:
    """A weight in float64 as a kernel reads it that truncates its inputs: in float32, rounded to TF32."""
    return to_tf32((weight * (1 + LOSS)).float())


def truncates(form: Form, launch: Launcher, place: torch.device) -> bool:
    """Whether a kernel for TF32 truncates its inputs: schedules without tensor cores compute in float32.

    It is seen by one run, of an input just above a number of TF32, and a weight that is an identity.
    """
    below, between = 0.25, 0.25 * (1 + 2.0**-11 + 2.0**-12)  # which would be rounded up
    x = torch.full(form.x_shape, between, device=place)
    centre = [size // 2 for size in form.workload.kernel]
    weight = torch.zeros(form.weight_shape, device=place)
    weight[tuple([slice(None), 0, *centre])] = 1
    bias = torch.zeros(form.workload.O, device=place) if form.takes_bias else None
    add = form.output(place).zero_() if form.takes_add else None
    got = launch(form.laid(x), form.laid(weight), bias, add).max().double().cpu()
    low, high = (form.activated(torch.tensor(value, dtype=torch.float64)) for value in (below, between))
    return bool((got - low).abs() < (got - high).abs())
