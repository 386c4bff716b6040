"""Where `mma_sync` applies the parts of an epilogue: to sums in registers, or to vectors of outputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tvmconv.workloads import Conv, epilogue

from ..implicit_gemm_shape import ACCUMULATOR_BYTES, ImplicitGemmShape
from .tile_config import MmaSyncTileConfig


def split_epilogue(
    w: Conv, starts_with_residual: bool, owns_whole_sum: bool
) -> tuple[list[epilogue.EpilogueOp], list[epilogue.EpilogueOp]]:
    """The operations of the epilogue that are applied in registers, to sums, and those applied to vectors of outputs.

    What the first ones add is added in any order. A residual is among them where sums begin with it. It comes in pairs
    of channels then, as registers hold the sums; and in vectors where it is added at the end.

    Args:
        w: the workload.
        starts_with_residual: whether sums begin with a residual.
        owns_whole_sum: whether the sums are the block's alone: only then may there be anything but adding.
    """
    ops = epilogue.get_ops(w.epilogue)
    additive_ops = list(itertools.takewhile(lambda op: op.is_addition, ops))
    accum_ops = [op for op in additive_ops if starts_with_residual or op.argument_kind == "channel"]
    vector_ops = [op for op in ops if op not in accum_ops]
    while owns_whole_sum and vector_ops and vector_ops[0].argument_kind != "output":
        accum_ops.append(vector_ops.pop(0))
    return accum_ops, vector_ops


def stores_raw_accumulators(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Whether the tile in shared memory is of sums: where others have a part in them, or more is read for outputs."""
    has_vector_ops_after_residual, has_vector_ops = (
        bool(split_epilogue(w, starts_with_residual, owns_whole_sum=True)[1]) for starts_with_residual in (True, False)
    )
    return np.where(np.asarray(tiles.residual) == "begin", has_vector_ops_after_residual, has_vector_ops) | np.asarray(
        tiles.uses_cluster_reduction
    )


def compute_staged_itemsize(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """Bytes of an element of the tile in shared memory."""
    return np.where(stores_raw_accumulators(w, tiles), ACCUMULATOR_BYTES, ImplicitGemmShape.from_workload(w).itemsize)


def count_channel_args(w: Conv, tiles: MmaSyncTileConfig) -> Any:
    """How many numbers each channel has in shared memory: of operations that are applied in registers."""

    def count_args(starts_with_residual: bool, owns_whole_sum: bool) -> int:
        return sum(
            operation.argument_kind == "channel"
            for operation in split_epilogue(w, starts_with_residual, owns_whole_sum)[0]
        )

    starts_with_residual = np.asarray(tiles.residual) == "begin"
    whole_sum_args = np.where(starts_with_residual, count_args(True, True), count_args(False, True))
    shared_sum_args = np.where(starts_with_residual, count_args(True, False), count_args(False, False))
    return np.where(
        tiles.uses_workspace_reduction, 0, np.where(tiles.uses_cluster_reduction, shared_sum_args, whole_sum_args)
    )
