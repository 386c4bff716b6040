"""`softplus`: log(1 + exp(y)).

Source: Dugas, Bengio et al., "Incorporating Second-Order Functional Knowledge for Better Option Pricing", 2001.
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
    """Return max(value, 0) + log(1 + exp(-|value|)), which does not overflow."""
    from tvm import te, tirx

    zero, one = (tirx.const(number, ACCUMULATOR) for number in (0.0, 1.0))
    return te.max(value, zero) + te.log(one + te.exp(te.min(value, -value)))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log(1 + exp(y)) in float64."""
    return np.logaddexp(0, y)


register_op(EpilogueOp("softplus", compute, reference))
