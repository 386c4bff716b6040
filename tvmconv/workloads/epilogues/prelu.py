"""`prelu`: y where y > 0, and slope · y elsewhere, with one slope per output channel.

It also computes leaky ReLUs of any slope. Source: He, Zhang, Ren, Sun, "Delving Deep into Rectifiers", 2015.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr, slope: tirx.Expr) -> tirx.Expr:
    """Return the value if it is positive, and slope · value otherwise."""
    from tvm import tirx

    return tirx.Select(value > tirx.const(0.0, ACCUMULATOR), value, value * slope)


register_op(EpilogueOp("prelu", compute, lambda y, slope: np.where(y > 0, y, slope * y), "channel"))
