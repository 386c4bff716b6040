"""Winograd's algorithm on Hopper's tensor cores: transforms around the product that `hopper` computes.

Where the tensor cores are what a convolution waits for, fewer products are faster: tiles of 2 × 2 outputs of a 3×3
filter take 16 in place of 36. With the tiles of the whole batch as pixels, and each of their places as a group of
channels, the products are a convolution of 1×1 in groups, which `hopper` computes as any other. Four kernels:

1. the filters' transform, which a caller whose weights stay the same does once;
2. the inputs' transform: a thread has a tile and some neighbouring channels, and reads and stores vectors of these;
3. the product, in the dtype of the workload, by `hopper`, whose knobs it has;
4. the outputs' transform, with the epilogue.

Sums are in float32, transforms too; what passes from kernel to kernel is rounded to the dtype. That costs digits: the
error is three times that of a direct sum with m = 2 (`choice.expected_error`). Where weights are much and pixels are
few it moves more than it saves: U has (m + 2)² / 9 times the filters' bytes.

Source: Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2015 (arXiv:1509.09308).
"""

from __future__ import annotations

from tvm.s_tir import Schedule

from tvmconv.knobs import Knobs
from tvmconv.library import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, DILATION_1, ONE_GROUP, STRIDE_1, all_of
from tvmconv.workloads import Conv2d

from ....program import Buffer, allocate, write
from ....vocabulary import keep, own_places
from ...tensor_cores.hopper.pipeline import Pipeline
from ..plan import Grid
from .choice import DTYPES, applies, ask, is_promising, matrices, product, usage
from .transforms import transform_filters, transform_inputs, transform_outputs


@schedule(
    "conv2d",
    dtypes=DTYPES,
    usage=usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, ONE_GROUP, STRIDE_1, DILATION_1, applies),
    promising=is_promising,
    kinds=("cuda",),
    only=90,
)
def winograd_hopper(s: Schedule, w: Conv2d, k: Knobs) -> Schedule:
    """`tile_m` outputs along each axis of a tile, `vector` channels of a transform's thread, and `hopper`'s knobs."""
    m, vector, tiles = ask(k, w)
    grid, own, of_product = Grid.of(w, m), matrices(m, w.R), product(w, m)

    def body(arguments: dict[str, Buffer]) -> None:
        U, V, M = (
            allocate(name, extent, w.storage, "global")
            for name, extent in (
                ("U", of_product.O * w.C),
                ("V", of_product.C * grid.count),
                ("M", of_product.O * grid.count),
            )
        )
        transform_filters(w, grid, own.G, arguments["K"], U)
        transform_inputs(w, grid, own.B, vector, arguments["X"], V)
        Pipeline(of_product, tiles, {"X": V, "K": U, "Y": M}).write()
        transform_outputs(w, grid, own.A, vector, arguments, M)

    written = write(w, body)
    keep(written, "K")
    own_places(written)
    return written
