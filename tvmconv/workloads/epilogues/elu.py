"""`elu`: y for positive y and exp(y) - 1 otherwise.

Source: Clevert, Unterthiner, Hochreiter, "Fast and Accurate Deep Network Learning by Exponential Linear Units", 2016.
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
    """Return max(value, 0) + exp(min(value, 0)) - 1."""
    from tvm import te, tirx

    zero, one = (tirx.const(number, ACCUMULATOR) for number in (0.0, 1.0))
    return te.max(value, zero) + te.exp(te.min(value, zero)) - one


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the exponential linear unit in float64."""
    return np.maximum(y, 0) + np.expm1(np.minimum(y, 0))


register_op(EpilogueOp("elu", compute, reference))
