"""Winograd's algorithm on Hopper's tensor cores: transforms around the product that `hopper` computes.

If tensor cores are the bottleneck of a convolution, fewer products make it faster: tiles of 2 × 2 outputs of a 3×3
filter need 16 products instead of 36. With the tiles of the whole batch as pixels and each of their points as a group,
the products are a grouped 1×1 convolution, which `hopper` computes. There are four kernels:

1. The filter transform runs once if the weights do not change between calls. 2. In the input transform, a thread reads
and stores vectors of neighbouring channels of a tile. 3. `hopper` computes the product in the dtype of the workload;
its knobs are knobs of this schedule. 4. The output transform applies the epilogue.

Sums and transforms are in float32; data that pass between kernels are rounded to the dtype. This reduces accuracy: with
m = 2 the error is three times that of a direct sum (`knobs.estimate_relative_error`). For many weights and few pixels,
the schedule moves more than it saves, as U has (m + 2)² / 9 times the filters' bytes.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308).
"""

from __future__ import annotations

import math

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.layout import CHANNELS_FIRST

from ....primitives import disable_buffer_reuse, mark_constant_args
from ....tir_builder import Buffer, allocate
from ...layout_conversion import build_channels_last_schedule, estimate_input_conversion_us, estimate_transpose_us
from ...tensor_cores.hopper.kernel import emit_kernel
from ..knobs import WinogradTileGrid
from .knobs import (
    DTYPES,
    compute_usage,
    declare_knobs,
    get_winograd_matrices,
    is_promising,
    is_supported,
    make_product_workload,
)
from .transform_kernels import transform_filters, transform_inputs, transform_outputs


def compute_layout_usage(w: Conv2d, columns: Columns) -> ResourceUsage:
    """Return the resources that the product uses, and the time of the conversions of X and Y."""
    usage, conversion_us = compute_usage(w.to_channels_last(), columns), estimate_input_conversion_us(w)
    if w.output_layout == CHANNELS_FIRST:
        conversion_us += estimate_transpose_us(math.prod(w.output_shape) * get_itemsize(w.storage))
    assert usage.estimate is not None
    layout_us = np.full_like(usage.estimate, conversion_us, dtype=float)
    usage.estimate, usage.layout_seconds = usage.estimate + layout_us, layout_us * 1e-6
    return usage


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=compute_layout_usage,
    condition=all_of(ONE_GROUP, STRIDE_1, DILATION_1, lambda w: is_supported(w.to_channels_last())),
    search_if=lambda w: is_promising(w.to_channels_last()),
    device_kinds=("cuda",),
    exact_arch=90,
)
def winograd_hopper(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """Compute `output_tile`² outputs per tile, `vector` channels per transform thread, with `hopper`'s knobs."""
    viewed_workload = w.to_channels_last()
    m, vector, config = declare_knobs(k, viewed_workload)
    grid, matrices = WinogradTileGrid.from_workload(viewed_workload, m), get_winograd_matrices(m, w.R)
    product_workload = make_product_workload(viewed_workload, m)

    def emit_kernels(arguments: dict[str, Buffer]) -> None:
        U, V, M = (
            allocate(name, extent, w.storage, "global")
            for name, extent in (
                ("U", product_workload.O * w.C),
                ("V", product_workload.C * grid.count),
                ("M", product_workload.O * grid.count),
            )
        )
        transform_filters(viewed_workload, grid, matrices.G, arguments["K"], U)
        transform_inputs(viewed_workload, grid, matrices.B, vector, arguments["X"], V)
        emit_kernel(product_workload, config, {"X": V, "K": U, "Y": M})
        transform_outputs(viewed_workload, grid, matrices.A, vector, arguments, M)

    new_schedule = build_channels_last_schedule(w, emit_kernels)
    mark_constant_args(new_schedule, "K")
    disable_buffer_reuse(new_schedule)
    return new_schedule
