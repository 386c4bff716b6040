"""Schedules of convolutions: the ladder, each a step up from the one before it, then those made to be tuned."""

from . import default, tiling, columns, vthread, conflict_free  # noqa: F401, I001  (in the ladder's order)
from . import tensor_core  # noqa: F401
from . import stem, depthwise_nhwc, grouped_nhwc  # noqa: F401  (first where they are for a workload)
from . import hopper, mma_sync  # noqa: F401
from . import direct, implicit_gemm, depthwise, winograd, winograd_fused  # noqa: F401
