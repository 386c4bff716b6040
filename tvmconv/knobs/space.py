"""The search space of a schedule for one workload: the product of its knobs, never listed.

A *point* is a config as a row of option indices, one a knob; many points are an int32 matrix (n, knobs). Everything
that a search asks thousands of times (is it legal, what are its features) is answered for many points at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tvmconv.errors import KnobError
from tvmconv.gpu import Limits
from tvmconv.knobs.knobs import Columns, Condition, Config, Knob, Split, Value, format_value

_LISTED = 1 << 19  # spaces up to this size are listed when they are sampled: exact, and as fast as drawing
_MOST_DRAWS = 1 << 20  # points drawn for one sample before it is given up as having too few legal ones

ANY_GPU = Limits()


class Usage:
    """What configs use of a device, by formula: integer or float arrays (n,).

    Args:
        threads: of a block.
        shared_bytes: static shared memory of a block.
        accumulators: partial sums that a thread keeps in registers.
        blocks: of the grid.
        dynamic_shared_bytes: shared memory of a block that the launch asks for.
        cluster: blocks of a cluster.
        estimate: how long a launch takes, about, on the GPU that the schedule's formula was fitted to.
        tick: seconds of a unit of the estimate; None if it only tells which config is the faster.
        more: other quantities that a cost model may learn from, by name.
    """

    def __init__(
        self,
        threads: np.ndarray,
        shared_bytes: np.ndarray,
        accumulators: np.ndarray,
        blocks: np.ndarray,
        dynamic_shared_bytes: np.ndarray | None = None,
        cluster: np.ndarray | None = None,
        estimate: np.ndarray | None = None,
        tick: float | None = None,
        **more: np.ndarray,
    ):
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.accumulators = accumulators
        self.blocks = blocks
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.cluster = cluster
        self.estimate, self.tick = estimate, tick
        self.more = more

    def columns(self) -> dict[str, np.ndarray]:
        """All quantities by name."""
        found = {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "accumulators": self.accumulators,
            "blocks": self.blocks,
            "dynamic_shared_bytes": self.dynamic_shared_bytes,
            "cluster": self.cluster,
            **self.more,
            "estimate": self.estimate,
        }
        return {name: column for name, column in found.items() if column is not None}


@dataclass(frozen=True)
class Space:
    """All configs of a schedule for one workload.

    Attributes:
        knobs: by name.
        conditions: what legal configs fulfil besides.
        usage: from columns to what the configs use; None if the schedule does not say.
        limits: what they may use.
    """

    knobs: Mapping[str, Knob]
    conditions: Sequence[Condition] = ()
    usage_of: Callable[[Columns], Usage] | None = field(default=None, repr=False)
    limits: Limits = ANY_GPU

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many options each knob has."""
        return tuple(knob.size for knob in self.knobs.values())

    @property
    def size(self) -> int:
        """How many configs there are, the illegal ones included."""
        return math.prod(self.sizes)

    @property
    def default(self) -> Config:
        """The config that the schedule takes by itself, which need not be legal."""
        return {name: knob.default for name, knob in self.knobs.items()}

    def point(self, config: Mapping[str, Value]) -> np.ndarray:
        """The point of a config, int32 (knobs,); knobs that it leaves out take their defaults.

        Raises:
            KnobError: a knob does not exist or cannot take its value, or the value is not among those searched.
        """
        for name in config:
            if name not in self.knobs:
                raise KnobError(f"there is no knob {name!r}; the knobs are {', '.join(self.knobs) or 'none'}")
        point = np.empty(len(self.knobs), dtype=np.int32)
        for place, (name, knob) in enumerate(self.knobs.items()):
            value = config.get(name, knob.default)
            try:
                point[place] = self._places[place][knob.option(value)]
            except KeyError:
                raise KnobError(f"knob {name} can be {format_value(value)}, but it is not searched") from None
        return point

    def nearest(self, config: Mapping[str, Value]) -> np.ndarray:
        """The point that is most like a config of another workload: int32 (knobs,), which need not be legal.

        Factors are alike by their ratios, numbers by the options between them; what the config does not have, or what
        is no option, takes the default.
        """
        nearest = (_nearest_option(knob, config.get(name, knob.default)) for name, knob in self.knobs.items())
        return np.fromiter(nearest, dtype=np.int32, count=len(self.knobs))

    @functools.cached_property
    def _places(self) -> list[dict[Value, int]]:
        return [{option: place for place, option in enumerate(knob.options)} for knob in self.knobs.values()]

    def config(self, point: np.ndarray) -> Config:
        """The config of a point."""
        return {name: knob.options[i] for (name, knob), i in zip(self.knobs.items(), point, strict=True)}

    def index(self, point: np.ndarray) -> int:
        """The stable number of a point: mixed radix, the last knob running fastest."""
        index = 0
        for size, digit in zip(self.sizes, point, strict=True):
            index = index * size + int(digit)
        return index

    def from_index(self, index: int) -> np.ndarray:
        """The point of a number; the inverse of `index`.

        Raises:
            KnobError: the space has no such number.
        """
        if not 0 <= index < self.size:
            raise KnobError(f"index {index} is outside of a space of {self.size} configs")
        return self.walk(index, 1)[0]

    def walk(self, start: int, count: int) -> np.ndarray:
        """The points numbered `start` to `start + count`, legal or not: (n, knobs), fewer at the end of the space."""
        carry = np.arange(min(count, self.size - start))
        points = np.empty((len(carry), len(self.knobs)), dtype=np.int32)
        for place, size in reversed(list(enumerate(self.sizes))):
            start, digit = divmod(start, size)
            carry, points[:, place] = np.divmod(carry + digit, size)
        return points

    def columns(self, points: np.ndarray) -> dict[str, np.ndarray]:
        """The knobs' values at points: (n, parts) int64 for a split, without -1, and (n,) for a choice."""
        return {name: knob.table[points[:, i]] for i, (name, knob) in enumerate(self.knobs.items())}

    def usage(self, points: np.ndarray) -> Usage | None:
        """What the configs use of a device; None if the schedule does not say."""
        return self.usage_of(self.columns(points)) if self.usage_of else None

    def legal(self, points: np.ndarray) -> np.ndarray:
        """Which points fulfil all conditions and keep to the limits: bool (n,)."""
        columns = self.columns(points)
        left = np.arange(len(points))  # most points fail early, and later conditions are asked about fewer
        for holds in self._demands():
            passing = holds(columns)
            left = left[passing]
            columns = {name: column[passing] for name, column in columns.items()}
        legal = np.zeros(len(points), dtype=bool)
        legal[left] = True
        return legal

    def _demands(self) -> Iterator[Callable[[Columns], np.ndarray]]:
        yield from (condition.holds for condition in self.conditions)
        if usage_of := self.usage_of:
            yield lambda columns: _within(self.limits, usage_of(columns))

    @functools.cached_property
    def listed(self) -> np.ndarray | None:
        """All legal points of a small space, (n, knobs); None for a larger one."""
        if self.size > _LISTED:
            return None
        points = self.walk(0, self.size)
        return points[self.legal(points)]

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Distinct legal points, uniformly at random: (n, knobs), or fewer if no more were found."""
        if self.listed is not None:
            return self.listed[rng.permutation(len(self.listed))[:n]]
        found = np.empty((0, len(self.knobs)), dtype=np.int32)
        drawn, batch = 0, max(2 * n, 8192)
        while len(found) < n and drawn < _MOST_DRAWS:
            points = (rng.random((batch, len(self.knobs))) * self.sizes).astype(np.int32)
            found = distinct(np.concatenate([found, points[self.legal(points)]]))
            drawn += batch
        return found[:n]

    def neighbours(self, point: np.ndarray) -> np.ndarray:
        """The legal points that differ from `point` in one knob: (n, knobs)."""
        changed = [
            (place, option) for place, size in enumerate(self.sizes) for option in range(size) if option != point[place]
        ]
        points = np.repeat(point[None, :], len(changed), axis=0)
        if changed:
            places, options = np.array(changed).T
            points[np.arange(len(changed)), places] = options
        return points[self.legal(points)]

    def features(self, points: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """What a cost model learns from.

        Splits give the logarithm of each factor and of the tile that their inner factors make; positive numbers their
        logarithm; words a 0 or 1 for each option; the usage its logarithms. (All to base 2.) The names do not depend on
        the workload, so that what is learnt from one serves for another.

        Returns:
            float32 (n, features), and their names.
        """
        parts = [np.empty((len(points), 0))]
        parts += [encoding.rows[points[:, place]] for place, encoding in enumerate(self._encodings)]
        names = [name for encoding in self._encodings for name in encoding.names]
        usage = self.usage(points)
        if usage:
            columns = usage.columns()
            parts.append(np.log2(1 + np.stack(list(columns.values()), axis=1).astype(np.float32)))
            names += columns
        return np.concatenate(parts, axis=1, dtype=np.float32), tuple(names)

    @functools.cached_property
    def _encodings(self) -> list[_Encoding]:
        return list(_encode(self.knobs))


def _within(limits: Limits, usage: Usage) -> np.ndarray:
    """Which configs keep to the limits: bool (n,)."""
    within = (usage.threads <= limits.max_threads) & (usage.shared_bytes <= limits.shared_bytes)
    if usage.dynamic_shared_bytes is not None:
        within &= usage.shared_bytes + usage.dynamic_shared_bytes <= limits.all_shared_bytes
    if usage.cluster is not None:
        within &= usage.cluster <= limits.max_cluster
    return within


@dataclass(frozen=True)
class _Encoding:
    """The features of each option of a knob: float32 (options, features)."""

    rows: np.ndarray
    names: tuple[str, ...]


def _encode(knobs: Mapping[str, Knob]) -> Iterator[_Encoding]:
    for name, knob in knobs.items():
        table = knob.table
        if isinstance(knob, Split):
            rows = np.column_stack([table, table[:, 1:].prod(axis=1)])
            names = (*(f"{name}.{part}" for part in range(knob.parts)), f"{name}.tile")
            yield _Encoding(np.log2(rows).astype(np.float32), names)
        elif table.dtype.kind in "biuf":
            rows = table.astype(np.float64)[:, None]
            yield _Encoding((np.log2(rows) if rows.min() > 0 else rows).astype(np.float32), (name,))
        else:
            yield _Encoding(np.eye(knob.size, dtype=np.float32), tuple(f"{name}={option}" for option in knob.options))


def _nearest_option(knob: Knob, value: Value) -> int:
    """The place of the option that is most like a value."""
    if isinstance(knob, Split):
        if not isinstance(value, (tuple, list)) or len(value) != knob.parts or min(value[1:], default=1) < 1:
            value = knob.default
        inner = np.log2(np.array(value[1:], dtype=float))
        return int(np.abs(np.log2(knob.table[:, 1:]) - inner).sum(axis=1).argmin())
    if value in knob.options:
        return knob.options.index(value)
    numbers = knob.table.dtype.kind in "iuf" and isinstance(value, (int, float)) and not isinstance(value, bool)
    return int(np.abs(knob.table - value).argmin()) if numbers else knob.options.index(knob.default)


def distinct(points: np.ndarray) -> np.ndarray:
    """The points without those that came before, in their order."""
    return points[np.sort(np.unique(points, axis=0, return_index=True)[1])]
