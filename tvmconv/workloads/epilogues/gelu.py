"""`gelu`: y · Φ(y) with the normal distribution function Φ, computed by the error function instead of a tanh.

Source: Hendrycks, Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value · (1 + erf(value / √2)) / 2."""
    from tvm import te, tirx

    half, one, scale = (tirx.const(number, ACCUMULATOR) for number in (0.5, 1.0, math.sqrt(0.5)))
    return value * half * (one + te.erf(value * scale))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return y · Φ(y) in float64."""
    from scipy.special import ndtr

    return y * ndtr(y)


register_op(EpilogueOp("gelu", compute, reference))
