"""`hard_mish`: y / 2 · min(max(y + 2, 0), 2), a piecewise polynomial like Mish.

Source: timm, `HardMish` in timm/layers/activations.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx


def compute(value: tirx.Expr) -> tirx.Expr:
    """Return value / 2 · min(max(value + 2, 0), 2)."""
    from tvm import te, tirx

    zero, two = tirx.const(0.0, ACCUMULATOR), tirx.const(2.0, ACCUMULATOR)
    return value * tirx.const(0.5, ACCUMULATOR) * te.min(te.max(value + two, zero), two)


register_op(EpilogueOp("hard_mish", compute, lambda y: y / 2 * np.clip(y + 2, 0, 2)))
