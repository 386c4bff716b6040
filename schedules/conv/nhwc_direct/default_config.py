"""Default configs of the NHWC direct schedules: those with the lowest estimated latency.

Small images have few thread tiles: threads then need fewer channels and pixels until there are enough of them for a
large GPU; large images need the opposite. An estimate in clock cycles weighs the two. It counts instructions, loads and
bytes, but not how they overlap; a search improves on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import H200, LINE_BYTES, MAX_THREADS_Z, SCHEDULERS, SECTOR_BYTES, STATIC_SHARED_BYTES, WARP_SIZE
from tvmconv.workloads import Conv

from ..axis_tiles import get_element_bytes
from ..direct_config import select_max_overhang
from ..plane_shape import PlaneShape
from .thread_tile import LEVELS, ThreadTile, compute_window_extent, list_threads_c_choices

# Parameters of the estimate that were fitted on an H200.
L2_BYTES_PER_CYCLE = 24  # between one SM and the L2 cache
L1_LINES_PER_CYCLE = 2  # approximate lookups of the L1 cache per warp
OVERHEAD_INSTRUCTIONS = 60  # instructions per thread before its first load and after its last store
WORD_BYTES = 4

LOCAL_CHOICES = (1, 2, 4, 7, 8)  # rows or columns per thread
SPATIAL_THREADS_CHOICES = (1, 2, 3, 4, 7, 8, 14, 16, 28, 32)  # threads per block along rows or columns
MAX_DEFAULT_THREADS = 256  # per block
MAX_ACCUMULATORS = 64
MAX_PRODUCTS = 2048  # unrolled products per thread, for which NVRTC takes two seconds
MAX_LIVE_REGISTERS = 176  # estimated registers per thread for accumulators, windows and weights
MIN_THREADS = 32
MAX_OVERHANG_RATIO = 1.25  # maximum ratio of the channels that threads cover to the channels that exist


class DefaultCandidates(NamedTuple):
    """Candidate configs that share some knobs and differ in the thread tile, as columns.

    Attributes:
        knobs: Shared knobs besides the thread tile.
        is_allowed: Which candidates meet the limits.
        estimated_cycles: Latency estimate of each candidate.
    """

    knobs: dict[str, Any]
    is_allowed: np.ndarray
    estimated_cycles: np.ndarray


def compute_halo_ratio(w: Conv, thread_tile: ThreadTile) -> Any:
    """Return the ratio of the inputs that a block reads to those that it would read without overlapping windows."""
    read_ratios = (
        ((tile.size - 1) * stride + taps) / (tile.size * stride)
        for tile, stride, taps in zip(
            (thread_tile.rows, thread_tile.columns),
            PlaneShape.from_workload(w).strides[1:],
            compute_window_extent(w)[1:],
            strict=True,
        )
    )
    return math.prod(read_ratios)


def compute_config_usage(w: Conv, config: Any) -> ResourceUsage:
    """Return the resources that configs use; instructions are estimated numbers per output."""
    thread_tile = config.thread_tile
    num_blocks = thread_tile.count_blocks(w)
    return ResourceUsage(
        threads=thread_tile.num_threads,
        shared_bytes=np.where(config.weight_scope == "shared", config.shared_bytes(w), 0),
        accumulators=thread_tile.num_accumulators,
        blocks=num_blocks,
        all_threads=num_blocks * thread_tile.num_threads,
        live_registers=config.estimate_live_registers(w),
        issued_instructions=config.estimate_issued_instructions(w) / thread_tile.num_accumulators,
        halo_read_ratio=compute_halo_ratio(w, thread_tile),
        estimate=config.estimate_cycles(w),
    )


def estimate_cycles(
    w: Conv,
    thread_tile: ThreadTile,
    *,
    issued_instructions: Any,
    input_vectors: Any,
    shared_vectors: Any,
    scattered_vectors: Any,
    filter_bytes: Any,
) -> Any:
    """Return the estimated latency in clock cycles of the SM with the most blocks.

    An SM issues instructions (each warp needs a minimum time for its own), reads through the L1 cache and shared
    memory, and transfers the tiles of its blocks. The estimate is the longest of these times, plus a fraction of the
    others.

    Args:
        w: The workload.
        thread_tile: The thread tile.
        issued_instructions: Instructions per thread.
        input_vectors: Input vectors that a thread reads.
        shared_vectors: Vectors that a thread reads from shared memory.
        scattered_vectors: Vectors that a thread reads at addresses far from those of its neighbours along the channels.
        filter_bytes: Bytes of the filters that a block reads.
    """
    itemsize, plane_shape = get_element_bytes(w), PlaneShape.from_workload(w)
    strides, planes = plane_shape.strides, plane_shape.kernel_size[0]
    blocks_per_sm = ceil_div(thread_tile.count_blocks(w), H200.multiprocessors)
    warps = ceil_div(thread_tile.num_threads, WARP_SIZE) * blocks_per_sm
    issue_cycles = (issued_instructions + OVERHEAD_INSTRUCTIONS) * (np.maximum(1, warps / SCHEDULERS) + 0.5)
    lanes = np.minimum(WARP_SIZE, thread_tile.channels.thread)
    wavefronts = np.maximum(1, thread_tile.vector * itemsize * WARP_SIZE / LINE_BYTES)
    l1_lines = np.maximum(wavefronts, WARP_SIZE / lanes / L1_LINES_PER_CYCLE)
    read_cycles = warps * (
        input_vectors * l1_lines
        + shared_vectors * wavefronts
        + scattered_vectors * np.maximum(wavefronts, lanes / L1_LINES_PER_CYCLE)
    )
    contiguous_bytes = np.maximum(thread_tile.channels.thread * thread_tile.vector * itemsize, SECTOR_BYTES)
    num_elements = (
        thread_tile.rows.size
        * thread_tile.columns.size
        * (1 + compute_halo_ratio(w, thread_tile) * planes * math.prod(strides[1:]) * w.C / w.O)
    )
    memory_cycles = blocks_per_sm * (num_elements * contiguous_bytes + filter_bytes) / L2_BYTES_PER_CYCLE
    cycle_terms = np.stack(np.broadcast_arrays(issue_cycles, read_cycles, memory_cycles))
    return 0.75 * cycle_terms.max(axis=0) + 0.25 * cycle_terms.sum(axis=0)


def select_fastest_default(
    w: Conv, vector_choices: Sequence[int], list_variants: Callable[[ThreadTile], Iterable[DefaultCandidates]]
) -> dict[str, Any]:
    """Return the knobs with the lowest estimate among thread tiles of all sizes and blocks of all shapes.

    Args:
        w: The workload.
        vector_choices: Options for the channels per thread.
        list_variants: Function from thread tiles, as columns, to candidates with these; at least one must allow the
            smallest tile.
    """
    itemsize, (_, num_rows, num_columns) = get_element_bytes(w), PlaneShape.from_workload(w).output_size
    # Loading half a word takes as long as a whole word.
    wide_vectors = [v for v in vector_choices if v * itemsize >= WORD_BYTES] or vector_choices
    options: dict[str, Sequence[int]] = {"vector": wide_vectors, "threads_c": list_threads_c_choices(w)}
    for axis in "yx":
        options |= {axis: LOCAL_CHOICES, f"threads_{axis}": SPATIAL_THREADS_CHOICES}
    grid = np.meshgrid(*map(np.array, options.values()), indexing="ij")
    grid_columns = {name: column.ravel() for name, column in zip(options, grid, strict=True)}

    def filter_candidates(mask: np.ndarray) -> None:
        grid_columns.update({name: column[mask] for name, column in grid_columns.items()})

    threads = grid_columns["threads_c"] * grid_columns["threads_y"] * grid_columns["threads_x"]
    filter_candidates(
        (threads <= MAX_DEFAULT_THREADS)
        & (grid_columns["vector"] * grid_columns["y"] * grid_columns["x"] <= MAX_ACCUMULATORS)
    )
    num_vectors = w.O // grid_columns["vector"]
    fills_sectors = grid_columns["threads_c"] * grid_columns["vector"] * itemsize >= SECTOR_BYTES
    is_exact = num_vectors % grid_columns["threads_c"] == 0
    is_acceptable_overhang = fills_sectors & (
        round_up(num_vectors, grid_columns["threads_c"]) <= MAX_OVERHANG_RATIO * num_vectors
    )
    # If channels have a large prime factor, no exact tile may fill sectors: some threads then overhang, or read less.
    filter_candidates(
        next(
            mask
            for mask in (
                is_exact & (fills_sectors | (num_vectors == grid_columns["threads_c"])),
                is_acceptable_overhang,
                is_exact,
            )
            if mask.any()
        )
    )
    for name, extent in (("y", num_rows), ("x", num_columns)):  # no thread lies outside of a small image
        filter_candidates((grid_columns[f"threads_{name}"] - 1) * grid_columns[name] < extent)
    tiles = [
        _make_tile(extent, grid_columns[f"threads_{name}"], grid_columns[name])
        for name, extent in (("y", num_rows), ("x", num_columns))
    ]
    best_of_variants: list[tuple[float, int, dict[str, Any]]] = []
    for variant in list_variants(ThreadTile.from_tiles(w, grid_columns["vector"], grid_columns["threads_c"], *tiles)):
        cycles = np.where(variant.is_allowed, variant.estimated_cycles, np.inf)
        best_index = int(np.argmin(cycles))
        best_of_variants.append((float(cycles[best_index]), best_index, variant.knobs))
    _, best_index, knobs = min(best_of_variants, key=lambda one: one[0])
    return {**{name: int(column[best_index]) for name, column in grid_columns.items()}, **knobs}


def _make_tile(extent: int, threads: Any, size: Any) -> Tile:
    """Return a tile of rows or columns."""
    return Tile(extent, {"block": ceil_div(extent, threads * size), "thread": threads, "local": size})


def declare_tile_knobs(k: Knobs, w: Conv, vector_choices: Sequence[int], defaults: dict[str, Any]) -> ThreadTile:
    """Declare the knobs of the thread tile, with the defaults of `select_fastest_default`, and return the tile."""
    vector_elements = k.choice("vector", vector_choices, defaults["vector"])
    threads = k.choice("threads_c", list_threads_c_choices(w), defaults["threads_c"])
    _, num_rows, num_columns = PlaneShape.from_workload(w).output_size
    tiles = [
        k.tile(
            f"tile_{name}",
            extent,
            LEVELS,
            {"thread": defaults[f"threads_{name}"], "local": defaults[name]},
            overhang=select_max_overhang(extent),
        )
        for name, extent in (("y", num_rows), ("x", num_columns))
    ]
    return ThreadTile.from_tiles(w, vector_elements, threads, *tiles)


def add_constraints(k: Knobs, w: Conv, configs: Callable[[Columns], Any]) -> None:
    """Add the constraints of all configs, and prune configs that are not worth searching."""
    k.require(
        f"at most {MAX_PRODUCTS} unrolled products per thread",
        lambda c: configs(c).count_products(w) <= MAX_PRODUCTS,
    )
    k.require(
        f"at most {STATIC_SHARED_BYTES} bytes of shared memory for a block's filters",
        lambda c: (c["weight_scope"] != "shared") | (configs(c).shared_bytes(w) <= STATIC_SHARED_BYTES),
    )
    k.require(f"at most {MAX_THREADS_Z} threads along the rows", lambda c: c["tile_y"][:, 1] <= MAX_THREADS_Z)
    k.prune(
        f"at most {MAX_LIVE_REGISTERS} registers per thread",
        lambda c: configs(c).estimate_live_registers(w) <= MAX_LIVE_REGISTERS,
    )
    num_outputs = w.O * math.prod(PlaneShape.from_workload(w).output_size[1:])
    min_threads = min(MIN_THREADS, ceil_div(num_outputs, 4))  # small planes have few outputs
    k.prune(f"at least {min_threads} threads", lambda c: configs(c).thread_tile.num_threads >= min_threads)
    k.prune(
        "threads overhang the channels by at most a quarter",
        lambda c: (
            configs(c).thread_tile.channels.block * c["threads_c"]
            <= MAX_OVERHANG_RATIO * configs(c).thread_tile.channels.extent
        ),
    )
