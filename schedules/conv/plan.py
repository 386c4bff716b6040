"""What there is to choose in `direct` and `implicit_gemm`, what choices go together, and what they use of a GPU.

A `Plan` holds one config as numbers, or many configs as columns: each formula below is written once, and serves the
schedule, the limits of a search and the cost model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tvmconv.gpu import BANK_BYTES, BANKS, MAX_THREADS_Z, REGISTERS
from tvmconv.knobs import Columns, Knobs, Tile
from tvmconv.knobs.factors import prime_factors
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv

from .tiles import element_bytes

PIPELINES = {"none": 1, "registers": 1, "async2": 2, "async3": 3, "async4": 4}  # copies of what is staged, of each
ASYNC_BYTES = 4  # that an asynchronous copy moves at least
SLICES = (1, 2, 4, 8, 16)
SPLITS = (1, 2, 4, 8, 16, 32)
FEW_BLOCKS = 512  # some blocks for each multiprocessor of the largest GPUs: more gain nothing from a split reduction
PADS = (0, 1, 4)  # words
UNROLLED = (0, 512, 1500)  # statements
VECTOR = 4  # elements that a thread copies at once
SUM_BYTES = 4  # of a float32
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 768  # of a thread in one step, all of them unrolled: more take long to compile and gain nothing
OWN_REGISTERS = 24  # of a thread besides its accumulators, at least
MIN_THREADS = 32
REUSE = 16  # how many times as large as another an array may be for one to take the other's place
OVERHANG = 0.15  # of extents with a large prime factor, whose exact tiles are few
LARGE_PRIME = 7

OUTPUT_LEVELS = ("block", "vthread", "thread", "local")
REDUCTION_LEVELS = ("step", "tap")


class Axis(NamedTuple):
    """An axis that is tiled, and its knob.

    Attributes:
        knob: the knob's name.
        extent: of the axis.
        default: the preferred inner factors, by level.
        lenient: take values of AutoTVM's logs that do not fit the extent.
    """

    knob: str
    extent: int
    default: dict[str, int]
    lenient: bool = False


class Axes(NamedTuple):
    """The axes that tiles are cut from: of the output, channels first, and of the reduction, input channels first."""

    output: tuple[Axis, ...]
    reduction: tuple[Axis, ...]


@dataclass(frozen=True)
class Plan:
    """How a tile is computed.

    Attributes:
        output: for each output axis, a tile of `OUTPUT_LEVELS`.
        reduction: for each reduction axis, a tile of `REDUCTION_LEVELS`, of one slice.
        slices: threads that share the sums of an output.
        pipeline: one of `PIPELINES`.
        fetch: `interleaved`: neighbouring threads copy neighbouring elements to shared memory; `vectors`: likewise, of
            `VECTOR` elements; `blocked`: each thread a contiguous run.
        max_step: up to how many statements the products of a step are unrolled.
        explicit: unrolled by TVM in the text; else by the device's compiler, with `#pragma unroll`.
        weight_layout: `ihwo`: the weight's output channels are its innermost axis in shared memory.
        pad: words by which the rows of a transposed weight are shifted against the banks.
        split_k: blocks that share the sums of a tile.
    """

    output: tuple[Tile, ...]
    reduction: tuple[Tile, ...]
    slices: Any
    pipeline: Any
    fetch: Any
    max_step: Any
    explicit: Any
    weight_layout: Any
    pad: Any
    split_k: Any = 1

    @classmethod
    def ask(cls, k: Knobs, w: Conv, axes: Axes, *, slices: bool, split_k: bool = False) -> Plan:
        """Ask for everything; the defaults of all but the tiles are AutoTVM's only way.

        Args:
            k: the knobs.
            w: the workload.
            axes: which tiles to ask for.
            slices: whether the reduction may be shared among threads.
            split_k: whether it may be shared among blocks.
        """
        dense = w.groups == 1
        plan = cls(
            output=tuple(
                k.tile(axis.knob, axis.extent, OUTPUT_LEVELS, axis.default, overhang=searched_overhang(axis.extent))
                for axis in axes.output
            ),
            reduction=tuple(
                k.tile(axis.knob, axis.extent, REDUCTION_LEVELS, axis.default, exact=True, lenient=axis.lenient)
                for axis in axes.reduction
            ),
            slices=k.choice("slices", [n for n in SLICES if w.C % n == 0] if slices and dense else (1,), 1),
            pipeline=k.choice("pipeline", pipelines(w), "none"),
            fetch=k.choice("fetch", ("blocked", "interleaved"), "blocked"),
            max_step=k.choice("auto_unroll_max_step", UNROLLED, 0),
            explicit=k.choice("unroll_explicit", (0, 1), 0),
            weight_layout=k.choice("weight_layout", ("oihw", "ihwo") if dense else ("oihw",), "oihw"),
            pad=k.choice("weight_pad", PADS, 0),
            split_k=k.choice("split_k", [n for n in SPLITS if axes.reduction[0].extent % n == 0], 1) if split_k else 1,
        )
        plan.demand(k, lambda c: cls.of_columns(c, axes))
        return plan

    @classmethod
    def of_columns(cls, c: Columns, axes: Axes) -> Plan:
        """The plans of many configs."""
        return cls(
            output=tuple(Tile.of_column(axis.extent, OUTPUT_LEVELS, c[axis.knob]) for axis in axes.output),
            reduction=tuple(Tile.of_column(axis.extent, REDUCTION_LEVELS, c[axis.knob]) for axis in axes.reduction),
            slices=c["slices"],
            pipeline=c["pipeline"],
            fetch=c["fetch"],
            max_step=c["auto_unroll_max_step"],
            explicit=c["unroll_explicit"],
            weight_layout=c["weight_layout"],
            pad=c["weight_pad"],
            split_k=c.get("split_k", 1),
        )

    def demand(self, k: Knobs, plan: Callable[[Columns], Plan]) -> None:
        """State what the choices of `plan(columns)` have to fulfil together, and what is worth searching."""
        k.condition(
            "slices need tiles that divide their axes and a multiple of their number of outputs a thread",
            lambda c: (plan(c).slices == 1) | plan(c).slices_fit,
        )
        k.condition(
            "the parts of a split reduction have whole steps",
            lambda c: (
                (plan(c).split_k == 1)
                | (plan(c).reduction[0].extent % (plan(c).split_k * plan(c).reduction[0].tap) == 0)
            ),
        )
        k.search_only(
            "a reduction is split where blocks are few",
            lambda c: (plan(c).split_k == 1) | (plan(c).tiles <= FEW_BLOCKS),
        )
        k.search_only(  # TVM would stage the operands once for each virtual thread
            "virtual threads need tiles that divide their axes",
            lambda c: plan(c).whole | np.all([tile.vthread == 1 for tile in plan(c).output], axis=0),
        )
        if len(self.output) == len("xyz"):
            k.search_only(
                f"at most {MAX_THREADS_Z} threads along z",
                lambda c: plan(c).output[0].thread * plan(c).slices <= MAX_THREADS_Z,
            )
        fewest = min(MIN_THREADS, math.prod(tile.extent for tile in self.output))  # one for each output at most
        k.search_only(f"at least {fewest} threads", lambda c: plan(c).block_threads >= fewest)
        k.search_only(  # unrolled by TVM they are as fast, and take three times as long to compile
            "the products are unrolled by the device's compiler, all or none",
            lambda c: (plan(c).explicit == 0) & np.isin(plan(c).max_step, (0, 1500)),
        )
        k.search_only(
            "only a transposed weight is padded", lambda c: (plan(c).pad == 0) | (plan(c).weight_layout == "ihwo")
        )
        k.search_only("few enough accumulators", lambda c: plan(c).accumulators <= MAX_ACCUMULATORS)
        k.search_only(
            "all threads' registers fit",
            lambda c: (plan(c).accumulators + OWN_REGISTERS) * plan(c).block_threads <= REGISTERS,
        )
        k.search_only(
            "the products of a step are few enough to be unrolled",
            lambda c: plan(c).accumulators * plan(c).taps <= MAX_PRODUCTS,
        )

    @property
    def threads(self) -> tuple[int, ...]:
        """Threads of a block along its axes, x first; the slices are part of the last axis."""
        first, *others = (tile.thread for tile in self.output)
        return (*reversed(others), first * self.slices)

    @property
    def block_threads(self) -> Any:
        """Threads of a block."""
        return math.prod(self.threads)

    @property
    def accumulators(self) -> Any:
        """Partial sums of a thread, over all its virtual threads."""
        return math.prod(tile.local * tile.vthread for tile in self.output)

    @property
    def taps(self) -> Any:
        """Products of one output and slice in one step."""
        return math.prod(tile.tap for tile in self.reduction)

    @property
    def tiles(self) -> Any:
        """Tiles of the output, of one image or group."""
        return math.prod(tile.block for tile in self.output)

    @property
    def whole(self) -> Any:
        """Whether no tile overhangs the output."""
        return np.all([tile.divides for tile in self.output], axis=0)

    @property
    def slices_fit(self) -> Any:
        """Whether the slices can share out the reduction, and at the end the sums of a tile."""
        depth = self.reduction[0]
        locals_of_one = math.prod(tile.local for tile in self.output)
        steps = depth.extent % (self.split_k * self.slices * depth.tap) == 0
        return self.whole & (locals_of_one % self.slices == 0) & steps

    def weight_row(self, w: Conv, channels: Any) -> Any:
        """Elements from one row of a transposed weight to the next; of a weight that is not, its channels."""
        word = BANK_BYTES // element_bytes(w)  # elements
        pad, banks = self.pad * word, BANKS * word
        padded = channels + (pad - channels) % banks * (pad > 0)
        return np.where(self.weight_layout == "ihwo", padded, channels)

    def shared_bytes(self, w: Conv, operands: Sequence[Any]) -> Any:
        """Shared memory of a block.

        Args:
            w: the workload.
            operands: elements of each operand that are staged for one step.
        """
        copies = np.array([PIPELINES[str(name)] for name in np.atleast_1d(self.pipeline)], dtype=np.int64)
        arrays = copies * np.stack(operands) * element_bytes(w)
        # The slices meet in an array of their own, one for each virtual thread. TVM lets it take the place of an
        # operand, which is no longer needed, if their sizes are not too different (tirx.transform.StorageRewrite): of
        # one that has room, or of one that grows for it, which has to be of floats as well.
        meeting = SUM_BYTES * self.slices * math.prod(tile.size * tile.vthread for tile in self.output)
        holds = (arrays >= meeting) & (arrays <= REUSE * meeting)
        grows = np.where(
            (element_bytes(w) == SUM_BYTES) & (arrays < meeting) & (REUSE * arrays >= meeting), arrays, 0
        ).max(axis=0)
        more = np.where(holds.any(axis=0), 0, meeting - grows)
        return arrays.sum(axis=0) + np.where(self.slices > 1, more, 0)

    def usage(self, w: Conv, operands: tuple[Any, Any], outer: int) -> Usage:
        """What configs use of a device.

        Args:
            w: the workload.
            operands: elements of the input and of the weight that are staged for one step.
            outer: blocks along the axes that are not tiled: images, groups.
        """
        blocks = outer * self.split_k * self.tiles
        steps = math.prod(tile.step for tile in self.reduction) // (self.slices * self.split_k)
        products = self.slices * self.taps * math.prod(tile.size for tile in self.output)
        staged = sum(operands)
        return Usage(
            threads=self.block_threads,
            shared_bytes=self.shared_bytes(w, operands),
            accumulators=self.accumulators,
            blocks=blocks,
            steps=steps,
            products=products // self.block_threads,
            staged_words=staged / self.block_threads,
            intensity=products / staged,
            traffic=blocks * steps * staged,
            all_threads=blocks * self.block_threads,
        )


def pipelines(w: Conv) -> tuple[str, ...]:
    """The pipelines that a workload can have: an asynchronous copy is of four bytes at least (PTX ISA, cp.async)."""
    return tuple(name for name in PIPELINES if element_bytes(w) >= ASYNC_BYTES or not name.startswith("async"))


def searched_overhang(extent: int) -> float:
    """Which share of an axis its tiles may overhang to be searched: some, where few tiles divide it."""
    return OVERHANG if any(prime > LARGE_PRIME for prime, _ in prime_factors(extent)) else 0.0
