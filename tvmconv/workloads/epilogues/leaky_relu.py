"""`leaky_relu`, `leaky_relu0.1`, `leaky_relu0.2`: the slope of negative values is 0.01, 0.1 or 0.2.

PyTorch's default slope is 0.01; early versions of YOLO use 0.1, and discriminators of GANs mostly 0.2.

Source: Maas, Hannun, Ng, "Rectifier Nonlinearities Improve Neural Network Acoustic Models", 2013.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

SLOPES = {"leaky_relu": 0.01, "leaky_relu0.1": 0.1, "leaky_relu0.2": 0.2}


def _compute(slope: float) -> Callable[[tirx.Expr], tirx.Expr]:
    def compute(value: tirx.Expr) -> tirx.Expr:
        from tvm import te, tirx

        return te.max(value, value * tirx.const(slope, ACCUMULATOR))

    return compute


def _reference(slope: float) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    return lambda y: np.maximum(y, slope * y)


for name, slope in SLOPES.items():
    register_op(EpilogueOp(name, _compute(slope), _reference(slope)))
