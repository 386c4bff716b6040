"""Split of the epilogue of `mma_sync`: operations on accumulators in registers, and operations on output vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.workloads import Conv, epilogue

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .tile_config import MmaSyncTileConfig


def split_epilogue(
    w: Conv, starts_with_residual: bool, owns_whole_sum: bool
) -> tuple[list[epilogue.EpilogueOp], list[epilogue.EpilogueOp]]:
    """Return the epilogue operations that are applied to accumulators, and those that are applied to output vectors.

    Additions in the first list may be applied in any order. A residual is in the first list if it initializes the
    accumulators; it is then loaded in pairs of channels, as registers hold them. Otherwise it is loaded in vectors at
    the end.

    Args:
        w: The workload.
        starts_with_residual: Whether the residual initializes the accumulators.
        owns_whole_sum: Whether the block computes whole sums; only then may the first list contain more than additions.
    """
    ops = [op for op in epilogue.get_ops(w.epilogue) if op.name != epilogue.STATS]
    additive_ops = list(itertools.takewhile(lambda op: op.is_addition, ops))
    accum_ops = [op for op in additive_ops if starts_with_residual or op.argument_kind == "channel"]
    vector_ops = [op for op in ops if op not in accum_ops]
    while owns_whole_sum and vector_ops and vector_ops[0].argument_kind != "output":
        accum_ops.append(vector_ops.pop(0))
    return accum_ops, vector_ops


def stores_raw_accumulators(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Return whether the tile in shared memory holds raw accumulators.

    This is the case if other blocks add to them, or if the epilogue reads further arguments for output vectors.
    """
    has_vector_ops = _select_by_split(w, tiles, lambda accum_ops, vector_ops: bool(vector_ops))
    return has_vector_ops | np.asarray(tiles.uses_cluster_reduction)


def compute_staged_itemsize(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Return the bytes of an element of the tile in shared memory."""
    itemsize = ImplicitGemmShape.from_workload(w).output_itemsize
    return np.where(stores_raw_accumulators(w, tiles), ACCUMULATOR_BYTES, itemsize)


def count_channel_args(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Return the number of per-channel arguments in shared memory, which operations on accumulators read."""
    num_args = _select_by_split(w, tiles, lambda accum_ops, _: sum(op.argument_kind == "channel" for op in accum_ops))
    return np.where(tiles.uses_workspace_reduction, 0, num_args)


def compute_smem_bytes(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Return the dynamic shared memory per block in bytes."""
    gemm = ImplicitGemmShape.from_workload(w)
    return tiles.dynamic_smem_bytes(gemm, compute_staged_itemsize(w, tiles), count_channel_args(w, tiles))


def _select_by_split(w: Conv, tiles: MmaSyncTileConfig, compute: Callable[..., Any]) -> np.ndarray:
    """Return what a function computes from the two lists of operations of each config."""
    starts_with_residual = np.asarray(tiles.residual_add) == "accumulator_init"
    whole, part = (
        np.where(starts_with_residual, *(compute(*split_epilogue(w, starts, owns_sum)) for starts in (True, False)))
        for owns_sum in (True, False)
    )
    return np.where(tiles.uses_cluster_reduction, part, whole)
