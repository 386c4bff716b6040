"""Convolutions with few filters on Hopper's tensor cores: the taps of a plane are columns of the product.

The last layer of a decoder has 3, 4 or 16 filters of 3×3 or 3×3×3 on large images. As pixels × filters, its product
loads each pixel nine times for an instruction that is mostly padding. Here TMA loads a window of lines once for all
taps of a plane, wgmma multiplies it by 9 × 3 columns, and the terms of an output meet in shared memory
(`..gemm.tap_columns`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.requirements import all_of
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv, Conv3d
from tvmconv.workloads.dtypes import get_itemsize
from tvmconv.workloads.features import CACHED_FRAMES, LARGE_TENSORS
from tvmconv.workloads.layout import CHANNELS_LAST

from ....primitives import disable_buffer_reuse, mark_constant_args
from ....tir_builder import Buffer, build_schedule
from ...tile_config import Rule
from ..gemm.problem import make_tap_columns
from ..gemm.tap_columns import WINDOW_COLUMNS, WindowTiles
from ..implicit_gemm_shape import VECTOR_BYTES
from ..stem.volume_view import view_as_volume
from ..tap_column_product import TapColumnProduct, emit_tap_columns
from .constraints import MAX_ACCUMULATORS, resource_constraints
from .kernel import emit_kernel
from .latency import estimate_latency_us
from .product_family import ProductFamily
from .schedule import WIDE_DTYPES
from .tile_config import HopperTileConfig
from .tma_requirements import WGMMA_K_BYTES, has_large_output

LINES_CHOICES = (2, 3, 4, 6, 8, 12, 16)
OPTIONS: dict[str, Sequence[int]] = {
    "warpgroups": (1, 2, 3, 4),
    "block_k_bytes": (32, 64, 128),
    "stages": (2, 3, 4, 6),
}
MAX_COLUMNS = 256  # columns of a wgmma
MAX_PROMISING_FILTERS = 16  # more filters fill the columns of a wgmma without taps


def has_few_filters(w: Conv) -> bool:
    """Whether filters × taps of a plane fit one wgmma, strides of the plane are 1, and arrays are channels last."""
    return (
        w.layout == CHANNELS_LAST
        and w.groups == 1
        and not w.returns_stats
        and w.spatial_ndim > 1
        and math.prod(w.kernel[-2:]) > 1
        and max(w.stride[-2:]) == 1
        and math.prod(w.kernel[-2:]) * w.O <= MAX_COLUMNS
        and w.window[-1] <= WINDOW_COLUMNS
        and w.window[-2] <= max(LINES_CHOICES)
        and w.C * get_itemsize(w.storage) % VECTOR_BYTES == 0
        and not has_large_output(w)
    )


@functools.lru_cache(maxsize=64)
def make_family(w: Conv) -> ProductFamily:
    """Return the products of all numbers of lines per window."""
    volume = cast("Conv3d", view_as_volume(w))
    tiles = [WindowTiles(volume, lines) for lines in LINES_CHOICES if lines >= volume.window[1]]
    products = {each.lines: cast("Conv", TapColumnProduct(each)) for each in tiles}
    return ProductFamily("lines", products, dict.fromkeys(products, 0.0), functools.partial(complete_columns, w))


def complete_columns(w: Conv, columns: Columns) -> Columns:
    """Return the columns of `hopper`'s knobs from those of this schedule."""
    lines, warpgroups = np.asarray(columns["lines"]), np.asarray(columns["warpgroups"])
    num_columns = WindowTiles(cast("Conv3d", view_as_volume(w)), LINES_CHOICES[-1]).num_columns
    fixed = {"block_n": num_columns, "split_k": 1, "cluster_m": 1, "cluster_n": 1}
    columns = {**columns, "wgmma_m_tiles": np.maximum(1, lines // warpgroups)}
    return columns | {name: np.full(lines.shape, value) for name, value in fixed.items()}


def make_config(w: Conv, values: Mapping[str, Any]) -> HopperTileConfig:
    """Return the tile config of the knobs' values."""
    completed = complete_columns(w, {name: np.array(value) for name, value in values.items()})
    return HopperTileConfig(**{name: int(value) for name, value in completed.items() if name != "lines"})


def list_rules(w: Conv, lines: int) -> list[Rule]:
    """Return the conditions that every config with a number of lines meets."""
    product = make_family(w).products[lines]
    return [
        ("warpgroups have whole lines", lambda t: t.block_m == lines * WINDOW_COLUMNS),
        (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
        *resource_constraints(product),
    ]


@functools.lru_cache(maxsize=64)
def list_best_configs(w: Conv) -> list[dict[str, int]]:
    """Return the legal knob values for each number of lines with the best estimate, the best first."""
    family, best = make_family(w), []
    for lines, product in family.products.items():
        grid = np.meshgrid(*OPTIONS.values(), indexing="ij")
        columns = {name: values.ravel() for name, values in zip(OPTIONS, grid, strict=True)}
        columns["lines"] = np.full(columns["stages"].shape, lines)
        config = HopperTileConfig.from_columns(complete_columns(w, columns))
        is_legal = np.logical_and.reduce([predicate(config) for _, predicate in list_rules(w, lines)])
        estimates = np.where(is_legal, estimate_latency_us(config, product), np.inf)
        row = int(np.argmin(estimates))
        if np.isfinite(estimates[row]):
            best.append((float(estimates[row]), {name: int(values[row]) for name, values in columns.items()}))
    return [values for _, values in sorted(best, key=lambda entry: entry[0])]


def has_legal_config(w: Conv) -> bool:
    """Whether a window of some number of lines, its accumulators, and its shared memory fit a CTA."""
    return bool(list_best_configs(w))


def is_promising(w: Conv) -> bool:
    """Return whether filters are few, and channels fill an instruction."""
    itemsize_channels = w.C * get_itemsize(w.storage)
    return w.O <= MAX_PROMISING_FILTERS and itemsize_channels >= WGMMA_K_BYTES


def compute_tap_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return make_family(w).compute_usage(columns)


@schedule(
    *("conv2d", "conv3d"),
    dtypes=WIDE_DTYPES,
    usage=compute_tap_usage,
    condition=all_of(has_few_filters, has_legal_config),
    search_if=is_promising,
    starting_configs=lambda w: list_best_configs(w)[1:],
    supersedes=("direct", "implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    exact_arch=90,
    features=(CACHED_FRAMES, LARGE_TENSORS),
)
def kn2row_hopper(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Emit the copy of the filters to columns, and the product with the sum of its terms."""
    family, (default, *_) = make_family(w), list_best_configs(w)
    values = {name: k.choice(name, options, default[name]) for name, options in OPTIONS.items()}
    values["lines"] = k.choice("lines", list(family.products), default["lines"])
    family.add_rules(k, functools.partial(list_rules, w), lambda lines: [])
    product, config = cast("TapColumnProduct", family.products[values["lines"]]), make_config(w, values)

    def emit(arguments: dict[str, Buffer]) -> None:
        columns = emit_tap_columns(product.w, product.tiles.num_columns, arguments["K"])
        problem = make_tap_columns(product.tiles, product.shape)
        emit_kernel(*(cast("Conv", product), config, {**arguments, "K": columns}), make_problem=lambda *_: problem)

    built = build_schedule(w, emit)
    mark_constant_args(built, "K")
    disable_buffer_reuse(built)  # TVM does not see the accesses of TMA
    return built
