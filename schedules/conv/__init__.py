"""Schedules of convolutions: the ladder, each a step up from the one before it, then those made to be tuned."""

from . import default, tiling, columns, vthread, conflict_free  # noqa: F401, I001  (in the ladder's order)
from .tensor_cores import tensor_core, stem  # noqa: F401
from . import nhwc_direct  # noqa: F401  (first, as stem is, where it is for a workload)
from .tensor_cores import hopper, mma_sync  # noqa: F401
from . import direct, implicit_gemm, depthwise, winograd  # noqa: F401
