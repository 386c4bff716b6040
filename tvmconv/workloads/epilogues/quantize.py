"""`quantize`: y times one number, as the last operation before an output of 8 bits.

The number is the reciprocal of the output's scale. The store rounds to nearest even and saturates, as
`tvmconv.workloads.quantization` describes.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from tvmconv.workloads.epilogue import QUANTIZE, EpilogueOp, register_op


def draw(numbers: NDArray[np.float32], size: float, out_dtype: str) -> NDArray[np.float32]:
    """Return the number that leads values of a size to results of which the largest saturate."""
    from tvmconv.workloads.quantization import fit_result_size

    return np.full_like(numbers, fit_result_size(out_dtype) / size)


register_op(EpilogueOp(QUANTIZE, lambda value, factor: value * factor, operator.mul, "tensor", draw=draw))
