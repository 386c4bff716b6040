"""Where `mma_sync` applies the parts of an epilogue: to sums in registers, or to vectors of outputs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from tvmconv.workloads import Conv, epilogue

from ..product import SUM_BYTES, Product
from .tiles import WarpTiles


def parts(w: Conv, begins: bool, whole: bool) -> tuple[list[epilogue.Operation], list[epilogue.Operation]]:
    """The operations of the epilogue that are applied in registers, to sums, and those applied to vectors of outputs.

    What the first ones add is added in any order. A residual is among them where sums begin with it. It comes in pairs
    of channels then, as registers hold the sums; and in vectors where it is added at the end.

    Args:
        w: the workload.
        begins: whether sums begin with a residual.
        whole: whether the sums are the block's alone: only then may there be anything but adding.
    """
    operations = epilogue.steps(w.epilogue)
    adding = list(itertools.takewhile(lambda operation: operation.adds, operations))
    early = [operation for operation in adding if begins or operation.takes == "channel"]
    late = [operation for operation in operations if operation not in early]
    while whole and late and late[0].takes != "output":
        early.append(late.pop(0))
    return early, late


def is_unfinished(w: Conv, tiles: WarpTiles) -> Any:
    """Whether the tile in shared memory is of sums: where others have a part in them, or more is read for outputs."""
    late_begun, late = (bool(parts(w, begins, whole=True)[1]) for begins in (True, False))
    return np.where(np.asarray(tiles.residual) == "begin", late_begun, late) | np.asarray(tiles.in_cluster)


def staged_itemsize(w: Conv, tiles: WarpTiles) -> Any:
    """Bytes of an element of the tile in shared memory."""
    return np.where(is_unfinished(w, tiles), SUM_BYTES, Product.of(w).itemsize)


def of_channels(w: Conv, tiles: WarpTiles) -> Any:
    """How many numbers each channel has in shared memory: of operations that are applied in registers."""

    def count(begins: bool, whole: bool) -> int:
        return sum(operation.takes == "channel" for operation in parts(w, begins, whole)[0])

    begins = np.asarray(tiles.residual) == "begin"
    whole = np.where(begins, count(True, True), count(False, True))
    shared = np.where(begins, count(True, False), count(False, False))
    return np.where(tiles.in_scratch, 0, np.where(tiles.in_cluster, shared, whole))
