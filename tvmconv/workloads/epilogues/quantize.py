"""`quantize`: y times one number, before an output of 8 bits; and `zero_point`: the integer that stands for zero in it.

The number is the reciprocal of the output's scale. The store rounds to nearest even and saturates, as
`tvmconv.workloads.quantization` describes. A zero point is added to the rounded number, as in ONNX and PyTorch; the
reference does not round.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tvmconv.workloads.epilogue import QUANTIZE, ZERO_POINT, EpilogueOp, register_op

if TYPE_CHECKING:
    from tvm import tirx

MAX_DRAWN_ZERO_POINT = 20


def draw(numbers: NDArray[np.float32], size: float, out_dtype: str) -> NDArray[np.float32]:
    """Return the number that leads values of a size to results of which the largest saturate."""
    from tvmconv.workloads.quantization import fit_result_size

    return np.full_like(numbers, fit_result_size(out_dtype) / size)


register_op(EpilogueOp(QUANTIZE, lambda value, factor: value * factor, operator.mul, "tensor", draw=draw))


def draw_zero_point(numbers: NDArray[np.float32], size: float, out_dtype: str) -> NDArray[np.float32]:
    """Return an integer."""
    return np.rint(MAX_DRAWN_ZERO_POINT * np.tanh(numbers)).astype(np.float32)


def add_zero_point(value: tirx.Expr, zero_point: tirx.Expr) -> tirx.Expr:
    """Return a value rounded to nearest even, plus a zero point."""
    from tvmconv.workloads.quantization import round_to_integer

    return round_to_integer(value).astype("float32") + zero_point


register_op(EpilogueOp(ZERO_POINT, add_zero_point, operator.add, "tensor", draw=draw_zero_point))
