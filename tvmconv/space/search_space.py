"""Search space of a schedule for one workload: the Cartesian product of its knobs' options, without listing it.

A *point* is a config as a row of option indices, one per knob; many points form an int32 matrix (n, knobs). Operations
that a search repeats thousands of times, such as legality checks and features, process many points at once.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tvmconv.errors import KnobError
from tvmconv.html import make_html_table
from tvmconv.space.knobs import Columns, Config, Constraint, Knob, SplitKnob, Value, find_value, format_value
from tvmconv.target import BlockLimits

_MAX_ENUMERATED_SIZE = 1 << 19  # spaces up to this size are listed for sampling: exact, and as fast as drawing points
# Larger spaces up to this size are listed if few of their points are legal, as drawing a sample takes as long then.
_MAX_SPARSE_SIZE, _MAX_SPARSE_FRACTION = 1 << 22, 0.01
_NUM_PROBED, _NUM_LISTED = 1 << 13, 1 << 18  # points drawn to estimate the fraction; points listed at a time
_ENUMERATION_LOCK = threading.RLock()  # another thread may list a space in advance
_ITERATED_POINTS = 4096  # points that are decoded at once
_MAX_DRAWS = 1 << 20  # maximum number of points drawn for one sample; a space with too few legal points stops there

ANY_GPU = BlockLimits()


class ResourceUsage:
    """Resources of a device that configs use, computed by formulas: integer or float arrays (n,).

    Args:
        threads: Threads per block.
        shared_bytes: Static shared memory per block in bytes.
        accumulators: Accumulator registers per thread.
        blocks: Blocks in the grid.
        dynamic_shared_bytes: Dynamic shared memory per block in bytes.
        cluster: Blocks per cluster.
        estimate: Estimated latency of a launch on the GPU that the schedule's formula was fitted to.
        estimate_seconds_per_unit: Seconds per unit of the estimate; None if the estimate only ranks configs.
        layout_seconds: Seconds of the estimate by which a launch takes longer because arrays are not channels last.
        features: Further features for a cost model, by name.
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
        estimate_seconds_per_unit: float | None = None,
        layout_seconds: np.ndarray | None = None,
        **features: np.ndarray,
    ):
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.accumulators = accumulators
        self.blocks = blocks
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.cluster = cluster
        self.estimate, self.estimate_seconds_per_unit = estimate, estimate_seconds_per_unit
        self.layout_seconds = layout_seconds
        self.features = features

    def to_columns(self) -> dict[str, np.ndarray]:
        """Return all quantities by name."""
        quantities = {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "accumulators": self.accumulators,
            "blocks": self.blocks,
            "dynamic_shared_bytes": self.dynamic_shared_bytes,
            "cluster": self.cluster,
            **self.features,
            "estimate": self.estimate,
        }
        return {name: column for name, column in quantities.items() if column is not None}


@dataclass(frozen=True, repr=False)
class Space:
    """All configs of a schedule for one workload. Iteration yields the legal ones; `size` counts all combinations,
    illegal ones included.

    Examples:
        >>> import itertools
        >>> import tvmconv as tc
        >>> from tvmconv import registry
        >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> space = registry.find_schedule(w, "tiling").space(w)
        >>> space
        <Space of 90,000 configs: tile_c, tile_h, tile_w, tile_rc, tile_rh, tile_rw>
        >>> [config["tile_c"] for config in itertools.islice(space, 2)]
        [(-1, 1, 1), (-1, 1, 1)]
    """

    knobs: Mapping[str, Knob]
    constraints: Sequence[Constraint] = ()  # conditions that a legal config meets besides the limits
    # Function from columns to the resources that the configs use; None if the usage is unknown.
    usage_from_columns: Callable[[Columns], ResourceUsage] | None = field(default=None, repr=False)
    limits: BlockLimits = ANY_GPU  # resources that a config may use

    def __repr__(self) -> str:
        return f"<Space of {self.size:,} configs: {', '.join(self.knobs) or 'no knobs'}>"

    def __iter__(self) -> Iterator[Config]:
        """Yield the legal configs in a stable order, without listing all of them."""
        for start in range(0, self.size, _ITERATED_POINTS):
            points = self.slice_points(start, _ITERATED_POINTS)
            yield from map(self.config_from_point, points[self.is_legal(points)])

    def _repr_html_(self) -> str:
        rows = [
            (name, format_value(knob.default), f"{knob.size:,}", knob.describe_values().removeprefix("one of "))
            for name, knob in self.knobs.items()
        ]
        headers = ("knob", "default", "options", "values")
        return make_html_table(headers, rows, {"knob", "default", "values"}, f"{self.size:,} configs")

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of options of each knob."""
        return tuple(knob.size for knob in self.knobs.values())

    @property
    def size(self) -> int:
        """Number of configs, including the illegal ones."""
        return math.prod(self.sizes)

    @property
    def default(self) -> Config:
        """Config with every knob at its default, which may be illegal."""
        return {name: knob.default for name, knob in self.knobs.items()}

    def point_from_config(self, config: Mapping[str, Value]) -> np.ndarray:
        """Return the point of a config: int32 (knobs,). `find_value` says what missing knobs are."""
        for name in config:
            if name not in self.knobs:
                raise KnobError(f"there is no knob {name!r}; the knobs are {', '.join(self.knobs) or 'none'}")
        point = np.empty(len(self.knobs), dtype=np.int32)
        for knob_index, (name, knob) in enumerate(self.knobs.items()):
            value = find_value(config, knob)
            try:
                point[knob_index] = self._option_indices[knob_index][knob.normalize(value)]
            except KeyError:
                raise KnobError(f"knob {name} can be {format_value(value)}, but it is not searched") from None
        return point

    def project(self, config: Mapping[str, Value]) -> np.ndarray:
        """Return the point closest to a config of another workload: int32 (knobs,), possibly illegal. Splits are
        compared by the ratios of their factors, numbers by their difference. A word that is not an option takes the
        default; `find_value` says what missing knobs are.
        """
        nearest = (_find_nearest_option(knob, find_value(config, knob)) for knob in self.knobs.values())
        return np.fromiter(nearest, dtype=np.int32, count=len(self.knobs))

    @functools.cached_property
    def _option_indices(self) -> list[dict[Value, int]]:
        return [{option: i for i, option in enumerate(knob.options)} for knob in self.knobs.values()]

    def config_from_point(self, point: np.ndarray) -> Config:
        """Return the config of a point."""
        return {name: knob.options[i] for (name, knob), i in zip(self.knobs.items(), point, strict=True)}

    def slice_points(self, start: int, count: int) -> np.ndarray:
        """Return the points from index `start` on, legal or not: (n, knobs), at most `count` and none past the end. The
        index of a point is a mixed-radix number whose last digit is the last knob.
        """
        quotients = np.arange(min(count, self.size - start))
        points = np.empty((len(quotients), len(self.knobs)), dtype=np.int32)
        for knob_index, size in reversed(list(enumerate(self.sizes))):
            start, digit = divmod(start, size)
            numbers = quotients + digit
            quotients = numbers // size
            points[:, knob_index] = numbers - quotients * size  # several times as fast as np.divmod
        return points

    def columns_from_points(self, points: np.ndarray) -> dict[str, np.ndarray]:
        """Return the knobs' values at points: int64 (n, num_factors) without -1 for a split, (n,) for a choice."""
        return {name: knob.option_table[points[:, i]] for i, (name, knob) in enumerate(self.knobs.items())}

    def compute_usage(self, points: np.ndarray) -> ResourceUsage | None:
        """Return the resources that the configs use; None if the schedule has no `usage` function."""
        return self.usage_from_columns(self.columns_from_points(points)) if self.usage_from_columns else None

    def is_legal(self, points: np.ndarray) -> np.ndarray:
        """Return which points meet all constraints and limits: bool (n,)."""
        predicates = [constraint.predicate for constraint in self.constraints]
        if usage_of := self.usage_from_columns:
            predicates.append(lambda columns: _check_limits(self.limits, usage_of(columns)))
        legal = np.zeros(len(points), dtype=bool)
        indices, options = np.arange(len(points)), np.ascontiguousarray(points.T)
        columns = _LazyColumns(self.knobs, options)
        for predicate in predicates:
            passing = np.flatnonzero(np.broadcast_to(predicate(columns), len(indices)))  # some return one bool for all
            if len(passing) < len(indices):  # most points fail early, so that later constraints are evaluated on fewer
                indices, options = indices[passing], options.take(passing, axis=1)
                columns = _LazyColumns(self.knobs, options)
        legal[indices] = True
        return legal

    @property
    def enumerated_legal(self) -> np.ndarray | None:
        """All legal points of a small space, or of a larger one with few of them: (n, knobs); None for other spaces."""
        with _ENUMERATION_LOCK:
            return self._enumerated_legal

    @functools.cached_property
    def _enumerated_legal(self) -> np.ndarray | None:
        if self.size > _MAX_ENUMERATED_SIZE and not self._has_few_legal_points():
            return None
        chunks = (self.slice_points(start, _NUM_LISTED) for start in range(0, self.size, _NUM_LISTED))
        return np.concatenate([points[self.is_legal(points)] for points in chunks])

    def _has_few_legal_points(self) -> bool:
        """Return whether the space is not too large to list, and few points of a sample are legal."""
        if self.size > _MAX_SPARSE_SIZE:
            return False
        points = (np.random.default_rng(0).random((_NUM_PROBED, len(self.knobs))) * self.sizes).astype(np.int32)
        return bool(np.count_nonzero(self.is_legal(points)) <= _MAX_SPARSE_FRACTION * _NUM_PROBED)

    def sample_legal(self, max_points: int, rng: np.random.Generator) -> np.ndarray:
        """Return distinct legal points, drawn uniformly at random. There are fewer than `max_points` if the space has
        too few legal points.
        """
        if self.enumerated_legal is not None:
            return self.enumerated_legal[rng.permutation(len(self.enumerated_legal))[:max_points]]
        legal_points = np.empty((0, len(self.knobs)), dtype=np.int32)
        num_drawn, batch_size = 0, max(2 * max_points, 8192)
        while len(legal_points) < max_points and num_drawn < _MAX_DRAWS:
            points = (rng.random((batch_size, len(self.knobs))) * self.sizes).astype(np.int32)
            legal_points = remove_duplicate_points(np.concatenate([legal_points, points[self.is_legal(points)]]))
            num_drawn += batch_size
        return legal_points[:max_points]

    def list_neighbors(self, point: np.ndarray) -> np.ndarray:
        """Return the legal points that differ from `point` in one knob: (n, knobs)."""
        (neighbors,) = self.list_neighbors_of_each(point[None])
        return neighbors

    def list_neighbors_of_each(self, points: np.ndarray) -> list[np.ndarray]:
        """Return the neighbors of each of several points, as `list_neighbors` does; all are checked at once."""
        options = [(index, option) for index, size in enumerate(self.sizes) for option in range(size)]
        if not options or not len(points):
            return [np.empty((0, len(self.knobs)), dtype=np.int32) for _ in points]
        knob_indices, values = np.array(options).T
        changed = np.repeat(points[:, None], len(options), axis=1)  # (points, options, knobs)
        changed[:, np.arange(len(options)), knob_indices] = values
        is_neighbor = points[:, knob_indices] != values
        is_neighbor[is_neighbor] = self.is_legal(changed[is_neighbor])
        return [rows[flags] for rows, flags in zip(changed, is_neighbor, strict=True)]

    def compute_features(self, points: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the features from which a cost model learns. A split gives the logarithm of each factor and of its
        tile size; a positive number its logarithm; a word one 0/1 feature per option; the resource usage its
        logarithms. All logarithms are to base 2. The feature names do not depend on the workload, so that a model
        applies to several workloads.
        """
        feature_blocks = [np.empty((len(points), 0))]
        feature_blocks += [option_features[points[:, i]] for i, (option_features, _) in enumerate(self._encodings)]
        feature_names = [name for _, names in self._encodings for name in names]
        usage = self.compute_usage(points)
        if usage:
            columns = usage.to_columns()
            feature_blocks.append(np.log2(1 + np.stack(list(columns.values()), axis=1).astype(np.float32)))
            feature_names += columns
        return np.concatenate(feature_blocks, axis=1, dtype=np.float32), tuple(feature_names)

    @functools.cached_property
    def _encodings(self) -> list[tuple[np.ndarray, list[str]]]:
        return [_encode_knob(name, knob) for name, knob in self.knobs.items()]


class _LazyColumns(Mapping[str, np.ndarray]):
    """Knobs' values at points, as `Space.columns_from_points` returns them, each looked up on first use: a constraint
    reads a few knobs only. `options` are the points as rows of option indices, one per knob: (knobs, n).
    """

    def __init__(self, knobs: Mapping[str, Knob], options: np.ndarray) -> None:
        self._knobs, self._options = knobs, dict(zip(knobs, options, strict=True))
        self._columns: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._columns:
            self._columns[name] = self._knobs[name].option_table.take(self._options[name], axis=0)
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._knobs)

    def __len__(self) -> int:
        return len(self._knobs)


def _check_limits(limits: BlockLimits, usage: ResourceUsage) -> np.ndarray:
    """Return which configs meet the limits: bool (n,)."""
    is_within_limits = (usage.threads <= limits.max_threads) & (usage.shared_bytes <= limits.shared_bytes)
    if usage.dynamic_shared_bytes is not None:
        is_within_limits &= usage.shared_bytes + usage.dynamic_shared_bytes <= limits.max_shared_bytes
    if usage.cluster is not None:
        is_within_limits &= usage.cluster <= limits.max_cluster_blocks
    return is_within_limits


def _encode_knob(name: str, knob: Knob) -> tuple[np.ndarray, list[str]]:
    """Return the features of each option of a knob, float32 (options, features), and their names."""
    table = knob.option_table
    if isinstance(knob, SplitKnob):
        features = np.log2(np.column_stack([table, table[:, 1:].prod(axis=1)]))
        return features.astype(np.float32), [f"{name}.{factor}" for factor in (*range(knob.num_factors), "tile")]
    if table.dtype.kind in "biuf":
        numbers = table.astype(np.float64)[:, None]
        return (np.log2(numbers) if numbers.min() > 0 else numbers).astype(np.float32), [name]
    return np.eye(knob.size, dtype=np.float32), [f"{name}={option}" for option in knob.options]


def _find_nearest_option(knob: Knob, value: Value) -> int:
    """Return the index of the option closest to a value."""
    if isinstance(knob, SplitKnob):
        if not isinstance(value, (tuple, list)) or len(value) != knob.num_factors or min(value[1:], default=1) < 1:
            value = knob.default
        inner_log2 = np.log2(np.array(value[1:], dtype=float))
        return int(np.abs(np.log2(knob.option_table[:, 1:]) - inner_log2).sum(axis=1).argmin())
    if value in knob.options:
        return knob.options.index(value)
    is_numeric = (
        knob.option_table.dtype.kind in "iuf" and isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    return int(np.abs(knob.option_table - value).argmin()) if is_numeric else knob.options.index(knob.default)


def remove_duplicate_points(points: np.ndarray) -> np.ndarray:
    """Return the points without duplicates; the first occurrence of each keeps its order."""
    return points[np.sort(np.unique(points, axis=0, return_index=True)[1])]
