"""The knobs of the tiled rungs: the chapter's factors where they fit the shape and shared memory, else near ones."""

import math
from collections.abc import Mapping

from tvmconv.knobs import Knobs, nearest_factors
from tvmconv.workloads import Conv2d

from .stages import tiled_channels

Factors = tuple[int, ...]
Tiles = tuple[Factors, ...]

# Static shared memory of a block, in bytes: CUDA C++ Programming Guide, "Technical Specifications", every architecture.
SHARED_BYTES = 48 << 10
WORD = 4  # bytes of a float32


def declare_tiles(
    w: Conv2d, k: Knobs, output: Mapping[str, Factors], reduction: Mapping[str, Factors]
) -> tuple[Tiles, Tiles]:
    """Ask for the tiles of the output (channel, height, width) and of the reduction (channel, filter height and width).

    Args:
        w: the workload.
        k: gets a knob `tile_AXIS` for each axis.
        output: the preferred factors of the axes c, h and w, but for the outermost.
        reduction: those of rc, rh and rw; they have to divide their axes.

    Returns:
        All factors of the output's three axes, and of the reduction's.
    """
    extents = {"c": tiled_channels(w), "h": w.P, "w": w.Q, "rc": w.C // w.groups, "rh": w.R, "rw": w.S}
    fitting = {axis: nearest_factors(extents[axis], factors) for axis, factors in output.items()}
    fitting |= {axis: nearest_factors(extents[axis], factors, exact=True) for axis, factors in reduction.items()}
    fitting = shrink_to_shared_memory(w, fitting)
    tiles = {
        axis: k.split(f"tile_{axis}", extents[axis], len(factors) + 1, (-1, *factors), exact=axis in reduction)
        for axis, factors in fitting.items()
    }
    return tuple(tiles[axis] for axis in output), tuple(tiles[axis] for axis in reduction)


def shrink_to_shared_memory(w: Conv2d, tiles: dict[str, Factors]) -> dict[str, Factors]:
    """Halve factors, each time the one that saves most, until what a block stages fits: strides make tiles wide."""
    while staged_bytes(w, tiles) > SHARED_BYTES and (smaller := _halvings(tiles)):
        tiles = min(smaller, key=lambda candidate: staged_bytes(w, candidate))
    return tiles


def staged_bytes(w: Conv2d, tiles: Mapping[str, Factors]) -> int:
    """Shared memory for what one step of the reduction needs of input and weight."""
    size = {axis: math.prod(factors) for axis, factors in tiles.items()}
    rows = (size["h"] - 1) * w.stride[0] + (size["rh"] - 1) * w.dilation[0] + 1
    columns = (size["w"] - 1) * w.stride[1] + (size["rw"] - 1) * w.dilation[1] + 1
    channels = size["c"] * size["rc"] if w.groups == w.O else size["rc"]  # each group has its own input channels
    weights = size["c"] * size["rc"] * size["rh"] * size["rw"]
    return WORD * (channels * rows * columns + weights)


def _halvings(tiles: Mapping[str, Factors]) -> list[dict[str, Factors]]:
    """The tiles with one factor halved, for each factor that is not 1; those of the reduction become 1, to divide."""
    return [
        {**tiles, axis: (*factors[:i], 1 if axis.startswith("r") else factor // 2, *factors[i + 1 :])}
        for axis, factors in tiles.items()
        for i, factor in enumerate(factors)
        if factor > 1
    ]
