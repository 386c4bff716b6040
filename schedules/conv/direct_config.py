"""Tile config of `direct` and `implicit_gemm`: knobs, constraints and resource usage.

A `DirectTileConfig` holds one config as numbers or many configs as columns, so that the schedule, the search limits and
the cost model use the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.factors import factorize
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import BANK_BYTES, MAX_THREADS_Z, NUM_BANKS, REGISTERS_PER_MULTIPROCESSOR
from tvmconv.workloads import Conv
from tvmconv.workloads.dtypes import get_itemsize

from .tile_config import Rule, add_rules

PIPELINE_COPIES = {"none": 1, "registers": 1, "async2": 2, "async3": 3, "async4": 4}  # copies of each staged operand
MIN_ASYNC_COPY_BYTES = 4  # minimum bytes of an asynchronous copy
SLICED_K_CHOICES = (1, 2, 4, 8, 16)
SPLIT_K_CHOICES = (1, 2, 4, 8, 16, 32)
MAX_SPLIT_K_BLOCKS = 512  # with more blocks than this, even the largest GPUs gain nothing from a split reduction
WEIGHT_PAD_CHOICES = (0, 1, 4)  # words
UNROLL_CHOICES = (0, 512, 1500)  # statements
VECTOR_ELEMENTS = 4  # elements that a thread copies at once
ACCUMULATOR_BYTES = 4  # bytes of a float32 accumulator
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 768  # unrolled products per thread and k-tile; more compile slowly and gain nothing
OVERHEAD_REGISTERS = 24  # minimum number of registers per thread besides the accumulators
MIN_THREADS = 32
MAX_REUSE_RATIO = 16  # maximum size ratio of two arrays that share memory (tirx.transform.StorageRewrite)
MAX_OVERHANG_FRACTION = 0.15  # for extents with a large prime factor, which have few exact tiles
LARGE_PRIME = 7

OUTPUT_LEVELS = ("block", "vthread", "thread", "local")
REDUCTION_LEVELS = ("step", "tap")


class TiledAxis(NamedTuple):
    """An axis that is tiled, and its knob."""

    knob_name: str
    extent: int
    default_factors: dict[str, int]  # preferred inner factors by level
    allow_mismatch: bool = False  # whether values from AutoTVM's logs that do not fit the extent are accepted


class TiledAxes(NamedTuple):
    """Tiled axes of the output, channels first, and of the reduction, input channels first."""

    output: tuple[TiledAxis, ...]
    reduction: tuple[TiledAxis, ...]


@dataclass(frozen=True)
class DirectTileConfig:
    """Tiles of the output and of the reduction, and the options of the kernel."""

    output: tuple[Tile, ...]  # a tile of `OUTPUT_LEVELS` for each output axis
    reduction: tuple[Tile, ...]  # a tile of `REDUCTION_LEVELS` for each reduction axis, within one slice
    sliced_k: Any  # threads that share the reduction of an output
    pipeline: Any  # one of `PIPELINE_COPIES`
    # Thread-to-element order of copies to shared memory. `coalesced`: neighbouring threads copy neighbouring elements.
    # `vectorized`: the same with `VECTOR_ELEMENTS` elements each. `contiguous`: each thread copies a contiguous run.
    copy_order: Any
    max_unrolled_statements: Any  # maximum number of statements to which the products of a k-tile are unrolled
    # Whether TVM unrolls in the source; otherwise the device's compiler does, by `#pragma unroll`.
    unrolls_explicitly: Any
    weight_layout: Any  # with `ihwo`, output channels are the innermost axis of the weight in shared memory
    weight_pad_words: Any  # words by which the rows of a transposed weight are shifted against the banks
    split_k: Any = 1  # blocks that share the reduction of a tile

    @classmethod
    def declare_knobs(
        cls, k: Knobs, w: Conv, axes: TiledAxes, *, allow_sliced_k: bool, allow_split_k: bool = False
    ) -> DirectTileConfig:
        """Declare all knobs and return their values; except for the tiles, the defaults are what AutoTVM does."""
        is_dense = w.groups == 1
        for axis in axes.output:
            overhang = select_max_overhang(axis.extent)
            k.tile(axis.knob_name, axis.extent, OUTPUT_LEVELS, axis.default_factors, overhang=overhang)
        for axis in axes.reduction:
            options = {"exact": True, "allow_mismatch": axis.allow_mismatch}
            k.tile(axis.knob_name, axis.extent, REDUCTION_LEVELS, axis.default_factors, **options)
        slices = [n for n in SLICED_K_CHOICES if w.C % n == 0] if allow_sliced_k and is_dense else (1,)
        k.choice("sliced_k", slices, 1)
        k.choice("pipeline", list_pipelines(w), "none")
        k.choice("copy_order", ("contiguous", "coalesced"), "contiguous")
        k.choice("auto_unroll_max_step", UNROLL_CHOICES, 0)
        k.choice("unroll_explicit", (0, 1), 0)
        k.choice("weight_layout", ("oihw", "ihwo") if is_dense else ("oihw",), "oihw")
        k.choice("weight_pad", WEIGHT_PAD_CHOICES, 0)
        if allow_split_k:
            k.choice("split_k", [n for n in SPLIT_K_CHOICES if axes.reduction[0].extent % n == 0], 1)
        config = cls.from_columns(k.values, axes)
        config.add_constraints(k, lambda c: cls.from_columns(c, axes))
        return config

    @classmethod
    def from_columns(cls, columns: Columns, axes: TiledAxes) -> DirectTileConfig:
        """Return the config of the knobs' values, or the configs of many."""
        output, reduction = (
            tuple(Tile.from_column(axis.extent, levels, columns[axis.knob_name]) for axis in own_axes)
            for levels, own_axes in ((OUTPUT_LEVELS, axes.output), (REDUCTION_LEVELS, axes.reduction))
        )
        return cls.from_tiles(output, reduction, columns)

    @classmethod
    def from_tiles(cls, output: tuple[Tile, ...], reduction: tuple[Tile, ...], columns: Columns) -> DirectTileConfig:
        """Return the configs of tiles and of the other knobs; those of the weight and `split_k` may be absent."""
        return cls(
            output,
            reduction,
            sliced_k=columns["sliced_k"],
            pipeline=columns["pipeline"],
            copy_order=columns["copy_order"],
            max_unrolled_statements=columns["auto_unroll_max_step"],
            unrolls_explicitly=columns["unroll_explicit"],
            weight_layout=columns.get("weight_layout", "oihw"),
            weight_pad_words=columns.get("weight_pad", 0 * columns["sliced_k"]),
            split_k=columns.get("split_k", 1),
        )

    def add_constraints(self, k: Knobs, make_config: Callable[[Columns], DirectTileConfig]) -> None:
        """Add the constraints between knobs, and prune configs that are not worth searching."""
        required: list[Rule] = [
            (
                "sliced reductions have exact tiles, whole k-tiles, and outputs per thread divisible by the slices",
                lambda t: (t.sliced_k == 1) | t.can_slice_reduction,
            ),
            (
                "the parts of a split reduction have whole k-tiles",
                lambda t: (t.split_k == 1) | (t.reduction[0].extent % (t.split_k * t.reduction[0].tap) == 0),
            ),
        ]
        fits_z: Rule = (
            f"at most {MAX_THREADS_Z} threads along z",
            lambda t: t.output[0].thread * t.sliced_k <= MAX_THREADS_Z,
        )
        min_threads = min(MIN_THREADS, math.prod(tile.extent for tile in self.output))  # at most one for each output
        pruned: list[Rule] = [
            (
                "a reduction is split only if blocks are few",
                lambda t: (t.split_k == 1) | (t.num_tiles <= MAX_SPLIT_K_BLOCKS),
            ),
            (  # otherwise TVM stages the operands once for each virtual thread
                "virtual threads need tiles that divide their axes",
                lambda t: t.is_exact | np.all([tile.vthread == 1 for tile in t.output], axis=0),
            ),
            *([fits_z] if len(self.output) == len("xyz") else []),
            (f"at least {min_threads} threads", lambda t: t.num_threads >= min_threads),
            (  # unrolling by TVM is as fast, but takes three times as long to compile
                "the device's compiler unrolls all products or none",
                lambda t: (t.unrolls_explicitly == 0) & np.isin(t.max_unrolled_statements, (0, 1500)),
            ),
            (
                "only a transposed weight is padded",
                lambda t: (t.weight_pad_words == 0) | (t.weight_layout == "ihwo"),
            ),
            (f"at most {MAX_ACCUMULATORS} accumulators per thread", lambda t: t.num_accumulators <= MAX_ACCUMULATORS),
            (
                "the registers of all threads fit",
                lambda t: (t.num_accumulators + OVERHEAD_REGISTERS) * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR,
            ),
            (
                f"at most {MAX_PRODUCTS} unrolled products per thread and k-tile",
                lambda t: t.num_accumulators * t.taps_per_k_tile <= MAX_PRODUCTS,
            ),
        ]
        add_rules(k, make_config, required, pruned)

    @property
    def thread_shape(self) -> tuple[int, ...]:
        """Threads per block along its axes, x first; the slices are part of the last axis."""
        first_threads, *other_threads = (tile.thread for tile in self.output)
        return (*reversed(other_threads), first_threads * self.sliced_k)

    @property
    def num_threads(self) -> Any:
        """Threads per block."""
        return math.prod(self.thread_shape)

    @property
    def num_accumulators(self) -> Any:
        """Accumulators per thread, over all its virtual threads."""
        return math.prod(tile.local * tile.vthread for tile in self.output)

    @property
    def taps_per_k_tile(self) -> Any:
        """Products per output, slice and k-tile."""
        return math.prod(tile.tap for tile in self.reduction)

    @property
    def num_tiles(self) -> Any:
        """Output tiles per image or group."""
        return math.prod(tile.block for tile in self.output)

    @property
    def is_exact(self) -> Any:
        """Whether no tile overhangs the output."""
        return np.all([tile.divides for tile in self.output], axis=0)

    @property
    def can_slice_reduction(self) -> Any:
        """Whether the slices can divide the reduction evenly, and a tile's sums at the end."""
        channel_tile = self.reduction[0]
        outputs_per_thread = math.prod(tile.local for tile in self.output)
        has_whole_k_tiles = channel_tile.extent % (self.split_k * self.sliced_k * channel_tile.tap) == 0
        return self.is_exact & (outputs_per_thread % self.sliced_k == 0) & has_whole_k_tiles

    def weight_row_elements(self, w: Conv, num_channels: Any) -> Any:
        """Return the elements per row of a transposed weight, including padding; otherwise the number of channels."""
        elements_per_word = BANK_BYTES // get_itemsize(w.storage)
        pad_elements, bank_elements = self.weight_pad_words * elements_per_word, NUM_BANKS * elements_per_word
        padded_elements = num_channels + (pad_elements - num_channels) % bank_elements * (pad_elements > 0)
        return np.where(self.weight_layout == "ihwo", padded_elements, num_channels)

    def shared_bytes(self, w: Conv, operand_elements: Sequence[Any]) -> Any:
        """Return the shared memory per block in bytes."""
        num_copies = np.array([PIPELINE_COPIES[str(name)] for name in np.atleast_1d(self.pipeline)], dtype=np.int64)
        operand_bytes = num_copies * np.stack(operand_elements) * get_itemsize(w.storage)
        # The slices are reduced in a separate array per virtual thread. TVM places it in the memory of an operand that
        # is no longer needed if their sizes are similar (tirx.transform.StorageRewrite): in a larger operand, or in a
        # smaller one of floats, which grows.
        reduction_bytes = (
            ACCUMULATOR_BYTES * self.sliced_k * math.prod(tile.size * tile.vthread for tile in self.output)
        )
        has_room = (operand_bytes >= reduction_bytes) & (operand_bytes <= MAX_REUSE_RATIO * reduction_bytes)
        grown_bytes = np.where(
            (get_itemsize(w.storage) == ACCUMULATOR_BYTES)
            & (operand_bytes < reduction_bytes)
            & (MAX_REUSE_RATIO * operand_bytes >= reduction_bytes),
            operand_bytes,
            0,
        ).max(axis=0)
        extra_bytes = np.where(has_room.any(axis=0), 0, reduction_bytes - grown_bytes)
        return operand_bytes.sum(axis=0) + np.where(self.sliced_k > 1, extra_bytes, 0)

    def compute_usage(self, w: Conv, operand_elements: tuple[Any, Any], num_outer_blocks: int) -> ResourceUsage:
        """Return the resources that configs use.

        The operands are the input and the weight, `num_outer_blocks` the blocks along images and groups.
        """
        num_blocks = num_outer_blocks * self.split_k * self.num_tiles
        k_tiles = math.prod(tile.step for tile in self.reduction) // (self.sliced_k * self.split_k)
        macs_per_k_tile = self.sliced_k * self.taps_per_k_tile * math.prod(tile.size for tile in self.output)
        staged_elements = sum(operand_elements)
        return ResourceUsage(
            threads=self.num_threads,
            shared_bytes=self.shared_bytes(w, operand_elements),
            accumulators=self.num_accumulators,
            blocks=num_blocks,
            steps=k_tiles,
            products=macs_per_k_tile // self.num_threads,
            staged_elements=staged_elements / self.num_threads,
            intensity=macs_per_k_tile / staged_elements,
            traffic=num_blocks * k_tiles * staged_elements,
            all_threads=num_blocks * self.num_threads,
        )


def list_pipelines(w: Conv) -> tuple[str, ...]:
    """Return the pipelines for a workload; asynchronous copies have at least four bytes (PTX ISA, cp.async)."""
    return tuple(
        name
        for name in PIPELINE_COPIES
        if get_itemsize(w.storage) >= MIN_ASYNC_COPY_BYTES or not name.startswith("async")
    )


def select_max_overhang(extent: int) -> float:
    """Return the maximum overhang of searched tiles as a fraction of the extent; 0 if enough tiles divide it."""
    return MAX_OVERHANG_FRACTION if any(prime > LARGE_PRIME for prime, _ in factorize(extent)) else 0.0
