"""`selu`: λ · y where y > 0, and λ · α · (exp(y) - 1) elsewhere.

Source: Klambauer, Unterthiner, Mayr, Hochreiter, "Self-Normalizing Neural Networks", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

SCALE, ALPHA = 1.0507009873554805, 1.6732632423543772  # λ and α of the paper


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return λ · (max(value, 0) + α · (exp(min(value, 0)) - 1))."""
    from tvm import te, tirx

    zero = tirx.const(0.0, ACCUMULATOR)
    negative = te.exp(te.min(value, zero)) - tirx.const(1.0, ACCUMULATOR)
    return tirx.const(SCALE, ACCUMULATOR) * te.max(value, zero) + tirx.const(SCALE * ALPHA, ACCUMULATOR) * negative


def compute_reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the function in float64."""
    return SCALE * (np.maximum(y, 0) + ALPHA * np.expm1(np.minimum(y, 0)))


register_op(EpilogueOp("selu", compute, compute_reference))
