"""`clamp`: the limitation to 0 to 1, the range of an image's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return min(max(value, 0), 1)."""
    from tvm import te, tirx

    zero, one = (tirx.const(bound, ACCUMULATOR) for bound in (0.0, 1.0))
    return te.min(te.max(value, zero), one)


register_op(EpilogueOp("clamp", compute, lambda y: np.clip(y, 0, 1)))
