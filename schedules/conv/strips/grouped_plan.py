"""How `grouped_nhwc` computes a convolution: its knobs, what they take, and the defaults."""

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

from ..tiles import element_bytes
from .choice import MAX_PRODUCTS, WORD, Candidates, ask_strip, cycles, demand, least, usage_of
from .strip import LOAD_BYTES, VECTORS, Strip, distinct, vectors

UNROLLED = ("row", "tap")  # what of the filter is unrolled: a row at a time, or nothing
WEIGHTS = ("shared", "global")
MAX_HELD_BY_DEFAULT = 128  # registers, see `MAX_HELD`


@dataclass(frozen=True)
class Plan:
    """How the convolution is computed; one config, or columns of many.

    Attributes:
        strip: what a thread computes.
        depth: input channels of a step.
        unrolled: of the filter, one of `UNROLLED`.
        weight: where threads read the filters, one of `WEIGHTS`.
    """

    strip: Strip
    depth: Any
    unrolled: Any
    weight: Any

    @classmethod
    def of_columns(cls, w: Conv, c: Columns) -> Plan:
        """The plans of many configs."""
        return cls(Strip.of_columns(w, c), c["depth"], c["unrolled"], c["weight"])

    def products(self, w: Conv) -> Any:
        """Multiplications of a thread in the kernel's text."""
        return self.strip.sums * self.depth * self._by(w.kernel[-1], 1)

    def window(self, w: Conv) -> Any:
        """Vectors of an input line that a thread loads in a step."""
        columns = self.strip.columns.local
        return self._by(distinct(columns, w.stride[-1], w.kernel[-1], w.dilation[-1]), columns)

    def loaded(self, w: Conv) -> Any:
        """Vectors of the input that a thread loads."""
        steps = math.prod(w.kernel[:-1]) * (w.C // w.groups // self.depth) * self._by(1, w.kernel[-1])
        return steps * self.strip.rows.local * self.window(w)

    def read(self, w: Conv) -> Any:
        """Vectors of the filters that a thread reads."""
        depth = w.C // w.groups
        return math.prod(w.kernel) * np.where(
            np.equal(self.weight, "shared"), depth, depth // self.depth * self.strip.vector
        )

    def issued(self, w: Conv) -> Any:
        """Instructions of a thread, about: products, operands that are widened, loads with their tests, stores."""
        strip, depth, half = self.strip, w.C // w.groups, element_bytes(w) < WORD
        widened = half * (self.loaded(w) * self.depth + math.prod(w.kernel) * depth * strip.vector)
        stores = 4 * strip.rows.local * strip.columns.local * (1 + strip.vector / 4)
        return strip.sums * math.prod(w.kernel) * depth + widened + 3 * self.loaded(w) + self.read(w) + stores

    def held(self, w: Conv) -> Any:
        """Registers of a thread for its sums, the window of a step, and the weights of a tap."""
        words = element_bytes(w) / WORD
        window = self.strip.rows.local * self.window(w) * self.depth * words
        return self.strip.sums + window + self.depth * self.strip.vector * words

    def shared_bytes(self, w: Conv) -> Any:
        """Shared memory of a block for its filters."""
        channels = self.strip.channels.thread * self.strip.vector
        return math.prod(w.kernel) * (w.C // w.groups) * channels * element_bytes(w)

    def time(self, w: Conv) -> Any:
        """An estimate to choose defaults by; see `cycles`."""
        strip, filters = self.strip, self.shared_bytes(w)
        shared = np.equal(self.weight, "shared")
        copied = np.where(shared, 3 * filters / element_bytes(w) / strip.threads, 0)
        return cycles(
            w,
            strip,
            issued=self.issued(w) + copied,
            loads=self.loaded(w),
            shared=np.where(shared, self.read(w), 0),
            scattered=np.where(shared, 0, self.read(w)),
            filters=filters,
        )

    def fits(self, w: Conv) -> Any:
        """Whether a default may be so."""
        shared = np.equal(self.weight, "shared") & (self.shared_bytes(w) > STATIC_SHARED_BYTES)
        return (self.products(w) <= MAX_PRODUCTS) & (self.held(w) <= MAX_HELD_BY_DEFAULT) & ~shared

    def _by(self, row: Any, tap: Any) -> Any:
        """One of two numbers, by what is unrolled."""
        return np.where(np.equal(self.unrolled, "row"), row, tap)


def depths(w: Conv) -> tuple[int, ...]:
    """The numbers of input channels that a step may have: those of one load at most that divide a group."""
    return tuple(d for d in VECTORS if d * element_bytes(w) <= LOAD_BYTES and w.C // w.groups % d == 0)


def ask(w: Conv, k: Knobs) -> Plan:
    """The plan, from knobs; the defaults are those of the least estimate."""
    widths = vectors(w, lambda v: w.O // w.groups % v == 0)
    best = _default(w, widths)
    strip = ask_strip(k, w, widths, best)
    depth = k.choice("depth", depths(w), best["depth"])
    unrolled = k.choice("unrolled", UNROLLED, best["unrolled"])
    weight = k.choice("weight", WEIGHTS, best["weight"])

    demand(k, w, lambda c: Plan.of_columns(w, c))
    return Plan(strip, depth, unrolled, weight)


@functools.lru_cache(maxsize=64)
def _default(w: Conv, widths: tuple[int, ...]) -> dict[str, Any]:
    """The knobs of the least estimate."""

    def ways(strip: Strip) -> Iterator[Candidates]:
        for depth, unrolled, weight in itertools.product(depths(w), UNROLLED, WEIGHTS):
            plan = Plan(strip, depth, unrolled, weight)
            yield Candidates({"depth": depth, "unrolled": unrolled, "weight": weight}, plan.fits(w), plan.time(w))

    return least(w, widths, ways)


def usage(w: Conv, c: Columns) -> Usage:
    """What configs use of a device."""
    return usage_of(w, Plan.of_columns(w, c))
