"""`silu`: y · sigmoid(y), also called swish.

Source: Elfwing, Uchibe, Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement
Learning", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value / (1 + exp(-value)); where exp overflows, the quotient is zero, which is correct."""
    from tvm import te, tirx

    one = tirx.const(1.0, ACCUMULATOR)
    return value / (one + te.exp(-value))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return y / (1 + exp(-y)) in float64."""
    with np.errstate(over="ignore"):
        return y / (1 + np.exp(-y))


register_op(EpilogueOp("silu", compute, reference))
