"""Tile config of `depthwise_nhwc`: knobs, resource usage and defaults."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import STATIC_SHARED_BYTES
from tvmconv.workloads import Conv

from ..axis_tiles import get_element_bytes
from ..plane_shape import PlaneShape
from .default_config import (
    WORD_BYTES,
    DefaultCandidates,
    add_constraints,
    compute_config_usage,
    declare_tile_knobs,
    estimate_cycles,
    select_fastest_default,
)
from .thread_tile import ThreadTile, count_distinct_inputs, list_vector_choices

UNROLL_SCOPES = ("filter", "row", "tap")  # unrolled part of the filter: all of it, one row, or nothing
WEIGHT_SCOPES = ("shared", "registers", "global")
MAX_LOADS = 128  # unrolled input loads per thread, each with its own guards
MAX_DEFAULT_LIVE_REGISTERS, MAX_DEFAULT_PRODUCTS = 128, 1024  # per thread; some kernels spill registers beyond them


@dataclass(frozen=True)
class DepthwiseTileConfig:
    """One config, or many configs as columns.

    Attributes:
        thread_tile: Tile of a thread.
        unroll_scope: Unrolled part of the filter, one of `UNROLL_SCOPES`.
        weight_scope: Memory from which threads read the filters, one of `WEIGHT_SCOPES`: transposed in shared memory,
            in registers, or element by element in global memory.
    """

    thread_tile: ThreadTile
    unroll_scope: Any
    weight_scope: Any

    @classmethod
    def from_columns(cls, w: Conv, columns: Columns) -> DepthwiseTileConfig:
        """Return the configs of columns."""
        return cls(ThreadTile.from_columns(w, columns), columns["unroll_scope"], columns["weight_scope"])

    def count_products(self, w: Conv) -> Any:
        """Return the number of multiplications per thread in the kernel's source."""
        return self.thread_tile.num_accumulators * self._select_by_unroll_scope(math.prod(w.kernel), w.kernel[-1], 1)

    def count_unrolled_loads(self, w: Conv) -> Any:
        """Return the number of input vector loads per thread in the kernel's source."""
        rows_per_thread, plane_shape = self.thread_tile.rows.local, PlaneShape.from_workload(w)
        num_rows_loaded = plane_shape.kernel_size[0] * count_distinct_inputs(
            rows_per_thread, plane_shape.strides[1], plane_shape.kernel_size[1], plane_shape.dilations[1]
        )
        return self.window_vectors(w) * self._select_by_unroll_scope(num_rows_loaded, rows_per_thread, rows_per_thread)

    def count_loaded_vectors(self, w: Conv) -> Any:
        """Return the number of input vectors that a thread loads."""
        return self.count_unrolled_loads(w) * self._select_by_unroll_scope(
            1, math.prod(w.kernel[:-1]), math.prod(w.kernel)
        )

    def window_vectors(self, w: Conv) -> Any:
        """Return the vectors of an input row that a thread loads at a time."""
        columns_per_thread = self.thread_tile.columns.local
        distinct_inputs = count_distinct_inputs(columns_per_thread, w.stride[-1], w.kernel[-1], w.dilation[-1])
        return self._select_by_unroll_scope(distinct_inputs, distinct_inputs, columns_per_thread)

    def count_filter_vectors(self, w: Conv) -> Any:
        """Return the number of filter vectors that a thread reads."""
        rows = self.thread_tile.rows.local
        return math.prod(w.kernel) * self._select_by_unroll_scope(1, rows, rows)

    def estimate_issued_instructions(self, w: Conv) -> Any:
        """Return the estimated instructions per thread: products, conversions of operands, guarded loads, stores."""
        strip = self.thread_tile
        widening_instructions = strip.vector * (get_element_bytes(w) < WORD_BYTES)
        operand_instructions = self.count_loaded_vectors(w) * (widening_instructions + 3) + self.count_filter_vectors(
            w
        ) * (widening_instructions + 1)
        return (
            strip.num_accumulators * math.prod(w.kernel)
            + operand_instructions
            + 4 * strip.rows.local * strip.columns.local * (1 + strip.vector / 4)
        )

    def estimate_live_registers(self, w: Conv) -> Any:
        """Return the estimated registers per thread for accumulators, two input windows and filters."""
        words_per_vector = self.thread_tile.vector * get_element_bytes(w) / WORD_BYTES
        window_words = 2 * words_per_vector * self.window_vectors(w)
        weight_words = np.where(
            np.equal(self.weight_scope, "registers"),
            words_per_vector * math.prod(w.kernel),
            words_per_vector * self._select_by_unroll_scope(w.kernel[-1], w.kernel[-1], 1),
        )
        return self.thread_tile.num_accumulators + window_words + weight_words

    def shared_bytes(self, w: Conv) -> Any:
        """Return the shared memory of a block's filters in bytes."""
        return math.prod(w.kernel) * self.thread_tile.channels.thread * self.thread_tile.vector * get_element_bytes(w)

    def estimate_cycles(self, w: Conv) -> Any:
        """Return the latency estimate that selects the defaults; see `default_config.estimate_cycles`."""
        strip, taps = self.thread_tile, math.prod(w.kernel)
        channels = strip.channels.thread * strip.vector
        is_weight_shared = np.equal(self.weight_scope, "shared")
        scattered_vectors = (
            np.where(np.equal(self.weight_scope, "global"), self.count_filter_vectors(w) * strip.vector, taps)
            * ~is_weight_shared
        )
        return estimate_cycles(
            w,
            strip,
            issued_instructions=self.estimate_issued_instructions(w)
            + np.where(is_weight_shared, 3 * taps * channels / strip.num_threads, scattered_vectors),
            input_vectors=self.count_loaded_vectors(w),
            shared_vectors=np.where(is_weight_shared, self.count_filter_vectors(w), 0),
            scattered_vectors=scattered_vectors,
            filter_bytes=2 * taps * channels * get_element_bytes(w),  # a sector is read for one element at a time
        )

    def is_default_allowed(self, w: Conv) -> Any:
        """Return whether the config may be a default."""
        exceeds_shared_memory = np.equal(self.weight_scope, "shared")
        exceeds_shared_memory &= (self.shared_bytes(w) > STATIC_SHARED_BYTES) | (
            math.prod(w.kernel) * self.thread_tile.vector == 1
        )
        is_filter_unrolled = np.not_equal(self.weight_scope, "registers") | np.equal(self.unroll_scope, "filter")
        is_unroll_allowed = (self.count_products(w) <= MAX_DEFAULT_PRODUCTS) & (
            self.count_unrolled_loads(w) <= MAX_LOADS
        )
        return (
            is_unroll_allowed
            & (self.estimate_live_registers(w) <= MAX_DEFAULT_LIVE_REGISTERS)
            & ~exceeds_shared_memory
            & is_filter_unrolled
        )

    def _select_by_unroll_scope(self, filter_value: Any, row_value: Any, tap_value: Any) -> Any:
        """Return one of three values, depending on the unrolled part of the filter."""
        return np.select(
            [np.equal(self.unroll_scope, "filter"), np.equal(self.unroll_scope, "row")],
            [filter_value, row_value],
            tap_value,
        )


def declare_knobs(w: Conv, k: Knobs) -> DepthwiseTileConfig:
    """Declare the knobs, with the defaults of the lowest estimate, and return their values."""
    multiplier = w.O // w.groups
    vector_choices = list_vector_choices(w, lambda v: v % multiplier == 0 or multiplier % v == 0)
    defaults = _select_default(w, vector_choices)
    strip = declare_tile_knobs(k, w, vector_choices, defaults)
    unroll_scope = k.choice("unroll_scope", UNROLL_SCOPES, defaults["unroll_scope"])
    weight_scope = k.choice("weight_scope", WEIGHT_SCOPES, defaults["weight_scope"])

    add_constraints(k, w, lambda c: DepthwiseTileConfig.from_columns(w, c))
    k.require(
        f"at most {MAX_LOADS} unrolled loads per thread",
        lambda c: DepthwiseTileConfig.from_columns(w, c).count_unrolled_loads(w) <= MAX_LOADS,
    )
    k.require(
        "filters stay in registers only if the whole filter is unrolled",
        lambda c: (c["weight_scope"] != "registers") | (c["unroll_scope"] == "filter"),
    )
    k.require(  # TVM would omit the barrier, because it assumes that threads read what they stored themselves
        "filters in shared memory have more than one tap or channel per thread",
        lambda c: (c["weight_scope"] != "shared") | (math.prod(w.kernel) * c["vector"] > 1),
    )
    return DepthwiseTileConfig(strip, unroll_scope, weight_scope)


@functools.lru_cache(maxsize=64)
def _select_default(w: Conv, vector_choices: tuple[int, ...]) -> dict[str, Any]:
    """Return the knobs with the lowest estimate."""

    def list_variants(strip: ThreadTile) -> Iterator[DefaultCandidates]:
        for unrolled, weight in itertools.product(UNROLL_SCOPES, WEIGHT_SCOPES):
            config = DepthwiseTileConfig(strip, unrolled, weight)
            yield DefaultCandidates(
                {"unroll_scope": unrolled, "weight_scope": weight},
                config.is_default_allowed(w),
                config.estimate_cycles(w),
            )

    return select_fastest_default(w, vector_choices, list_variants)


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return compute_config_usage(w, DepthwiseTileConfig.from_columns(w, columns))
