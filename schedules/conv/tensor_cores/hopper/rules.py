"""What tiles of `hopper` have to fulfil: what the instructions demand, and what a block has room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tvmconv.arithmetic import ceil_div
from tvmconv.gpu import MAX_REGISTERS, REGISTERS, WARP
from tvmconv.workloads import Conv

from ..product import Product
from .tiles import PANEL_BYTES, HopperTiles

MAX_ACCUMULATORS = 128  # of a thread
PARTITIONS = 4  # of a multiprocessor, each with a part of the registers, among which a block's warps are dealt out
SHARED_BYTES = 227 << 10  # of a block

Rule = tuple[str, Callable[[HopperTiles], Any]]


def legal(w: Conv) -> list[Rule]:
    """What the instructions demand."""
    p = Product.of(w)
    return [
        ("a thread has room for the sums of its wgmmas", lambda t: t.accumulators <= MAX_ACCUMULATORS),
        ("channels of a group fill the steps", lambda t: (p.groups == 1) | (p.depth % t.block_k(p.itemsize) == 0)),
        ("a split reduction shares no operands", lambda t: (t.split_k == 1) | (t.sharers == 1)),
        ("blocks share operands where TMA stores", lambda t: (t.sharers == 1) | ~t.meets(w)),
        (
            "taps share the pixels that one block fetches, in one panel",
            lambda t: (t.taps == 1) | ((t.sharers_n == 1) & (t.row_bytes <= PANEL_BYTES)),
        ),
        ("the parts of a shared operand are whole swizzles", lambda t: t.block_n // t.sharers_m % 8 == 0),
        (
            "each block of a split reduction has a step",
            lambda t: t.steps(p) * (t.split_k - 1) < t.all_steps(p),
        ),
    ]


def fitting(w: Conv) -> list[Rule]:
    """What a block has room for."""

    def registers(t: HopperTiles) -> Any:
        warps = ceil_div(t.all_threads(w), PARTITIONS * WARP)  # of a partition
        return t.registers() <= np.minimum(MAX_REGISTERS, REGISTERS // (PARTITIONS * WARP) // warps // 8 * 8)

    return [
        ("all threads' registers fit", registers),
        (f"at most {SHARED_BYTES} bytes of shared memory", lambda t: t.shared_bytes(w) <= SHARED_BYTES),
    ]
