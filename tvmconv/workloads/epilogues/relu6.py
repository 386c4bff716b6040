"""`relu6`: the limitation to 0 to 6.

Source: Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return min(max(value, 0), 6)."""
    from tvm import te, tirx

    zero, six = (tirx.const(bound, ACCUMULATOR) for bound in (0.0, 6.0))
    return te.min(te.max(value, zero), six)


register_op(EpilogueOp("relu6", compute, lambda y: np.clip(y, 0, 6)))
