"""`tanh`: the hyperbolic tangent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return 1 - 2 / (1 + exp(2 · value)), because `--use_fast_math` replaces `tanhf` by a coarse approximation."""
    from tvm import te, tirx

    one, two = (tirx.const(number, ACCUMULATOR) for number in (1.0, 2.0))
    return one - two / (one + te.exp(two * value))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return tanh(y) in float64."""
    return np.tanh(y)


register_op(EpilogueOp("tanh", compute, reference))
