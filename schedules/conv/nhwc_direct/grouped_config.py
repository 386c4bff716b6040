"""Tile config of `grouped_nhwc`: knobs, resource usage and defaults."""

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
from .default_config import (
    MAX_PRODUCTS,
    WORD_BYTES,
    DefaultCandidates,
    add_constraints,
    compute_config_usage,
    declare_tile_knobs,
    estimate_cycles,
    select_fastest_default,
)
from .thread_tile import MAX_LOAD_BYTES, VECTOR_CHOICES, ThreadTile, count_distinct_inputs, list_vector_choices

UNROLL_SCOPES = ("row", "tap")  # unrolled part of the filter: one row, or nothing
WEIGHT_SCOPES = ("shared", "global")
MAX_DEFAULT_LIVE_REGISTERS = 128  # per thread; see `MAX_LIVE_REGISTERS`


@dataclass(frozen=True)
class GroupedTileConfig:
    """One config, or many configs as columns.

    Attributes:
        thread_tile: Tile of a thread.
        block_k: Input channels per k-tile.
        unroll_scope: Unrolled part of the filter, one of `UNROLL_SCOPES`.
        weight_scope: Memory from which threads read the filters, one of `WEIGHT_SCOPES`.
    """

    thread_tile: ThreadTile
    block_k: Any
    unroll_scope: Any
    weight_scope: Any

    @classmethod
    def from_columns(cls, w: Conv, columns: Columns) -> GroupedTileConfig:
        """Return the configs of columns."""
        return cls(
            ThreadTile.from_columns(w, columns), columns["block_k"], columns["unroll_scope"], columns["weight_scope"]
        )

    def count_products(self, w: Conv) -> Any:
        """Return the number of multiplications per thread in the kernel's source."""
        return self.thread_tile.num_accumulators * self.block_k * self._select_by_unroll_scope(w.kernel[-1], 1)

    def window_vectors(self, w: Conv) -> Any:
        """Return the vectors of an input row that a thread loads per k-tile."""
        columns = self.thread_tile.columns.local
        return self._select_by_unroll_scope(
            count_distinct_inputs(columns, w.stride[-1], w.kernel[-1], w.dilation[-1]), columns
        )

    def count_loaded_vectors(self, w: Conv) -> Any:
        """Return the number of input vectors that a thread loads."""
        k_tiles = (
            math.prod(w.kernel[:-1]) * (w.C // w.groups // self.block_k) * self._select_by_unroll_scope(1, w.kernel[-1])
        )
        return k_tiles * self.thread_tile.rows.local * self.window_vectors(w)

    def count_filter_vectors(self, w: Conv) -> Any:
        """Return the number of filter vectors that a thread reads."""
        channels_per_group = w.C // w.groups
        return math.prod(w.kernel) * np.where(
            np.equal(self.weight_scope, "shared"),
            channels_per_group,
            channels_per_group // self.block_k * self.thread_tile.vector,
        )

    def estimate_issued_instructions(self, w: Conv) -> Any:
        """Return the estimated instructions per thread: products, conversions of operands, guarded loads, stores."""
        strip, channels_per_group, is_16_bit = self.thread_tile, w.C // w.groups, get_element_bytes(w) < WORD_BYTES
        widening_instructions = is_16_bit * (
            self.count_loaded_vectors(w) * self.block_k + math.prod(w.kernel) * channels_per_group * strip.vector
        )
        store_instructions = 4 * strip.rows.local * strip.columns.local * (1 + strip.vector / 4)
        return (
            strip.num_accumulators * math.prod(w.kernel) * channels_per_group
            + widening_instructions
            + 3 * self.count_loaded_vectors(w)
            + self.count_filter_vectors(w)
            + store_instructions
        )

    def estimate_live_registers(self, w: Conv) -> Any:
        """Return the estimated registers per thread: accumulators, the window of a k-tile, the weights of a tap."""
        words_per_element = get_element_bytes(w) / WORD_BYTES
        window_words = self.thread_tile.rows.local * self.window_vectors(w) * self.block_k * words_per_element
        return (
            self.thread_tile.num_accumulators
            + window_words
            + self.block_k * self.thread_tile.vector * words_per_element
        )

    def shared_bytes(self, w: Conv) -> Any:
        """Return the shared memory of a block's filters in bytes."""
        channels = self.thread_tile.channels.thread * self.thread_tile.vector
        return math.prod(w.kernel) * (w.C // w.groups) * channels * get_element_bytes(w)

    def estimate_cycles(self, w: Conv) -> Any:
        """Return the latency estimate that selects the defaults; see `default_config.estimate_cycles`."""
        strip, filter_bytes = self.thread_tile, self.shared_bytes(w)
        is_weight_shared = np.equal(self.weight_scope, "shared")
        copy_instructions = np.where(is_weight_shared, 3 * filter_bytes / get_element_bytes(w) / strip.num_threads, 0)
        return estimate_cycles(
            w,
            strip,
            issued_instructions=self.estimate_issued_instructions(w) + copy_instructions,
            input_vectors=self.count_loaded_vectors(w),
            shared_vectors=np.where(is_weight_shared, self.count_filter_vectors(w), 0),
            scattered_vectors=np.where(is_weight_shared, 0, self.count_filter_vectors(w)),
            filter_bytes=filter_bytes,
        )

    def is_default_allowed(self, w: Conv) -> Any:
        """Return whether the config may be a default."""
        exceeds_shared_memory = np.equal(self.weight_scope, "shared") & (self.shared_bytes(w) > STATIC_SHARED_BYTES)
        return (
            (self.count_products(w) <= MAX_PRODUCTS)
            & (self.estimate_live_registers(w) <= MAX_DEFAULT_LIVE_REGISTERS)
            & ~exceeds_shared_memory
        )

    def _select_by_unroll_scope(self, row_value: Any, tap_value: Any) -> Any:
        """Return one of two values, depending on the unrolled part of the filter."""
        return np.where(np.equal(self.unroll_scope, "row"), row_value, tap_value)


def list_block_k_choices(w: Conv) -> tuple[int, ...]:
    """Return the options for input channels per k-tile: divisors of a group that one load can read."""
    return tuple(d for d in VECTOR_CHOICES if d * get_element_bytes(w) <= MAX_LOAD_BYTES and w.C // w.groups % d == 0)


def declare_knobs(w: Conv, k: Knobs) -> GroupedTileConfig:
    """Declare the knobs, with the defaults of the lowest estimate, and return their values."""
    vector_choices = list_vector_choices(w, lambda v: w.O // w.groups % v == 0)
    defaults = _select_default(w, vector_choices)
    strip = declare_tile_knobs(k, w, vector_choices, defaults)
    block_k = k.choice("block_k", list_block_k_choices(w), defaults["block_k"])
    unroll_scope = k.choice("unroll_scope", UNROLL_SCOPES, defaults["unroll_scope"])
    weight_scope = k.choice("weight_scope", WEIGHT_SCOPES, defaults["weight_scope"])

    add_constraints(k, w, lambda c: GroupedTileConfig.from_columns(w, c))
    return GroupedTileConfig(strip, block_k, unroll_scope, weight_scope)


@functools.lru_cache(maxsize=64)
def _select_default(w: Conv, vector_choices: tuple[int, ...]) -> dict[str, Any]:
    """Return the knobs with the lowest estimate."""

    def list_variants(strip: ThreadTile) -> Iterator[DefaultCandidates]:
        for block_k, unrolled, weight in itertools.product(list_block_k_choices(w), UNROLL_SCOPES, WEIGHT_SCOPES):
            config = GroupedTileConfig(strip, block_k, unrolled, weight)
            yield DefaultCandidates(
                {"block_k": block_k, "unroll_scope": unrolled, "weight_scope": weight},
                config.is_default_allowed(w),
                config.estimate_cycles(w),
            )

    return select_fastest_default(w, vector_choices, list_variants)


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use."""
    return compute_config_usage(w, GroupedTileConfig.from_columns(w, columns))
