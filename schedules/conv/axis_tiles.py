"""Knobs of the tiled schedules: d2l-tvm's factors if they fit the shape and shared memory, otherwise near ones."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from tvmconv.space import Knobs, Tile, find_nearest_factors
from tvmconv.target import STATIC_SHARED_BYTES
from tvmconv.workloads import Conv2d
from tvmconv.workloads.dtypes import get_itemsize

from .reduction import get_tiled_channels

Factors = dict[str, int]  # inner factors of an axis by level


class AxisTiles(NamedTuple):
    """Tiles of a schedule."""

    output: tuple[Tile, ...]  # tiles of channels, rows and columns
    reduction: tuple[Tile, ...]  # tiles of input channels, and of rows and columns of the filter


def declare_tile_knobs(
    k: Knobs,
    w: Conv2d,
    output_factors: Mapping[str, Factors],
    reduction_factors: Mapping[str, Factors],
    channels_per_word: int = 1,
) -> AxisTiles:
    """Declare the tiles of the output and of the reduction as knobs, and return them.

    The factors are the preferred ones by level, without the outermost `block` or `step`; those of the reduction divide
    their axes. The axis of input channels has words of `channels_per_word`.
    """
    extents, factors = (
        list_extents(w, channels_per_word),
        fit_default_factors(
            w,
            {axis: tuple(own.values()) for axis, own in {**output_factors, **reduction_factors}.items()},
            channels_per_word,
        ),
    )

    def declare_tile(axis: str, outermost: str, levels: Factors) -> Tile:
        default = dict(zip(levels, factors[axis], strict=True))
        return k.tile(f"tile_{axis}", extents[axis], (outermost, *levels), default, exact=axis in reduction_factors)

    return AxisTiles(
        tuple(declare_tile(axis, "block", levels) for axis, levels in output_factors.items()),
        tuple(declare_tile(axis, "step", levels) for axis, levels in reduction_factors.items()),
    )


def list_extents(w: Conv2d, channels_per_word: int = 1) -> dict[str, int]:
    """Return the extents of channels, rows and columns, and of the reduction: input channels, filter rows, columns."""
    words = w.C // w.groups // channels_per_word
    return {"c": get_tiled_channels(w), "h": w.P, "w": w.Q, "rc": words, "rh": w.R, "rw": w.S}


def fit_default_factors(
    w: Conv2d, preferred: Mapping[str, tuple[int, ...]], channels_per_word: int = 1
) -> dict[str, tuple[int, ...]]:
    """Return the factors nearest to the preferred ones that fit the axes and shared memory.

    Strides and dilations can make the preferred tiles too wide. Factors are then halved until a block's operands fit,
    each time the factor that saves most.
    """
    extents, max_bytes = list_extents(w, channels_per_word), STATIC_SHARED_BYTES // channels_per_word
    factors = {
        axis: find_nearest_factors(extents[axis], own, exact_divisors=axis.startswith("r"))
        for axis, own in preferred.items()
    }
    while compute_staged_bytes(w, factors) > max_bytes and (halved_factors := _list_halved_tiles(factors)):
        factors = min(halved_factors, key=lambda candidate: compute_staged_bytes(w, candidate))
    return factors


def compute_staged_bytes(w: Conv2d, tile_factors: Mapping[str, tuple[int, ...]]) -> int:
    """Return the shared memory in bytes for one k-tile of input and weight."""
    tile_sizes = {axis: math.prod(factors) for axis, factors in tile_factors.items()}
    rows = (tile_sizes["h"] - 1) * w.stride[0] + (tile_sizes["rh"] - 1) * w.dilation[0] + 1
    columns = (tile_sizes["w"] - 1) * w.stride[1] + (tile_sizes["rw"] - 1) * w.dilation[1] + 1
    # Each group has its own input channels.
    channels = tile_sizes["c"] * tile_sizes["rc"] if w.groups == w.O else tile_sizes["rc"]
    weights = tile_sizes["c"] * tile_sizes["rc"] * tile_sizes["rh"] * tile_sizes["rw"]
    return get_itemsize(w.storage) * (channels * rows * columns + weights)


def _list_halved_tiles(factors_by_axis: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Return the tiles with one factor above 1 halved; a reduction factor becomes 1, so that it divides its axis."""
    return [
        {**factors_by_axis, axis: (*factors[:i], 1 if axis.startswith("r") else factor // 2, *factors[i + 1 :])}
        for axis, factors in factors_by_axis.items()
        for i, factor in enumerate(factors)
        if factor > 1
    ]
