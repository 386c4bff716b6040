"""`hardtanh`: y limited to the interval from -1 to 1, as `torch.nn.Hardtanh` with its defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return min(max(value, -1), 1)."""
    from tvm import te, tirx

    return te.min(te.max(value, tirx.const(-1.0, ACCUMULATOR)), tirx.const(1.0, ACCUMULATOR))


register_op(EpilogueOp("hardtanh", compute, lambda y: np.clip(y, -1, 1)))
