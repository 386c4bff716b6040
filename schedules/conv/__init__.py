"""Convolution schedules: a series in which each schedule adds one optimization, then schedules made for tuning."""

from . import default, tiling, columns, vthread, conflict_free  # noqa: F401, I001  (in the order of the optimizations)
from .backward import default as gradient_default, tiling as gradient_tiling  # noqa: F401
from .tensor_cores import tensor_core, stem  # noqa: F401
from .tensor_cores.depthwise import diagonal_dgrad, diagonal_fprop  # noqa: F401  (before slower depthwise schedules)
from . import nhwc_direct, nchw_direct  # noqa: F401  (searched first where they apply, as `stem` is)
from .tensor_cores import hopper  # noqa: F401
from .tensor_cores.grouped import fprop as grouped_mma_sync  # noqa: F401  (before `mma_sync`, which is slower there)
from .tensor_cores import mma_sync  # noqa: F401
from .tensor_cores import upsample  # noqa: F401
from .tensor_cores.hopper import filter_rows, halo_pixels, tap_columns, windows  # noqa: F401
from .tensor_cores.grouped import dgrad as grouped_dgrad_mma_sync, wgrad as grouped_wgrad_mma_sync  # noqa: F401
from .tensor_cores.depthwise import (  # noqa: F401
    dgrad as depthwise_dgrad_mma_sync,
    fprop as depthwise_mma_sync,
    wgrad as depthwise_diagonal,
)
from .tensor_cores.pointwise import dgrad as pointwise_mma_sync  # noqa: F401
from .tensor_cores.pointwise import fprop as pointwise_forward  # noqa: F401
from .tensor_cores.mma_sync import dgrad as mma_sync_dgrad, halo_wgrad, wgrad as mma_sync_wgrad  # noqa: F401
from .nhwc_direct import depthwise_dgrad, depthwise_wgrad, grouped_dgrad, grouped_wgrad  # noqa: F401
from .nhwc_direct import depthwise_tma_dgrad, depthwise_tma_wgrad, depthwise_wgrad_cluster, pixel_dots  # noqa: F401
from .backward import depthwise as depthwise_gradient, depthwise_wgrad as depthwise_gradient_of_weights  # noqa: F401
from . import direct, implicit_gemm, depthwise, winograd  # noqa: F401
from . import simt  # noqa: F401
from .backward import implicit_gemm as gradient_implicit_gemm  # noqa: F401
from .backward import winograd as gradient_winograd, winograd_wgrad  # noqa: F401
