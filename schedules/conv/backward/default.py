"""The naive baseline of gradients and transposed convolutions: a thread for each column of the result.

The operator is declared as a convolution, and this is the naive baseline of convolutions. The threads of a strided
dgrad test for each product whether the stride hits an element of dY. Those of a wgrad add up all pixels one by one.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import DerivedConv

from ..default import default as schedule_convolution
from ..gradient_operators import ALL
from ..reduction import FLOAT_DTYPES


@schedule(*ALL, dtypes=FLOAT_DTYPES, baseline=True)
def default(s: Schedule, w: DerivedConv, k: Knobs) -> None:
    """Bind rows of the result to blocks and columns to threads."""
    schedule_convolution(s, w.as_convolution, k)
