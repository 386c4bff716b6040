"""`gelu_tanh`: the tanh approximation of GELU, PyTorch's `approximate="tanh"`.

Source: Hendrycks, Gimpel, "Gaussian Error Linear Units (GELUs)", 2016.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

SCALE, CUBE = math.sqrt(2 / math.pi), 0.044715


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value / (1 + exp(-2u)), as (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u))."""
    from tvm import te, tirx

    one, double, cube = (tirx.const(number, ACCUMULATOR) for number in (1.0, -2 * SCALE, CUBE))
    return value / (one + te.exp(double * (value + cube * value * value * value)))


def reference(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return y · (1 + tanh(√(2/π) · (y + 0.044715 · y³))) / 2 in float64."""
    return y * (1 + np.tanh(SCALE * (y + CUBE * y**3))) / 2


register_op(EpilogueOp("gelu_tanh", compute, reference))
