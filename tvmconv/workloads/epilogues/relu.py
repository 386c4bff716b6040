"""`relu`: max(y, 0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return max(value, 0)."""
    from tvm import te, tirx

    return te.max(value, tirx.const(0.0, ACCUMULATOR))


register_op(EpilogueOp("relu", compute, lambda y: np.maximum(y, 0)))
