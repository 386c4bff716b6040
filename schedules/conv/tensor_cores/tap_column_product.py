"""The product of a convolution with few filters whose columns are (tap, filter), and its filters in memory."""

from __future__ import annotations

import dataclasses
import functools
import math

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.workloads import Conv3d
from tvmconv.workloads.dtypes import get_itemsize

from ...tir_builder import Buffer, allocate, store, thread_per_item
from .gemm.tap_columns import WindowTiles
from .implicit_gemm_shape import ImplicitGemmShape, MatrixProduct

THREADS_PER_CTA = 256


@dataclasses.dataclass(frozen=True)
class TapColumnProduct(MatrixProduct):
    """The product of all windows, with the attributes of a convolution that kernels read."""

    tiles: WindowTiles  # the windows
    kernel: tuple[int, ...] = (1,)  # no taps share a copy
    stride: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    output_size: tuple[int, ...] = (1,)

    @property
    def w(self) -> Conv3d:
        """The convolution."""
        return self.tiles.w

    @property
    def dtype(self) -> str:
        """Dtype in which operands are multiplied."""
        return self.w.dtype

    @property
    def storage(self) -> str:
        """Storage dtype of the operands."""
        return self.w.storage

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Operations on each sum."""
        return self.w.epilogue

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the arguments."""
        return self.w.argument_dtypes

    @functools.cached_property
    def shape(self) -> ImplicitGemmShape:
        """The extents."""
        w, tiles = self.w, self.tiles
        return ImplicitGemmShape(
            *(tiles.count * tiles.rows, tiles.num_columns, w.T * w.C, w.C, 1, get_itemsize(w.storage)),
            *(w.min_bytes, w.spatial_ndim),
        )


def emit_tap_columns(w: Conv3d, num_columns: int, filters: Buffer) -> Buffer:
    """Emit the copy of a weight (O, T, R, S, C) to columns (R, S, O, zeros) × (T, C), and return it in a workspace."""
    taps = w.R * w.S
    columns = allocate("K_columns", num_columns * w.T * w.C, w.storage, "global")
    axes = [int(size) for size in filters.shape[1:-1]]
    with thread_per_item(num_columns * w.T * w.C, THREADS_PER_CTA) as item:
        channel, depth, column = item % w.C, item // w.C % w.T, item // (w.C * w.T)
        tap_idx = depth * taps + T.min(column // w.O, taps - 1)
        tap = [tap_idx // math.prod(axes[axis + 1 :]) % size for axis, size in enumerate(axes)]
        index = column % w.O, *tap, channel
        store(columns, item, T.if_then_else(column < taps * w.O, filters[index], T.Cast(w.storage, T.float32(0))))
    return columns
