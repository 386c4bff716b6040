"""Winograd's algorithm on Hopper's tensor cores: transforms around the product that `hopper` computes.

Where the tensor cores are what a convolution waits for, fewer products are faster: tiles of 2 × 2 outputs of a 3×3
filter take 16 in place of 36. With the tiles of the whole batch as pixels, and each of their places as a group of
channels, the products are a convolution of 1×1 in groups, which `hopper` computes as any other. Four kernels:

1. the filters' transform, which a caller whose weights stay the same does once;
2. the inputs' transform: a thread has a tile and some neighbouring channels, and reads and stores vectors of these;
3. the product, in the dtype of the workload, by `hopper`, whose knobs it has;
4. the outputs' transform, with the epilogue.

Sums are in float32, transforms too; what passes from kernel to kernel is rounded to the dtype. That costs digits: the
error is three times that of a direct sum with m = 2 (`choice.estimate_relative_error`). Where weights are much and
pixels are few it moves more than it saves: U has (m + 2)² / 9 times the filters' bytes.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308).
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.space import Knobs
from tvmconv.workloads import Conv2d

from ....primitives import disable_buffer_reuse, mark_constant_args
from ....tir_builder import Buffer, allocate, build_schedule
from ...tensor_cores.hopper.kernel import HopperKernel
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


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=compute_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, ONE_GROUP, STRIDE_1, DILATION_1, is_supported),
    search_if=is_promising,
    device_kinds=("cuda",),
    exact_arch=90,
)
def winograd_hopper(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """`tile_m` outputs along each axis of a tile, `vector` channels of a transform's thread, and `hopper`'s knobs."""
    m, vector, config = declare_knobs(k, w)
    grid, matrices, product_workload = (
        WinogradTileGrid.from_workload(w, m),
        get_winograd_matrices(m, w.R),
        make_product_workload(w, m),
    )

    def emit_kernels(arguments: dict[str, Buffer]) -> None:
        U, V, M = (
            allocate(name, extent, w.storage, "global")
            for name, extent in (
                ("U", product_workload.O * w.C),
                ("V", product_workload.C * grid.count),
                ("M", product_workload.O * grid.count),
            )
        )
        transform_filters(w, grid, matrices.G, arguments["K"], U)
        transform_inputs(w, grid, matrices.B, vector, arguments["X"], V)
        HopperKernel(product_workload, config, {"X": V, "K": U, "Y": M}).emit()
        transform_outputs(w, grid, matrices.A, vector, arguments, M)

    new_schedule = build_schedule(w, emit_kernels)
    mark_constant_args(new_schedule, "K")
    disable_buffer_reuse(new_schedule)
    return new_schedule
