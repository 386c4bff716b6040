"""Which strips schedules of images with channels last take by default: those of the least estimated time.

Small images have few strips: threads then have to take fewer channels and pixels, until there are enough of them for a
large GPU; large images want the opposite. What is gained and lost is weighed by an estimate in clock cycles, which
knows instructions, loads and bytes, and nothing of how they overlap. A search finds better, from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.gpu_specs import MAX_THREADS_Z, STATIC_SHARED_BYTES, WARP_SIZE
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv

from ..axis_tiles import get_element_bytes
from ..direct_config import select_max_overhang
from ..plane_shape import PlaneShape
from .thread_tile import LEVELS, ThreadTile, compute_window_extent, list_threads_c_choices

# Of an H200.
NUM_MULTIPROCESSORS = 132
SCHEDULERS_PER_SM = 4  # of a multiprocessor
L2_BYTES_PER_CYCLE = 24  # between a multiprocessor and the L2 cache
L1_LINES_PER_CYCLE = 2  # that the L1 cache finds for a warp, about
OVERHEAD_INSTRUCTIONS = 60  # instructions of a thread before its first load, and behind its last
CACHE_LINE_BYTES, SECTOR_BYTES, WORD_BYTES = 128, 32, 4  # bytes

LOCAL_CHOICES = (1, 2, 4, 7, 8)  # rows or columns of a strip to choose from
SPATIAL_THREADS_CHOICES = (1, 2, 3, 4, 7, 8, 14, 16, 28, 32)  # threads of a block along rows or columns
MAX_DEFAULT_THREADS = 256  # of a block
MAX_ACCUMULATORS = 64
MAX_PRODUCTS = 2048  # of a thread, unrolled: NVRTC takes two seconds for them
MAX_LIVE_REGISTERS = 176  # registers of a thread for sums, windows and weights, by estimate
MIN_THREADS = 32
MAX_OVERHANG_RATIO = 1.25  # times the channels that the threads along them are for


class DefaultCandidates(NamedTuple):
    """Ways to compute these strips, as columns.

    Attributes:
        knobs: what they set besides the strips, all alike.
        is_allowed: which of them keep to their limits.
        estimated_cycles: the estimate of each.
    """

    knobs: dict[str, Any]
    is_allowed: np.ndarray
    estimated_cycles: np.ndarray


def compute_halo_ratio(w: Conv, thread_tile: ThreadTile) -> Any:
    """Inputs that a block reads for each that it would if its windows did not overlap those of others."""
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
    """What plans use of a device, one or columns of many; `issued` is an estimate of a thread's for each output."""
    thread_tile = config.thread_tile
    num_blocks = thread_tile.count_blocks(w)
    return ResourceUsage(
        threads=thread_tile.num_threads,
        shared_bytes=np.where(config.weight_scope == "shared", config.shared_bytes(w), 0),
        accumulators=thread_tile.num_accumulators,
        blocks=num_blocks,
        all_threads=num_blocks * thread_tile.num_threads,
        held=config.estimate_live_registers(w),
        issued=config.estimate_issued_instructions(w) / thread_tile.num_accumulators,
        halo=compute_halo_ratio(w, thread_tile),
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
    """The estimate: clock cycles of the multiprocessor that has the most blocks.

    It issues instructions, each warp's in no less than its own time; it reads through the L1 cache and shared memory;
    and it gets and puts the tiles of its blocks. The longest of these counts, and the others a bit.

    Args:
        w: the workload.
        thread_tile: the strips.
        issued_instructions: instructions of a thread.
        input_vectors: vectors of the input that a thread reads.
        shared_vectors: vectors that it reads in shared memory.
        scattered_vectors: vectors that it reads elsewhere than its neighbours along the channels.
        filter_bytes: bytes of the filters that a block reads.
    """
    element_size_bytes, strides, planes = (
        get_element_bytes(w),
        PlaneShape.from_workload(w).strides,
        PlaneShape.from_workload(w).kernel_size[0],
    )
    blocks_per_sm = ceil_div(thread_tile.count_blocks(w), NUM_MULTIPROCESSORS)
    warps = ceil_div(thread_tile.num_threads, WARP_SIZE) * blocks_per_sm
    issue_cycles = (issued_instructions + OVERHEAD_INSTRUCTIONS) * (np.maximum(1, warps / SCHEDULERS_PER_SM) + 0.5)
    lanes = np.minimum(WARP_SIZE, thread_tile.channels.thread)
    wavefronts = np.maximum(1, thread_tile.vector * element_size_bytes * WARP_SIZE / CACHE_LINE_BYTES)
    l1_lines = np.maximum(wavefronts, WARP_SIZE / lanes / L1_LINES_PER_CYCLE)
    read_cycles = warps * (
        input_vectors * l1_lines
        + shared_vectors * wavefronts
        + scattered_vectors * np.maximum(wavefronts, lanes / L1_LINES_PER_CYCLE)
    )
    contiguous_bytes = np.maximum(
        thread_tile.channels.thread * thread_tile.vector * element_size_bytes, SECTOR_BYTES
    )  # bytes side by side
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
    """The knobs of the least estimate, among strips of all sizes in blocks of all shapes that promise something.

    Args:
        w: the workload.
        vector_choices: the numbers of channels that a thread may have.
        list_variants: from strips, as columns, to the ways to compute them, one at least that fits the smallest strip.
    """
    element_size_bytes, (_, num_rows, num_columns) = get_element_bytes(w), PlaneShape.from_workload(w).output_size
    wide_vectors = [
        v for v in vector_choices if v * element_size_bytes >= WORD_BYTES
    ] or vector_choices  # half a word takes as long as a whole one
    spatial_options = {
        "y": LOCAL_CHOICES,
        "threads_y": SPATIAL_THREADS_CHOICES,
        "x": LOCAL_CHOICES,
        "threads_x": SPATIAL_THREADS_CHOICES,
    }
    options = {"vector": wide_vectors, "threads_c": list_threads_c_choices(w), **spatial_options}
    grid = np.meshgrid(*map(np.array, options.values()), indexing="ij")
    candidate_columns = {name: column.ravel() for name, column in zip(options, grid, strict=True)}

    def filter_candidates(mask: np.ndarray) -> None:
        candidate_columns.update({name: column[mask] for name, column in candidate_columns.items()})

    threads = candidate_columns["threads_c"] * candidate_columns["threads_y"] * candidate_columns["threads_x"]
    filter_candidates(
        (threads <= MAX_DEFAULT_THREADS)
        & (candidate_columns["vector"] * candidate_columns["y"] * candidate_columns["x"] <= MAX_ACCUMULATORS)
    )
    num_vectors = w.O // candidate_columns["vector"]
    fills_sectors = candidate_columns["threads_c"] * candidate_columns["vector"] * element_size_bytes >= SECTOR_BYTES
    is_exact = num_vectors % candidate_columns["threads_c"] == 0
    is_acceptable_overhang = fills_sectors & (
        round_up(num_vectors, candidate_columns["threads_c"]) <= MAX_OVERHANG_RATIO * num_vectors
    )
    # of channels with a large prime factor no whole part need be a sector: some threads have none, or read too little
    filter_candidates(
        next(
            mask
            for mask in (
                is_exact & (fills_sectors | (num_vectors == candidate_columns["threads_c"])),
                is_acceptable_overhang,
                is_exact,
            )
            if mask.any()
        )
    )
    for name, extent in (
        ("y", num_rows),
        ("x", num_columns),
    ):  # a block has no thread that lies outside of a small image
        filter_candidates((candidate_columns[f"threads_{name}"] - 1) * candidate_columns[name] < extent)
    tiles = [
        _make_tile(extent, candidate_columns[f"threads_{name}"], candidate_columns[name])
        for name, extent in (("y", num_rows), ("x", num_columns))
    ]
    best_of_variants: list[tuple[float, int, dict[str, Any]]] = []
    for variant in list_variants(
        ThreadTile.from_tiles(w, candidate_columns["vector"], candidate_columns["threads_c"], *tiles)
    ):
        cycles = np.where(variant.is_allowed, variant.estimated_cycles, np.inf)
        best_index = int(np.argmin(cycles))
        best_of_variants.append((float(cycles[best_index]), best_index, variant.knobs))
    _, best_index, knobs = min(best_of_variants, key=lambda one: one[0])
    return {**{name: int(column[best_index]) for name, column in candidate_columns.items()}, **knobs}


def _make_tile(extent: int, threads: Any, size: Any) -> Tile:
    """A tile of rows or columns."""
    return Tile(extent, {"block": ceil_div(extent, threads * size), "thread": threads, "local": size})


def declare_tile_knobs(k: Knobs, w: Conv, vector_choices: Sequence[int], defaults: dict[str, Any]) -> ThreadTile:
    """Ask for the strips; `defaults` are the defaults, as `select_fastest_default` finds them."""
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


def add_constraints(k: Knobs, w: Conv, config_from_columns: Callable[[Columns], Any]) -> None:
    """Add the constraints of all configs, and what a search leaves out; `config_from_columns` makes many configs."""
    k.require(
        f"at most {MAX_PRODUCTS} products of a thread are unrolled",
        lambda c: config_from_columns(c).count_products(w) <= MAX_PRODUCTS,
    )
    k.require(
        f"the filters of a block have at most {STATIC_SHARED_BYTES} bytes in shared memory",
        lambda c: (c["weight"] != "shared") | (config_from_columns(c).shared_bytes(w) <= STATIC_SHARED_BYTES),
    )
    k.require(f"at most {MAX_THREADS_Z} threads along the rows", lambda c: c["tile_y"][:, 1] <= MAX_THREADS_Z)
    k.prune(
        f"a thread holds at most {MAX_LIVE_REGISTERS} registers",
        lambda c: config_from_columns(c).estimate_live_registers(w) <= MAX_LIVE_REGISTERS,
    )
    num_outputs = w.O * math.prod(PlaneShape.from_workload(w).output_size[1:])
    min_threads = min(MIN_THREADS, ceil_div(num_outputs, 4))  # a plane may have few
    k.prune(f"at least {min_threads} threads", lambda c: config_from_columns(c).thread_tile.num_threads >= min_threads)
    k.prune(
        "threads along the channels overhang them by a quarter at most",
        lambda c: (
            config_from_columns(c).thread_tile.channels.block * c["threads_c"]
            <= MAX_OVERHANG_RATIO * config_from_columns(c).thread_tile.channels.extent
        ),
    )
