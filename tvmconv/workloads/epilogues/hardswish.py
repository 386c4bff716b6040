"""`hardswish`: y · clip(y / 6 + 1/2, 0, 1).

Source: Howard et al., "Searching for MobileNetV3", 2019.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.epilogue import EpilogueOp, register_op
from tvmconv.workloads.epilogues import hardsigmoid

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value · hardsigmoid(value)."""
    return value * hardsigmoid.compute(value)


register_op(EpilogueOp("hardswish", compute, lambda y: y * np.clip(y / 6 + 0.5, 0, 1)))
