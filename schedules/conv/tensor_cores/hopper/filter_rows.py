"""Convolutions on Hopper's tensor cores whose product has the filters as rows and the pixels as columns.

wgmma reads its 64 rows of A and its N rows of B from shared memory: with 64 filters as columns, as many bytes as it has
time for. Here the filters are A, and up to 256 pixels are the columns, so that each wgmma reads 64 + 256 rows for
four times the products. The pixels of a tile are any multiple of 16, which whole waves of tiles may need.

The kernel is that of `hopper` (`.kernel`), with the operands exchanged. Accumulators of a thread are neighbouring
pixels of a filter, so that `stmatrix` transposes them on their way to the tiles of shared memory that TMA stores
(`..gemm.filter_rows_epilogue`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import CHANNELS_LAST_LAYOUT, Requirement, all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.tensor_map import MAX_BOX_ELEMENTS
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.dtypes import get_itemsize

from ....primitives import disable_buffer_reuse
from ....tir_builder import build_schedule
from ...tile_config import Rule, add_rules, declare_choices
from ..filter_rows_product import FilterRowsProduct
from ..gemm.problem import make_filter_rows
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from .candidates import list_best
from .constraints import isa_constraints, resource_constraints
from .kernel import emit_kernel
from .knobs import compute_usage, pruning_constraints
from .latency import estimate_latency_us
from .schedule import view_for_tma
from .tile_config import (
    COOPERATIVE,
    COOPERATIVE_SETMAXNREG,
    KERNEL_SCHEDULES,
    KNOB_OPTIONS,
    OUTPUT_STAGES_CHOICES,
    PINGPONG,
    RASTER_ORDERS,
    REALLOCATED_WGMMA_M_TILES_CHOICES,
    HopperTileConfig,
)
from .tma_requirements import NARROW_ROW_BYTES, can_load_by_tma, describe_lines, has_large_output, is_promising

PIXELS_CHOICES = (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)  # per tile
OPTIONS: dict[str, Sequence[Any]] = KNOB_OPTIONS | {
    "wgmma_m_tiles": REALLOCATED_WGMMA_M_TILES_CHOICES,
    "block_n": PIXELS_CHOICES,
    "split_k": (1,),
    "kernel_schedule": KERNEL_SCHEDULES,
    "raster_order": RASTER_ORDERS,
    "output_stages": OUTPUT_STAGES_CHOICES,
}
STARTING_SCHEDULES = (PINGPONG, COOPERATIVE, PINGPONG, COOPERATIVE_SETMAXNREG)  # of configs with which a search starts
SECONDS_PER_UNIT = 1.25e-6  # of the estimate: the best kernels of 27 layers on an H200 took 0.68 to 1.40 times as long
MIN_PROMISING_PIXELS = 1 << 13  # output pixels; smaller layers have few tiles, and `hopper` splits their sums
MAX_PROMISING_FILTERS = 256  # with more, `hopper` has as wide tiles with filters as columns


def has_filter_rows(w: Conv) -> bool:
    """Whether TMA can copy the operands and store 16-bit results of one group, with one residual at most."""
    viewed = view_for_tma(w)
    return (
        w.groups == 1
        and w.reads_x_only
        and not w.returns_stats
        and not w.has_large_tensors
        and not has_large_output(viewed)
        and can_load_by_tma(viewed)
        and get_itemsize(w.argument_dtypes[-1]) == get_itemsize(w.storage) == 2
        and w.O * get_itemsize(w.storage) % VECTOR_BYTES == 0
        and sum(op.argument_kind == "output" for op in epilogue.get_ops(w.epilogue)) <= 1
    )


FILTER_ROWS = Requirement(
    "one group whose filters and channels are multiples of 8, and a residual at most",
    has_filter_rows,
    lambda w: f"{w.groups} groups, {w.C} channels and {w.O} filters",
)


def is_worth_trying(w: Conv) -> bool:
    """Return whether pixels are many, filters few, and sums so long that the loads of operands matter."""
    is_large = w.N * math.prod(w.output_size) >= MIN_PROMISING_PIXELS
    has_long_sums = w.C * math.prod(w.kernel) >= w.O and w.C * get_itemsize(w.storage) >= NARROW_ROW_BYTES
    return is_large and has_long_sums and w.O <= MAX_PROMISING_FILTERS and is_promising(view_for_tma(w))


@functools.lru_cache(maxsize=64)
def make_product(w: Conv) -> Conv:
    """Return the product of a convolution."""
    return cast("Conv", FilterRowsProduct.from_workload(view_for_tma(w)))


def list_options(w: Conv) -> dict[str, Sequence[Any]]:
    """Return the options of all knobs."""
    viewed = view_for_tma(w)
    line, is_dense = viewed.output_size[-1], viewed.kernel[-1] > 1 == viewed.stride[-1]
    shares_taps = is_dense and any(line % pixels == 0 for pixels in PIXELS_CHOICES)
    return OPTIONS | {"taps_per_copy": (1, viewed.kernel[-1]) if shares_taps else (1,)}


def list_rules(w: Conv) -> list[Rule]:
    """Return the conditions that every config meets."""
    product, line = make_product(w), view_for_tma(w).output_size[-1]
    return [
        *isa_constraints(product),
        *resource_constraints(product),
        (
            f"TMA copies at most {MAX_BOX_ELEMENTS} filters at a time",
            lambda t: t.block_m // t.cluster_n <= MAX_BOX_ELEMENTS,
        ),
        (
            "taps share a copy of pixels of one line",
            lambda t: np.equal(t.taps_per_copy, 1) | (line % t.block_n == 0),
        ),
    ]


@functools.lru_cache(maxsize=64)
def list_best_configs(w: Conv) -> list[dict[str, Any]]:
    """Return the knob values of each kernel schedule with the best estimates, the best first."""
    product = make_product(w)
    shape = ImplicitGemmShape.from_workload(product)
    estimate = functools.partial(estimate_latency_us, w=product)
    ranked = []
    for name in dict.fromkeys(STARTING_SCHEDULES):
        rules = list_rules(w)
        if name == PINGPONG:
            rules.append(("some CTA computes several tiles", lambda t: t.computes_several_tiles(shape)))
        options = list_options(w) | {"kernel_schedule": (name,), "output_stages": OUTPUT_STAGES_CHOICES[:1]}
        if name == COOPERATIVE:
            options |= {"wgmma_m_tiles": KNOB_OPTIONS["wgmma_m_tiles"]}
        ranked += list_best(options, rules, estimate, STARTING_SCHEDULES.count(name), **describe_lines(product))
    ranked.sort(key=lambda entry: entry[1])
    return [{name: getattr(config, name) for name in options} for config, _ in ranked]


def has_config(w: Conv) -> bool:
    """Whether some tile fits a CTA."""
    return bool(list_best_configs(w))


def compute_filter_rows_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    quantities = compute_usage(make_product(w), columns).to_columns()
    return ResourceUsage(**quantities, estimate_seconds_per_unit=SECONDS_PER_UNIT)


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=("float16", "bfloat16"),
    usage=compute_filter_rows_usage,
    condition=all_of(CHANNELS_LAST_LAYOUT, FILTER_ROWS, has_config),
    search_if=is_worth_trying,
    starting_configs=lambda w: list_best_configs(w)[1:],
    device_kinds=("cuda",),
    exact_arch=90,
)
def filter_rows_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Emit the kernel of `hopper` with filters as rows of the product, whose results `stmatrix` transposes."""
    viewed, product, default = view_for_tma(w), make_product(w), list_best_configs(w)[0]
    default_config = HopperTileConfig(**default, **describe_lines(product))
    values = declare_choices(k, list_options(w), default_config)
    best_us = float(np.asarray(estimate_latency_us(default_config, product)))
    pruned = pruning_constraints(product, best_us=best_us)
    add_rules(k, lambda columns: HopperTileConfig.of_workload(columns, product), list_rules(w), pruned)
    config = HopperTileConfig(**values, **describe_lines(product))
    shape = ImplicitGemmShape.from_workload(product)
    problem = make_filter_rows(viewed, shape, config.block_n // config.cluster_m, config.taps_per_copy > 1)
    built = build_schedule(
        w, lambda arguments: emit_kernel(product, config, arguments, make_problem=lambda *_: problem)
    )
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built
