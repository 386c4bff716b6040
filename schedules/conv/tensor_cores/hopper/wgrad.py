"""Gradients of weights on Hopper's tensor cores: the kernel of `hopper` on parts of the reduction, and a sum of parts.

The product has the filters as rows and (tap, channel) as columns, and its reduction runs over all pixels of the batch.
Both operands are MN-major: channels are contiguous in dY and in X. TMA copies boxes of channels × pixels, for X in
im2col mode at the tap of the box, and `wgmma` transposes them.

Output tiles are few and the reduction is long, so the knob `parts` divides the pixels among CTAs. To the kernel the
parts are groups: each is a product of its own, whose float32 sums TMA stores to a workspace. A second kernel adds the
parts in order and rounds once, so that results are the same bits in every run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.arithmetic import ceil_div, round_up
from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, ONE_GROUP, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import WeightGradient
from tvmconv.workloads.dtypes import ACCUMULATOR

from ....primitives import disable_buffer_reuse
from ....tir_builder import (
    Buffer,
    allocate,
    build_schedule,
    emit_ptx,
    fill_zeros,
    if_,
    load_global,
    store,
    store_global,
    thread_axis,
    unpack,
    unrolled_loop,
)
from ...gradient_operators import WGRAD
from ...tile_config import Rule
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..gemm.problem import make_wgrad
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .candidates import select_best
from .constraints import isa_constraints, resource_constraints
from .kernel import emit_kernel
from .knobs import MAX_LATENCY_RATIO, compute_usage
from .latency import estimate_latency_us
from .tile_config import KNOB_OPTIONS, STAGES_CHOICES, HopperTileConfig
from .tma_requirements import can_load_by_tma

DTYPES = ("float16", "bfloat16")  # wgmma transposes operands of 16 bits only
SWIZZLE_ROWS = 8  # rows of a swizzle atom
PART_PIXELS = 128  # parts are whole K tiles of any size
PARTS_CHOICES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 16, 20, 22, 24, 28, 32, 40, 44, 48, 66, 88, 132)
COLUMN_UNITS = (64, 32, 16)  # channels per box
MAX_PADDING = 1 / 8  # of columns, for wider boxes
REDUCTION_THREADS, REDUCTION_CHANNELS = 64, 4  # threads per CTA, and channels per thread, of the sum of parts
REDUCTION_LAUNCH_US, WORKSPACE_BYTES_PER_US = 1.6, 4.0e6
TILE_KNOBS = {name: options for name, options in KNOB_OPTIONS.items() if name != "split_k"}


@dataclasses.dataclass(frozen=True)
class PartialProduct:
    """The product of a wgrad in parts, with the attributes of a convolution that `hopper` reads.

    It is a convolution of one line of filters as pixels, and each part of the reduction is a group.

    Attributes:
        output_size: Number of filters.
        O: Columns of all parts.
        C: Pixels of all parts.
        groups: Number of parts.
        storage: Storage dtype of the operands.
        min_bytes: Minimum number of bytes moved from and to memory.
    """

    output_size: tuple[int]
    O: int  # noqa: E741  the field's own letter
    C: int
    groups: int
    storage: str
    min_bytes: int
    N: int = 1
    spatial_ndim: int = 1
    kernel: tuple[int] = (1,)
    stride: tuple[int] = (1,)
    dilation: tuple[int] = (1,)
    epilogue: tuple[str, ...] = ()
    argument_dtypes: tuple[str, ...] = (ACCUMULATOR,)


def make_product(w: WeightGradient, num_parts: int) -> Conv:
    """Return the product in parts of whole K tiles; there are fewer if some would have no pixels."""
    forward = w.forward
    pixels, columns = forward.N * math.prod(forward.output_size), choose_columns_per_tap(forward)
    part = round_up(ceil_div(pixels, num_parts), PART_PIXELS)
    parts = ceil_div(pixels, part)
    n = math.prod(forward.kernel) * columns
    product = PartialProduct((forward.O,), n * parts, part * parts, parts, forward.storage, w.min_bytes)
    return cast("Conv", product)


def choose_columns_per_tap(w: Conv) -> int:
    """Return the channels of X, padded to whole boxes: wide boxes unless much would be padding."""
    padded = {unit: round_up(w.C, unit) for unit in COLUMN_UNITS}
    wide = [columns for columns in padded.values() if columns <= (1 + MAX_PADDING) * w.C]
    return wide[0] if wide else min(padded.values())


def list_parts(w: WeightGradient) -> list[int]:
    """Return the numbers of parts that differ."""
    return sorted({make_product(w, parts).groups for parts in PARTS_CHOICES})


def make_config(columns: Columns) -> HopperTileConfig:
    """Return the tile configs of columns; reductions are not split within clusters."""
    return HopperTileConfig.from_columns(columns, split_k=1)


def estimate_us(config: HopperTileConfig, w: WeightGradient, num_parts: int) -> Any:
    """Return the estimated latency of both launches in microseconds."""
    shape = ImplicitGemmShape.from_workload(product := make_product(w, num_parts))
    workspace_bytes = 2 * shape.groups * shape.m * shape.n * 4
    return estimate_latency_us(config, product) + REDUCTION_LAUNCH_US + workspace_bytes / WORKSPACE_BYTES_PER_US


def constraints(w: WeightGradient, num_parts: int) -> list[Rule]:
    """Return the constraints on tile configs for a number of parts."""
    product = make_product(w, num_parts)
    itemsize, columns = ImplicitGemmShape.from_workload(product).itemsize, choose_columns_per_tap(w.forward)
    box = math.gcd(columns, COLUMN_UNITS[0])
    return [
        *isa_constraints(product),
        *resource_constraints(product),
        (
            "the slices of a shared operand are whole swizzle atoms",
            lambda t: t.block_k(itemsize) >= SWIZZLE_ROWS * np.maximum(t.cluster_m, t.cluster_n),
        ),
        ("boxes are at least a narrow swizzle wide", lambda t: np.gcd(t.block_n, box) >= COLUMN_UNITS[-1]),
    ]


def for_each_parts(columns: Columns, compute: Callable[[Columns, int], Any]) -> np.ndarray:
    """Return what a function computes for the rows of each number of parts."""
    parts = np.asarray(columns["parts"])
    result: np.ndarray | None = None
    for count in np.unique(parts):
        rows = parts == count
        values = np.broadcast_to(compute({name: each[rows] for name, each in columns.items()}, int(count)), rows.sum())
        if result is None:
            result = np.empty(len(parts), values.dtype)
        result[rows] = values
    return np.empty(0) if result is None else result


def compute_wgrad_usage(w: WeightGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    columns = {**columns, "split_k": np.ones_like(columns["parts"])}
    usages: dict[int, dict[str, Any]] = {}

    def compute_quantity(name: str, rows: Columns, parts: int) -> Any:
        if parts not in usages:
            usages[parts] = compute_usage(make_product(w, parts), rows).to_columns()
        return usages[parts][name]

    names = compute_usage(make_product(w, 1), {name: each[:1] for name, each in columns.items()}).to_columns()
    quantities = {
        name: for_each_parts(columns, functools.partial(compute_quantity, name))
        for name, value in names.items()
        if value is not None and name != "estimate"
    }
    estimate = for_each_parts(columns, lambda rows, parts: estimate_us(make_config(rows), w, parts))
    return ResourceUsage(**quantities, estimate=estimate, estimate_seconds_per_unit=1e-6)


def _estimate_parts(w: WeightGradient, num_parts: int, config: HopperTileConfig) -> Any:
    return estimate_us(config, w, num_parts)


@functools.lru_cache(maxsize=64)
def select_default(w: WeightGradient) -> tuple[dict[str, int], float]:
    """Return the knob values with the best estimate, and that estimate in microseconds."""
    best: tuple[dict[str, int], float] = ({}, math.inf)
    for parts in list_parts(w):
        estimate = functools.partial(_estimate_parts, w, parts)
        config, latency_us = select_best(TILE_KNOBS, constraints(w, parts), estimate, split_k=1)
        if config and latency_us < best[1]:
            best = {**{name: getattr(config, name) for name in TILE_KNOBS}, "parts": parts}, latency_us
    return best


def declare_knobs(w: WeightGradient, k: Knobs) -> tuple[HopperTileConfig, int]:
    """Declare the knobs, with defaults that suit the workload, and return the tile config and the number of parts."""
    default, best_us = select_default(w)
    values = {name: k.choice(name, options, default[name]) for name, options in TILE_KNOBS.items()}
    parts = k.choice("parts", list_parts(w), default["parts"])
    for number, (description, _) in enumerate(constraints(w, 1)):

        def is_met(columns: Columns, number: int = number) -> Any:
            return for_each_parts(columns, lambda rows, parts: constraints(w, parts)[number][1](make_config(rows)))

        k.require(description, is_met)
    shape = ImplicitGemmShape.from_workload(make_product(w, 1))
    for description, is_useful in (
        ("tiles are less than twice as high as the product", lambda t, _: t.block_m < 2 * max(shape.m, 64)),
        ("tiles are less than twice as wide as the product", lambda t, _: t.block_n < 2 * max(shape.n, 16)),
        (
            "there are at most as many stages as k-tiles",
            lambda t, gemm: (t.stages <= t.k_tiles_per_cta(gemm) + 1) | (t.stages == STAGES_CHOICES[0]),
        ),
        (
            f"the estimated latency is at most {MAX_LATENCY_RATIO} times the best estimate",
            lambda t, gemm: estimate_us(t, w, gemm.groups) <= MAX_LATENCY_RATIO * best_us,
        ),
    ):

        def is_worth_it(columns: Columns, is_useful: Callable[..., Any] = is_useful) -> Any:
            def compute(rows: Columns, parts: int) -> Any:
                return is_useful(make_config(rows), ImplicitGemmShape.from_workload(make_product(w, parts)))

            return for_each_parts(columns, compute)

        k.prune(description, is_worth_it)
    return HopperTileConfig(**values, split_k=1), parts


def can_load_wgrad_by_tma(w: WeightGradient) -> bool:
    """Whether TMA can copy both operands: channels of X and dY fill 16-byte chunks."""
    forward = w.forward
    itemsize = ImplicitGemmShape.from_workload(forward).itemsize
    return can_load_by_tma(forward) and forward.O * itemsize % VECTOR_BYTES == 0


@schedule(
    *WGRAD,
    dtypes=DTYPES,
    usage=compute_wgrad_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, ONE_GROUP, can_load_wgrad_by_tma),
    search_if=can_load_wgrad_by_tma,
    supersedes=("implicit_gemm",),
    device_kinds=("cuda",),
    exact_arch=90,
)
def hopper(s: Schedule, w: WeightGradient, k: Knobs) -> Schedule:
    """Emit the kernel of the partial products, and the sum of the parts."""
    config, parts = declare_knobs(w, k)
    product = make_product(w, parts)
    shape, columns_per_tap = ImplicitGemmShape.from_workload(product), choose_columns_per_tap(w.forward)

    def emit(arguments: dict[str, Buffer]) -> None:
        workspace = allocate("partial_sums", shape.m * shape.groups * shape.n, ACCUMULATOR, "global")
        problem = make_wgrad(w.forward, shape, columns_per_tap)
        emit_kernel(product, config, {**arguments, "Y": workspace}, make_problem=lambda *_: problem)
        emit_sum_of_parts(w, shape, columns_per_tap, workspace, arguments)

    schedule = build_schedule(w, emit)
    disable_buffer_reuse(schedule)  # TVM does not see what TMA writes to the workspace
    return schedule


def emit_sum_of_parts(
    w: WeightGradient,
    shape: ImplicitGemmShape,
    columns_per_tap: int,
    workspace: Buffer,
    arguments: dict[str, Buffer],
) -> None:
    """Emit the kernel that adds the parts of the workspace (filters, parts, taps, channels) and rounds the sums."""
    ops, channels, taps = EpilogueOps.from_workload(w), w.C, math.prod(w.kernel)
    vector = math.gcd(channels, REDUCTION_CHANNELS)
    num_vectors = shape.m * taps * channels // vector
    sums, words = allocate("sums", 8, "float32"), allocate("words", 8, "uint32")
    grid = thread_axis(ceil_div(num_vectors, REDUCTION_THREADS), "blockIdx.x")
    with grid as cta, thread_axis(REDUCTION_THREADS, "threadIdx.x") as thread:
        emit_ptx("griddepcontrol.wait")
        emit_ptx("griddepcontrol.launch_dependents")
        output_index = (cta * REDUCTION_THREADS + thread) * vector
        channel, tap, row = output_index % channels, output_index // channels % taps, output_index // (channels * taps)
        exact = num_vectors % REDUCTION_THREADS == 0
        with if_(True if exact else output_index < num_vectors * vector):
            fill_zeros(sums, vector)
            with unrolled_loop(shape.groups, "part") as part:
                index = (row * shape.groups + part) * shape.n + tap * columns_per_tap + channel
                load_global(words, workspace, index, vector, is_constant=False)
                for e, value in enumerate(unpack(words, vector, ACCUMULATOR)):
                    store(sums, e, sums[e] + value)
            apply_to_vector(ops, arguments, channel, output_index, vector, sums, words)
            store_global(arguments[w.RESULT], output_index, words, vector)
