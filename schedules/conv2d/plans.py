"""What there is to choose in `direct` and `implicit_gemm`, what choices go together, and what they use of a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.factors import prime_factors
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv2d

from .tiles import WORD, Factors

PIPELINES = {"none": 1, "registers": 1, "async2": 2, "async3": 3, "async4": 4}  # copies of what is staged, of each
SLICES = (1, 2, 4, 8, 16)
BANKS = 32
PADS = (0, 1, 4)
MAX_ACCUMULATORS = 128
MAX_PRODUCTS = 768  # of a thread in one step, all of them unrolled: more take long to compile and gain nothing
REGISTERS = 65536  # of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications"
OWN_REGISTERS = 24  # of a thread besides its accumulators, at least
MIN_THREADS = 32
REUSE = 16  # how many times as large as another an array may be for one to take the other's place
MAX_Z = 64  # threads of a block along z: as above
OVERHANG = 0.15  # of extents with a large prime factor, whose exact tiles are few
LARGE_PRIME = 7


class How(NamedTuple):
    """Everything but the tiles.

    Attributes:
        slices: threads that share the sums of an output.
        pipeline: one of `PIPELINES`.
        interleaved: neighbouring threads copy neighbouring elements to shared memory; else each a contiguous run.
        max_step: up to how many statements the products of a step are unrolled.
        explicit: unrolled by TVM in the text; else by the device's compiler, with `#pragma unroll`.
        transposed: the weight's output channels are its innermost axis in shared memory.
        pad: words by which the rows of a transposed weight are shifted against the banks.
    """

    slices: int
    pipeline: str
    interleaved: bool
    max_step: int
    explicit: bool
    transposed: bool
    pad: int


@dataclass(frozen=True)
class Plan:
    """How a tile is computed.

    Attributes:
        spatial: for each output axis, factors (block, virtual thread, thread, local).
        reduction: for each reduction axis, input channels first, factors (step, tap) of one slice.
        how: the rest.
    """

    spatial: tuple[Factors, ...]
    reduction: tuple[Factors, ...]
    how: How

    @property
    def threads(self) -> tuple[int, ...]:
        """Threads of a block along its axes, x first; the slices are part of the last axis."""
        first, *others = (thread for _, _, thread, _ in self.spatial)
        return (*reversed(others), first * self.how.slices)


def ask_how(k: Knobs, w: Conv2d, *, slices: bool) -> How:
    """Ask for everything but the tiles; the defaults are AutoTVM's only way.

    Args:
        k: the knobs.
        w: the workload.
        slices: whether the reduction may be shared among threads.
    """
    return How(
        slices=k.choice("slices", [n for n in SLICES if w.C % n == 0] if slices and w.groups == 1 else (1,), 1),
        pipeline=k.choice("pipeline", tuple(PIPELINES), "none"),
        interleaved=k.choice("fetch", ("blocked", "interleaved"), "blocked") == "interleaved",
        max_step=k.choice("auto_unroll_max_step", (0, 512, 1500), 0),
        explicit=bool(k.choice("unroll_explicit", (0, 1), 0)),
        transposed=k.choice("weight_layout", ("oihw", "ihwo") if w.groups == 1 else ("oihw",), "oihw") == "ihwo",
        pad=k.choice("weight_pad", PADS, 0),
    )


def demand(k: Knobs, extents: Mapping[str, int], spatial: Sequence[str], reduction: Sequence[str]) -> None:
    """State what the tiles and slices have to fulfil together, and what is worth searching.

    Args:
        k: the knobs, which have all been asked for.
        extents: of the axes, by the names of their knobs.
        spatial: knobs of the output tiles.
        reduction: knobs of the reduction tiles, input channels first.
    """
    channels = reduction[0]

    def whole(c: Columns) -> np.ndarray:
        divided = [extents[axis] % tile(c, axis) == 0 for axis in spatial]
        shared_out = accumulators(c, spatial, virtual=False) % c["slices"] == 0
        steps = extents[channels] % (c["slices"] * tile(c, channels)) == 0
        return (c["slices"] == 1) | (np.all(divided, axis=0) & shared_out & steps)

    k.condition("slices need tiles that divide their axes and a multiple of their number of outputs a thread", whole)
    k.search_only(  # TVM would stage the operands once for each virtual thread
        "virtual threads need tiles that divide their axes",
        lambda c: (
            np.all([extents[axis] % tile(c, axis) == 0 for axis in spatial], axis=0)
            | np.all([c[axis][:, 1] == 1 for axis in spatial], axis=0)
        ),
    )
    if len(spatial) == len("xyz"):
        k.search_only(f"at most {MAX_Z} threads along z", lambda c: c[spatial[0]][:, 2] * c["slices"] <= MAX_Z)
    k.search_only(f"at least {MIN_THREADS} threads", lambda c: threads(c, spatial) >= MIN_THREADS)
    k.search_only(  # unrolled by TVM they are as fast, and take three times as long to compile
        "the products are unrolled by the device's compiler, all or none",
        lambda c: (c["unroll_explicit"] == 0) & np.isin(c["auto_unroll_max_step"], (0, 1500)),
    )
    k.search_only(
        "only a transposed weight is padded", lambda c: (c["weight_pad"] == 0) | (c["weight_layout"] == "ihwo")
    )
    k.search_only("few enough accumulators", lambda c: accumulators(c, spatial) <= MAX_ACCUMULATORS)
    k.search_only(
        "all threads' registers fit",
        lambda c: (accumulators(c, spatial) + OWN_REGISTERS) * threads(c, spatial) <= REGISTERS,
    )
    k.search_only(
        "the products of a step are few enough to be unrolled",
        lambda c: accumulators(c, spatial) * np.prod([tile(c, axis) for axis in reduction], axis=0) <= MAX_PRODUCTS,
    )


def tile(c: Columns, axis: str) -> np.ndarray:
    """The inner factors of a knob, multiplied."""
    return c[axis][:, 1:].prod(axis=1)


def accumulators(c: Columns, spatial: Sequence[str], *, virtual: bool = True) -> np.ndarray:
    """Partial sums of a thread, over all its virtual threads or of one."""
    each = [c[axis][:, 3] * (c[axis][:, 1] if virtual else 1) for axis in spatial]
    return np.prod(each, axis=0)


def threads(c: Columns, spatial: Sequence[str]) -> np.ndarray:
    """Threads of a block."""
    return np.prod([c[axis][:, 2] for axis in spatial], axis=0) * c["slices"]


def staged_bytes(c: Columns, spatial: Sequence[str], operands: Sequence[np.ndarray]) -> np.ndarray:
    """Shared memory of a block.

    Args:
        c: the columns.
        spatial: knobs of the output tiles.
        operands: words of each operand that are staged for one step, by config.
    """
    copies = np.array([PIPELINES[str(name)] for name in c["pipeline"]], dtype=np.int64)
    arrays = copies * np.stack(operands)
    # The slices meet in an array of their own, one for each virtual thread. TVM lets it take the place of an operand,
    # which is no longer needed, if their sizes are not too different (tirx.transform.StorageRewrite).
    meeting = c["slices"] * np.prod([tile(c, axis) * c[axis][:, 1] for axis in spatial], axis=0)
    holds = (arrays >= meeting) & (arrays <= REUSE * meeting)
    grows = np.where((arrays < meeting) & (REUSE * arrays >= meeting), arrays, 0).max(axis=0)
    more = np.where(holds.any(axis=0), 0, meeting - grows)
    return WORD * (arrays.sum(axis=0) + np.where(c["slices"] > 1, more, 0))


def usage(
    c: Columns,
    spatial: Sequence[str],
    reduction: Sequence[str],
    operands: tuple[np.ndarray, np.ndarray],
    outer: int,
) -> Usage:
    """What configs use of a device.

    Args:
        c: the columns.
        spatial: knobs of the output tiles.
        reduction: knobs of the reduction tiles, input channels first.
        operands: words of the input and of the weight that are staged for one step, by config.
        outer: blocks along the axes that are not tiled: images, groups.
    """
    blocks = outer * np.prod([c[axis][:, 0] for axis in spatial], axis=0)
    steps = np.prod([c[axis][:, 0] for axis in reduction], axis=0) // c["slices"]
    products = c["slices"] * np.prod([tile(c, axis) for axis in (*spatial, *reduction)], axis=0)
    words, of_block = sum(operands), threads(c, spatial)
    return Usage(
        threads=of_block,
        shared_bytes=staged_bytes(c, spatial, operands),
        accumulators=accumulators(c, spatial),
        blocks=blocks,
        steps=steps,
        products=products // of_block,
        staged_words=words / of_block,
        intensity=products / words,
        traffic=blocks * steps * words,
        all_threads=blocks * of_block,
    )


def weight_row(c: Columns, channels: np.ndarray) -> np.ndarray:
    """Words from one row of a transposed weight to the next; of a weight that is not, its channels."""
    pad = c["weight_pad"]
    return np.where(c["weight_layout"] == "ihwo", channels + (pad - channels) % BANKS * (pad > 0), channels)


def searched_overhang(extent: int) -> float:
    """Which share of an axis its tiles may overhang to be searched: some, where few tiles divide it."""
    return OVERHANG if any(prime > LARGE_PRIME for prime, _ in prime_factors(extent)) else 0.0
