"""`mish`: y · tanh(softplus(y)).

Source: Misra, "Mish: A Self Regularized Non-Monotonic Activation Function", 2020.
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
    """Return value · w / (w + 2) with w = n · (n + 2) and n = exp(min(value, 20)).

    The quotient w / (w + 2) is tanh(softplus(value)); from 20 on it is 1 in float32.
    """
    from tvm import te, tirx

    two, max_exponent = (tirx.const(number, ACCUMULATOR) for number in (2.0, 20.0))
    n = te.exp(te.min(value, max_exponent))
    w = n * (n + two)
    return value * (w / (w + two))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return y · tanh(softplus(y)) in float64."""
    return y * np.tanh(np.logaddexp(0, y))


register_op(EpilogueOp("mish", compute, reference))
