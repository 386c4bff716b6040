"""How `depthwise_nhwc` computes a convolution: its knobs, what they take, and the defaults."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvmconv.gpu import STATIC_SHARED_BYTES
from tvmconv.knobs import Columns, Knobs
from tvmconv.knobs.space import Usage
from tvmconv.workloads import Conv

from ..planes import Planes
from ..tiles import element_bytes
from .choice import WORD, Candidates, ask_strip, cycles, demand, least, usage_of
from .strip import Strip, distinct, vectors

UNROLLED = ("filter", "row", "tap")  # what of the filter is unrolled: all of it, a row at a time, or nothing
WEIGHTS = ("shared", "registers", "global")
MAX_LOADS = 128  # of the input, by a thread, unrolled: each has tests of its own
MAX_HELD_BY_DEFAULT, MAX_PRODUCTS_BY_DEFAULT = 128, 1024  # registers, products of a thread: beyond them some spill


@dataclass(frozen=True)
class Plan:
    """How the convolution is computed; one config, or columns of many.

    Attributes:
        strip: what a thread computes.
        unrolled: of the filter, one of `UNROLLED`.
        weight: where threads read the filters, one of `WEIGHTS`: turned around in shared memory, in registers, or one
            by one in global memory.
    """

    strip: Strip
    unrolled: Any
    weight: Any

    @classmethod
    def of_columns(cls, w: Conv, c: Columns) -> Plan:
        """The plans of many configs."""
        return cls(Strip.of_columns(w, c), c["unrolled"], c["weight"])

    def products(self, w: Conv) -> Any:
        """Multiplications of a thread in the kernel's text."""
        return self.strip.sums * self._by(math.prod(w.kernel), w.kernel[-1], 1)

    def loads(self, w: Conv) -> Any:
        """Vectors of the input that a thread loads in the kernel's text."""
        rows, sizes = self.strip.rows.local, Planes.of(w)
        lines = sizes.taps[0] * distinct(rows, sizes.steps[1], sizes.taps[1], sizes.dilations[1])
        return self.window(w) * self._by(lines, rows, rows)

    def loaded(self, w: Conv) -> Any:
        """Vectors of the input that a thread loads."""
        return self.loads(w) * self._by(1, math.prod(w.kernel[:-1]), math.prod(w.kernel))

    def window(self, w: Conv) -> Any:
        """Vectors of an input line that a thread loads at a time."""
        columns = self.strip.columns.local
        line = distinct(columns, w.stride[-1], w.kernel[-1], w.dilation[-1])
        return self._by(line, line, columns)

    def widened(self, w: Conv) -> Any:
        """Vectors of the filters that a thread reads."""
        return math.prod(w.kernel) * self._by(1, self.strip.rows.local, self.strip.rows.local)

    def issued(self, w: Conv) -> Any:
        """Instructions of a thread, about: products, operands that are widened, loads with their tests, stores."""
        strip = self.strip
        wide = strip.vector * (element_bytes(w) < WORD)
        operands = self.loaded(w) * (wide + 3) + self.widened(w) * (wide + 1)
        return (
            strip.sums * math.prod(w.kernel)
            + operands
            + 4 * strip.rows.local * strip.columns.local * (1 + strip.vector / 4)
        )

    def held(self, w: Conv) -> Any:
        """Registers of a thread for its sums, two windows of the input, and what it holds of the filters."""
        words = self.strip.vector * element_bytes(w) / WORD
        window = 2 * words * self.window(w)
        weights = np.where(
            np.equal(self.weight, "registers"),
            words * math.prod(w.kernel),
            words * self._by(w.kernel[-1], w.kernel[-1], 1),
        )
        return self.strip.sums + window + weights

    def shared_bytes(self, w: Conv) -> Any:
        """Shared memory of a block for its filters."""
        return math.prod(w.kernel) * self.strip.channels.thread * self.strip.vector * element_bytes(w)

    def time(self, w: Conv) -> Any:
        """An estimate to choose defaults by; see `cycles`."""
        strip, taps = self.strip, math.prod(w.kernel)
        channels = strip.channels.thread * strip.vector
        shared = np.equal(self.weight, "shared")
        scattered = np.where(np.equal(self.weight, "global"), self.widened(w) * strip.vector, taps) * ~shared
        return cycles(
            w,
            strip,
            issued=self.issued(w) + np.where(shared, 3 * taps * channels / strip.threads, scattered),
            loads=self.loaded(w),
            shared=np.where(shared, self.widened(w), 0),
            scattered=scattered,
            filters=2 * taps * channels * element_bytes(w),  # their sectors are read for one element at a time
        )

    def fits(self, w: Conv) -> Any:
        """Whether a default may be so."""
        shared = np.equal(self.weight, "shared")
        shared &= (self.shared_bytes(w) > STATIC_SHARED_BYTES) | (math.prod(w.kernel) * self.strip.vector == 1)
        whole = np.not_equal(self.weight, "registers") | np.equal(self.unrolled, "filter")
        unrolled = (self.products(w) <= MAX_PRODUCTS_BY_DEFAULT) & (self.loads(w) <= MAX_LOADS)
        return unrolled & (self.held(w) <= MAX_HELD_BY_DEFAULT) & ~shared & whole

    def _by(self, whole: Any, row: Any, tap: Any) -> Any:
        """One of three numbers, by what is unrolled."""
        return np.select([np.equal(self.unrolled, "filter"), np.equal(self.unrolled, "row")], [whole, row], tap)


def ask(w: Conv, k: Knobs) -> Plan:
    """The plan, from knobs; the defaults are those of the least estimate."""
    multiplier = w.O // w.groups
    widths = vectors(w, lambda v: v % multiplier == 0 or multiplier % v == 0)
    best = _default(w, widths)
    strip = ask_strip(k, w, widths, best)
    unrolled = k.choice("unrolled", UNROLLED, best["unrolled"])
    weight = k.choice("weight", WEIGHTS, best["weight"])

    def plan(c: Columns) -> Plan:
        return Plan.of_columns(w, c)

    demand(k, w, plan)
    k.condition(f"at most {MAX_LOADS} loads of a thread are unrolled", lambda c: plan(c).loads(w) <= MAX_LOADS)
    k.condition(
        "filters in registers need the whole filter unrolled",
        lambda c: (c["weight"] != "registers") | (c["unrolled"] == "filter"),
    )
    k.condition(  # TVM takes threads to read back what they have stored themselves, and leaves out the barrier
        "a single tap of a single channel is not turned around in shared memory",
        lambda c: (c["weight"] != "shared") | (math.prod(w.kernel) * c["vector"] > 1),
    )
    return Plan(strip, unrolled, weight)


@functools.lru_cache(maxsize=64)
def _default(w: Conv, widths: tuple[int, ...]) -> dict[str, Any]:
    """The knobs of the least estimate."""

    def ways(strip: Strip) -> Iterator[Candidates]:
        for unrolled, weight in itertools.product(UNROLLED, WEIGHTS):
            plan = Plan(strip, unrolled, weight)
            yield Candidates({"unrolled": unrolled, "weight": weight}, plan.fits(w), plan.time(w))

    return least(w, widths, ways)


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    return usage_of(w, Plan.of_columns(w, c))
