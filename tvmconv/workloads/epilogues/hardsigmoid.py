"""`hardsigmoid`: clip(y / 6 + 1/2, 0, 1).

Source: Howard et al., "Searching for MobileNetV3", 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return min(max(value / 6 + 1/2, 0), 1)."""
    from tvm import te, tirx

    zero, half, one, sixth = (tirx.const(number, ACCUMULATOR) for number in (0.0, 0.5, 1.0, 1 / 6))
    return te.min(te.max(value * sixth + half, zero), one)


register_op(EpilogueOp("hardsigmoid", compute, lambda y: np.clip(y / 6 + 0.5, 0, 1)))
