"""What there is to choose in `direct` and `implicit_gemm`, what choices go together, and what they use of a GPU.

A `DirectTileConfig` holds one config as numbers, or many configs as columns: each formula below is written once, and
serves the schedule, the limits of a search and the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tvmconv.gpu_specs import BANK_BYTES, MAX_THREADS_Z, NUM_BANKS, REGISTERS_PER_MULTIPROCESSOR
from tvmconv.space import Columns, Knobs, Tile
from tvmconv.space.factors import factorize
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv

from .axis_tiles import get_element_bytes

PIPELINE_COPIES = {
    "none": 1,
    "registers": 1,
    "async2": 2,
    "async3": 3,
    "async4": 4,
}  # copies of what is staged, of each
MIN_ASYNC_COPY_BYTES = 4  # that an asynchronous copy moves at least
SLICED_K_CHOICES = (1, 2, 4, 8, 16)
SPLIT_K_CHOICES = (1, 2, 4, 8, 16, 32)
MAX_SPLIT_K_BLOCKS = (
    512  # some blocks for each multiprocessor of the largest GPUs: more gain nothing from a split reduction
)
WEIGHT_PAD_CHOICES = (0, 1, 4)  # words
UNROLL_CHOICES = (0, 512, 1500)  # statements
VECTOR_ELEMENTS = 4  # elements that a thread copies at once
ACCUMULATOR_BYTES = 4  # of a float32
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 768  # of a thread in one step, all of them unrolled: more take long to compile and gain nothing
OVERHEAD_REGISTERS = 24  # of a thread besides its accumulators, at least
MIN_THREADS = 32
MAX_REUSE_RATIO = 16  # how many times as large as another an array may be for one to take the other's place
MAX_OVERHANG_FRACTION = 0.15  # of extents with a large prime factor, whose exact tiles are few
LARGE_PRIME = 7

OUTPUT_LEVELS = ("block", "vthread", "thread", "local")
REDUCTION_LEVELS = ("step", "tap")


class TiledAxis(NamedTuple):
    """An axis that is tiled, and its knob.

    Attributes:
        knob_name: the knob's name.
        extent: of the axis.
        default_factors: the preferred inner factors, by level.
        allow_mismatch: take values of AutoTVM's logs that do not fit the extent.
    """

    knob_name: str
    extent: int
    default_factors: dict[str, int]
    allow_mismatch: bool = False


class TiledAxes(NamedTuple):
    """The axes that tiles are cut from: of the output, channels first, and of the reduction, input channels first."""

    output: tuple[TiledAxis, ...]
    reduction: tuple[TiledAxis, ...]


@dataclass(frozen=True)
class DirectTileConfig:
    """How a tile is computed.

    Attributes:
        output: for each output axis, a tile of `OUTPUT_LEVELS`.
        reduction: for each reduction axis, a tile of `REDUCTION_LEVELS`, of one slice.
        sliced_k: threads that share the sums of an output.
        pipeline: one of `PIPELINE_COPIES`.
        copy_order: `interleaved`: neighbouring threads copy neighbouring elements to shared memory; `vectors`:
            likewise, of `VECTOR_ELEMENTS` elements; `blocked`: each thread a contiguous run.
        max_unrolled_statements: up to how many statements the products of a step are unrolled.
        unrolls_explicitly: unrolled by TVM in the text; else by the device's compiler, with `#pragma unroll`.
        weight_layout: `ihwo`: the weight's output channels are its innermost axis in shared memory.
        weight_pad_words: words by which the rows of a transposed weight are shifted against the banks.
        split_k: blocks that share the sums of a tile.
    """

    output: tuple[Tile, ...]
    reduction: tuple[Tile, ...]
    sliced_k: Any
    pipeline: Any
    copy_order: Any
    max_unrolled_statements: Any
    unrolls_explicitly: Any
    weight_layout: Any
    weight_pad_words: Any
    split_k: Any = 1

    @classmethod
    def declare_knobs(
        cls, k: Knobs, w: Conv, axes: TiledAxes, *, allow_sliced_k: bool, allow_split_k: bool = False
    ) -> DirectTileConfig:
        """Ask for everything; the defaults of all but the tiles are AutoTVM's only way.

        Args:
            k: the knobs.
            w: the workload.
            axes: which tiles to ask for.
            allow_sliced_k: whether the reduction may be shared among threads.
            allow_split_k: whether it may be shared among blocks.
        """
        is_dense = w.groups == 1
        config = cls(
            output=tuple(
                k.tile(
                    axis.knob_name,
                    axis.extent,
                    OUTPUT_LEVELS,
                    axis.default_factors,
                    overhang=select_max_overhang(axis.extent),
                )
                for axis in axes.output
            ),
            reduction=tuple(
                k.tile(
                    axis.knob_name,
                    axis.extent,
                    REDUCTION_LEVELS,
                    axis.default_factors,
                    exact=True,
                    allow_mismatch=axis.allow_mismatch,
                )
                for axis in axes.reduction
            ),
            sliced_k=k.choice(
                "slices", [n for n in SLICED_K_CHOICES if w.C % n == 0] if allow_sliced_k and is_dense else (1,), 1
            ),
            pipeline=k.choice("pipeline", list_pipelines(w), "none"),
            copy_order=k.choice("fetch", ("blocked", "interleaved"), "blocked"),
            max_unrolled_statements=k.choice("auto_unroll_max_step", UNROLL_CHOICES, 0),
            unrolls_explicitly=k.choice("unroll_explicit", (0, 1), 0),
            weight_layout=k.choice("weight_layout", ("oihw", "ihwo") if is_dense else ("oihw",), "oihw"),
            weight_pad_words=k.choice("weight_pad", WEIGHT_PAD_CHOICES, 0),
            split_k=k.choice("split_k", [n for n in SPLIT_K_CHOICES if axes.reduction[0].extent % n == 0], 1)
            if allow_split_k
            else 1,
        )
        config.add_constraints(k, lambda c: cls.from_columns(c, axes))
        return config

    @classmethod
    def from_columns(cls, columns: Columns, axes: TiledAxes) -> DirectTileConfig:
        """The plans of many configs."""
        return cls(
            output=tuple(Tile.from_column(axis.extent, OUTPUT_LEVELS, columns[axis.knob_name]) for axis in axes.output),
            reduction=tuple(
                Tile.from_column(axis.extent, REDUCTION_LEVELS, columns[axis.knob_name]) for axis in axes.reduction
            ),
            sliced_k=columns["slices"],
            pipeline=columns["pipeline"],
            copy_order=columns["fetch"],
            max_unrolled_statements=columns["auto_unroll_max_step"],
            unrolls_explicitly=columns["unroll_explicit"],
            weight_layout=columns["weight_layout"],
            weight_pad_words=columns["weight_pad"],
            split_k=columns.get("split_k", 1),
        )

    def add_constraints(self, k: Knobs, config_from_columns: Callable[[Columns], DirectTileConfig]) -> None:
        """State what the choices of `config_from_columns(columns)` have to fulfil together, and what is worth
        searching.
        """
        k.require(
            "slices need tiles that divide their axes and a multiple of their number of outputs a thread",
            lambda c: (config_from_columns(c).sliced_k == 1) | config_from_columns(c).can_slice_reduction,
        )
        k.require(
            "the parts of a split reduction have whole steps",
            lambda c: (
                (config_from_columns(c).split_k == 1)
                | (
                    config_from_columns(c).reduction[0].extent
                    % (config_from_columns(c).split_k * config_from_columns(c).reduction[0].tap)
                    == 0
                )
            ),
        )
        k.prune(
            "a reduction is split where blocks are few",
            lambda c: (config_from_columns(c).split_k == 1) | (config_from_columns(c).num_tiles <= MAX_SPLIT_K_BLOCKS),
        )
        k.prune(  # TVM would stage the operands once for each virtual thread
            "virtual threads need tiles that divide their axes",
            lambda c: (
                config_from_columns(c).is_exact
                | np.all([tile.vthread == 1 for tile in config_from_columns(c).output], axis=0)
            ),
        )
        if len(self.output) == len("xyz"):
            k.prune(
                f"at most {MAX_THREADS_Z} threads along z",
                lambda c: config_from_columns(c).output[0].thread * config_from_columns(c).sliced_k <= MAX_THREADS_Z,
            )
        min_threads = min(MIN_THREADS, math.prod(tile.extent for tile in self.output))  # one for each output at most
        k.prune(f"at least {min_threads} threads", lambda c: config_from_columns(c).num_threads >= min_threads)
        k.prune(  # unrolled by TVM they are as fast, and take three times as long to compile
            "the products are unrolled by the device's compiler, all or none",
            lambda c: (
                (config_from_columns(c).unrolls_explicitly == 0)
                & np.isin(config_from_columns(c).max_unrolled_statements, (0, 1500))
            ),
        )
        k.prune(
            "only a transposed weight is padded",
            lambda c: (config_from_columns(c).weight_pad_words == 0) | (config_from_columns(c).weight_layout == "ihwo"),
        )
        k.prune("few enough accumulators", lambda c: config_from_columns(c).num_accumulators <= MAX_ACCUMULATORS)
        k.prune(
            "all threads' registers fit",
            lambda c: (
                (config_from_columns(c).num_accumulators + OVERHEAD_REGISTERS) * config_from_columns(c).num_threads
                <= REGISTERS_PER_MULTIPROCESSOR
            ),
        )
        k.prune(
            "the products of a step are few enough to be unrolled",
            lambda c: config_from_columns(c).num_accumulators * config_from_columns(c).taps_per_k_tile <= MAX_PRODUCTS,
        )

    @property
    def thread_shape(self) -> tuple[int, ...]:
        """Threads of a block along its axes, x first; the slices are part of the last axis."""
        first_threads, *other_threads = (tile.thread for tile in self.output)
        return (*reversed(other_threads), first_threads * self.sliced_k)

    @property
    def num_threads(self) -> Any:
        """Threads of a block."""
        return math.prod(self.thread_shape)

    @property
    def num_accumulators(self) -> Any:
        """Partial sums of a thread, over all its virtual threads."""
        return math.prod(tile.local * tile.vthread for tile in self.output)

    @property
    def taps_per_k_tile(self) -> Any:
        """Products of one output and slice in one step."""
        return math.prod(tile.tap for tile in self.reduction)

    @property
    def num_tiles(self) -> Any:
        """Tiles of the output, of one image or group."""
        return math.prod(tile.block for tile in self.output)

    @property
    def is_exact(self) -> Any:
        """Whether no tile overhangs the output."""
        return np.all([tile.divides for tile in self.output], axis=0)

    @property
    def can_slice_reduction(self) -> Any:
        """Whether the slices can share out the reduction, and at the end the sums of a tile."""
        channel_tile = self.reduction[0]
        outputs_per_thread = math.prod(tile.local for tile in self.output)
        has_whole_k_tiles = channel_tile.extent % (self.split_k * self.sliced_k * channel_tile.tap) == 0
        return self.is_exact & (outputs_per_thread % self.sliced_k == 0) & has_whole_k_tiles

    def weight_row_elements(self, w: Conv, num_channels: Any) -> Any:
        """Elements from one row of a transposed weight to the next; of a weight that is not, its channels."""
        elements_per_word = BANK_BYTES // get_element_bytes(w)  # elements
        pad_elements, bank_elements = self.weight_pad_words * elements_per_word, NUM_BANKS * elements_per_word
        padded_elements = num_channels + (pad_elements - num_channels) % bank_elements * (pad_elements > 0)
        return np.where(self.weight_layout == "ihwo", padded_elements, num_channels)

    def shared_bytes(self, w: Conv, operand_elements: Sequence[Any]) -> Any:
        """Shared memory of a block.

        Args:
            w: the workload.
            operand_elements: elements of each operand that are staged for one step.
        """
        num_copies = np.array([PIPELINE_COPIES[str(name)] for name in np.atleast_1d(self.pipeline)], dtype=np.int64)
        operand_bytes = num_copies * np.stack(operand_elements) * get_element_bytes(w)
        # The slices meet in an array of their own, one for each virtual thread. TVM lets it take the place of an
        # operand, which is no longer needed, if their sizes are not too different (tirx.transform.StorageRewrite): of
        # one that has room, or of one that grows for it, which has to be of floats as well.
        reduction_bytes = (
            ACCUMULATOR_BYTES * self.sliced_k * math.prod(tile.size * tile.vthread for tile in self.output)
        )
        has_room = (operand_bytes >= reduction_bytes) & (operand_bytes <= MAX_REUSE_RATIO * reduction_bytes)
        grown_bytes = np.where(
            (get_element_bytes(w) == ACCUMULATOR_BYTES)
            & (operand_bytes < reduction_bytes)
            & (MAX_REUSE_RATIO * operand_bytes >= reduction_bytes),
            operand_bytes,
            0,
        ).max(axis=0)
        extra_bytes = np.where(has_room.any(axis=0), 0, reduction_bytes - grown_bytes)
        return operand_bytes.sum(axis=0) + np.where(self.sliced_k > 1, extra_bytes, 0)

    def compute_usage(self, w: Conv, operand_elements: tuple[Any, Any], num_outer_blocks: int) -> ResourceUsage:
        """What configs use of a device.

        Args:
            w: the workload.
            operand_elements: elements of the input and of the weight that are staged for one step.
            num_outer_blocks: blocks along the axes that are not tiled: images, groups.
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
            staged_words=staged_elements / self.num_threads,
            intensity=macs_per_k_tile / staged_elements,
            traffic=num_blocks * k_tiles * staged_elements,
            all_threads=num_blocks * self.num_threads,
        )


def list_pipelines(w: Conv) -> tuple[str, ...]:
    """The pipelines that a workload can have: an asynchronous copy is of four bytes at least (PTX ISA, cp.async)."""
    return tuple(
        name for name in PIPELINE_COPIES if get_element_bytes(w) >= MIN_ASYNC_COPY_BYTES or not name.startswith("async")
    )


def select_max_overhang(extent: int) -> float:
    """Which share of an axis its tiles may overhang to be searched: some, where few tiles divide it."""
    return MAX_OVERHANG_FRACTION if any(prime > LARGE_PRIME for prime, _ in factorize(extent)) else 0.0
