"""Gradients as matrix products: the tiles of `implicit_gemm` on the convolution as which an operator is declared.

| operator | rows | columns | reduction |
| --- | --- | --- | --- |
| dgrad, transposed | channels of dX | pixels of dX | channels of dY × taps |
| wgrad | channels of dY | channels of X × taps | images × pixels of dY |

The copies to shared memory insert the zeros of the border and of a stride, so products need no tests. It runs on every
device. The knobs are those of `implicit_gemm` of convolutions; `split_k` splits the reduction of a wgrad by images.
"""

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads.conv_gradient import DerivedConv

from .. import implicit_gemm as convolution
from ..gradient_operators import ALL
from ..reduction import FLOAT_DTYPES


@schedule(
    *ALL,
    dtypes=FLOAT_DTYPES,
    usage=lambda w, columns: convolution.compute_usage(w.as_convolution, columns),
    search_if=lambda w: True,
)
def implicit_gemm(s: Schedule, w: DerivedConv, k: Knobs) -> Schedule:
    """Tile rows and columns as (block, virtual thread, thread, local) and reductions as (step, tap)."""
    return convolution.implicit_gemm(s, w.as_convolution, k)
