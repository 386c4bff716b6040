"""What `hopper` asks of a workload: what TMA can copy and store, and which taps can share a copy."""

from __future__ import annotations

from tvmconv import tensor_map as maps
from tvmconv.gpu import WARP
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.layout import CHANNELS_LAST

from ..product import CHUNK, Product

WARPGROUP = 4 * WARP  # threads that a wgmma is of
WGMMA_M = 64  # pixels of a wgmma
WGMMA_BYTES = 32  # of the reduction, of a wgmma


def can_be_copied(w: Conv) -> bool:
    """Whether TMA can copy the operands: rows of whole chunks, filters that its corners and offsets have room for."""
    p = Product.of(w)
    rank = w.rank + 2
    corner, offset = maps.CORNERS[rank], maps.OFFSETS[rank]
    lasts = [(o - 1) * s - b - (n - 1) for o, s, b, n in zip(w.out, w.stride, w.before, w.space, strict=True)]
    return (
        w.layout == CHANNELS_LAST
        and p.depth * p.itemsize % CHUNK == 0
        and (p.groups == 1 or p.depth * p.itemsize % WGMMA_BYTES == 0)
        and max(w.stride) <= maps.MAX_STEP
        and max(d * (r - 1) for d, r in zip(w.dilation, w.kernel, strict=True)) < offset
        and max(w.before) <= corner
        and all(-corner <= last < corner for last in lasts)
    )


def is_promising(w: Conv) -> bool:
    """Whether the channels of a group fill wgmmas to some extent."""
    p = Product.of(w)
    return can_be_copied(w) and p.depth * p.itemsize >= WGMMA_BYTES and p.n >= 16


def can_share_taps(w: Conv) -> bool:
    """Whether the taps of a line read neighbouring pixels, and the pixels of a wgmma lie in one line of the output."""
    lines = w.out[-1] % WGMMA_M == 0 and w.stride[-1] == 1
    return lines and w.kernel[-1] > 1 and WGMMA_M + reach(w) <= maps.MAX_BOX


def tap_choices(w: Conv) -> tuple[int, ...]:
    """How many taps of a line may share a copy of the pixels."""
    return (1, w.kernel[-1]) if can_share_taps(w) else (1,)


def reach(w: Conv) -> int:
    """Pixels by which the last tap of a filter's line is further on than the first."""
    return w.dilation[-1] * (w.kernel[-1] - 1)


def stores_by_tma(w: Conv) -> bool:
    """Whether the output's rows are whole chunks, for each group, and at most one tensor like it is read."""
    p = Product.of(w)
    reading = [operation for operation in epilogue.steps(w.epilogue) if operation.takes == "output"]
    return p.n * p.itemsize % CHUNK == 0 and len(reading) <= 1


def residual(w: Conv) -> str | None:
    """The operation that reads a tensor like the output; None if none does, or several do."""
    reading = [operation.name for operation in epilogue.steps(w.epilogue) if operation.takes == "output"]
    return reading[0] if len(reading) == 1 else None
