"""`quick_gelu`: y / (1 + exp(-1.702 · y)), an approximation of GELU.

Source: Hendrycks, Gimpel, "Gaussian Error Linear Units (GELUs)", 2016; CLIP and models of timm use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

FACTOR = 1.702  # of the argument of the sigmoid


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value / (1 + exp(-1.702 · value)); where exp overflows, the quotient is zero, which is correct."""
    from tvm import te, tirx

    return value / (tirx.const(1.0, ACCUMULATOR) + te.exp(tirx.const(-FACTOR, ACCUMULATOR) * value))


def compute_reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the function in float64."""
    with np.errstate(over="ignore"):
        return y / (1 + np.exp(-FACTOR * y))


register_op(EpilogueOp("quick_gelu", compute, compute_reference))
