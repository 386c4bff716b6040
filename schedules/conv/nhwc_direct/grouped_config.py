"""How `grouped_nhwc` computes a convolution: its knobs, what they take, and the defaults."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.gpu_specs import STATIC_SHARED_BYTES
from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
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

UNROLL_SCOPES = ("row", "tap")  # what of the filter is unrolled: a row at a time, or nothing
WEIGHT_SCOPES = ("shared", "global")
MAX_DEFAULT_LIVE_REGISTERS = 128  # registers, see `MAX_HELD`


@dataclass(frozen=True)
class GroupedTileConfig:
    """How the convolution is computed; one config, or columns of many.

    Attributes:
        thread_tile: what a thread computes.
        block_k: input channels of a step.
        unroll_scope: of the filter, one of `UNROLL_SCOPES`.
        weight_scope: where threads read the filters, one of `WEIGHT_SCOPES`.
    """

    thread_tile: ThreadTile
    block_k: Any
    unroll_scope: Any
    weight_scope: Any

    @classmethod
    def from_columns(cls, w: Conv, columns: Columns) -> GroupedTileConfig:
        """The plans of many configs."""
        return cls(ThreadTile.from_columns(w, columns), columns["depth"], columns["unrolled"], columns["weight"])

    def count_products(self, w: Conv) -> Any:
        """Multiplications of a thread in the kernel's text."""
        return self.thread_tile.num_accumulators * self.block_k * self._select_by_unroll_scope(w.kernel[-1], 1)

    def window_vectors(self, w: Conv) -> Any:
        """Vectors of an input line that a thread loads in a step."""
        columns = self.thread_tile.columns.local
        return self._select_by_unroll_scope(
            count_distinct_inputs(columns, w.stride[-1], w.kernel[-1], w.dilation[-1]), columns
        )

    def count_loaded_vectors(self, w: Conv) -> Any:
        """Vectors of the input that a thread loads."""
        k_tiles = (
            math.prod(w.kernel[:-1]) * (w.C // w.groups // self.block_k) * self._select_by_unroll_scope(1, w.kernel[-1])
        )
        return k_tiles * self.thread_tile.rows.local * self.window_vectors(w)

    def count_filter_vectors(self, w: Conv) -> Any:
        """Vectors of the filters that a thread reads."""
        channels_per_group = w.C // w.groups
        return math.prod(w.kernel) * np.where(
            np.equal(self.weight_scope, "shared"),
            channels_per_group,
            channels_per_group // self.block_k * self.thread_tile.vector,
        )

    def estimate_issued_instructions(self, w: Conv) -> Any:
        """Instructions of a thread, about: products, operands that are widened, loads with their tests, stores."""
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
        """Registers of a thread for its sums, the window of a step, and the weights of a tap."""
        words_per_element = get_element_bytes(w) / WORD_BYTES
        window_words = self.thread_tile.rows.local * self.window_vectors(w) * self.block_k * words_per_element
        return (
            self.thread_tile.num_accumulators
            + window_words
            + self.block_k * self.thread_tile.vector * words_per_element
        )

    def shared_bytes(self, w: Conv) -> Any:
        """Shared memory of a block for its filters."""
        channels = self.thread_tile.channels.thread * self.thread_tile.vector
        return math.prod(w.kernel) * (w.C // w.groups) * channels * get_element_bytes(w)

    def estimate_cycles(self, w: Conv) -> Any:
        """An estimate to choose defaults by; see `estimate_cycles`."""
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
        """Whether a default may be so."""
        exceeds_shared_memory = np.equal(self.weight_scope, "shared") & (self.shared_bytes(w) > STATIC_SHARED_BYTES)
        return (
            (self.count_products(w) <= MAX_PRODUCTS)
            & (self.estimate_live_registers(w) <= MAX_DEFAULT_LIVE_REGISTERS)
            & ~exceeds_shared_memory
        )

    def _select_by_unroll_scope(self, row_value: Any, tap_value: Any) -> Any:
        """One of two numbers, by what is unrolled."""
        return np.where(np.equal(self.unroll_scope, "row"), row_value, tap_value)


def list_block_k_choices(w: Conv) -> tuple[int, ...]:
    """The numbers of input channels that a step may have: those of one load at most that divide a group."""
    return tuple(d for d in VECTOR_CHOICES if d * get_element_bytes(w) <= MAX_LOAD_BYTES and w.C // w.groups % d == 0)


def declare_knobs(w: Conv, k: Knobs) -> GroupedTileConfig:
    """The plan, from knobs; the defaults are those of the least estimate."""
    vector_choices = list_vector_choices(w, lambda v: w.O // w.groups % v == 0)
    defaults = _select_default(w, vector_choices)
    strip = declare_tile_knobs(k, w, vector_choices, defaults)
    block_k = k.choice("depth", list_block_k_choices(w), defaults["depth"])
    unroll_scope = k.choice("unrolled", UNROLL_SCOPES, defaults["unrolled"])
    weight_scope = k.choice("weight", WEIGHT_SCOPES, defaults["weight"])

    add_constraints(k, w, lambda c: GroupedTileConfig.from_columns(w, c))
    return GroupedTileConfig(strip, block_k, unroll_scope, weight_scope)


@functools.lru_cache(maxsize=64)
def _select_default(w: Conv, vector_choices: tuple[int, ...]) -> dict[str, Any]:
    """The knobs of the least estimate."""

    def list_variants(strip: ThreadTile) -> Iterator[DefaultCandidates]:
        for block_k, unrolled, weight in itertools.product(list_block_k_choices(w), UNROLL_SCOPES, WEIGHT_SCOPES):
            config = GroupedTileConfig(strip, block_k, unrolled, weight)
            yield DefaultCandidates(
                {"depth": block_k, "unrolled": unrolled, "weight": weight},
                config.is_default_allowed(w),
                config.estimate_cycles(w),
            )

    return select_fastest_default(w, vector_choices, list_variants)


def compute_usage(w: Conv, columns: Columns) -> ResourceUsage:
    """What configs use of a device."""
    return compute_config_usage(w, GroupedTileConfig.from_columns(w, columns))
