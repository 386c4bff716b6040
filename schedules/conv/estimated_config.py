"""Base of tile configs whose default is the one with the lowest estimated latency.

A subclass has the estimate, the options of its knobs, and rules. From them follow the default, the declaration of the
knobs and the usage, which are the same for all such schedules.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.target import MAX_REGISTERS_PER_THREAD, PORTABLE_SHARED_BYTES, REGISTERS_PER_MULTIPROCESSOR, WARP_SIZE

from .tile_config import Rule, TileConfig, add_rules, declare_choices, prune_by_estimate, select_cheapest

if TYPE_CHECKING:
    from typing_extensions import Self

NUM_STARTING_CONFIGS = 5


@dataclasses.dataclass(frozen=True)
class EstimatedTileConfig(TileConfig, ABC):
    """One config of warps that share dynamic shared memory, or many configs as columns; all fields but `w` are knobs.

    Attributes:
        w: The workload.
    """

    TILE_KNOBS: ClassVar[tuple[str, ...]] = ()  # knobs in which the configs differ with which a search starts
    SECONDS_PER_CYCLE: ClassVar[float | None] = None  # of the estimate; None if it only ranks configs
    SHARED_BYTES: ClassVar[int] = PORTABLE_SHARED_BYTES  # of a CTA of the default; more if it needs Hopper anyway
    MISSING_KNOBS: ClassVar[Mapping[str, Any]] = {}  # values of knobs that older configs lack, if not the defaults

    w: Any

    @classmethod
    @abstractmethod
    def list_options(cls, w: Any) -> Mapping[str, Sequence[Any]]:
        """Return the options of all knobs."""

    @classmethod
    @abstractmethod
    def list_required(cls, w: Any) -> list[Rule]:
        """Return the conditions on every config."""

    @classmethod
    @abstractmethod
    def list_pruned(cls, w: Any) -> list[Rule]:
        """Return the conditions on configs that are worth a search, the most important first."""

    @property
    @abstractmethod
    def num_warps(self) -> Any:
        """Warps per CTA."""

    @property
    def num_threads(self) -> Any:
        """Threads per CTA."""
        return self.num_warps * WARP_SIZE

    @property
    @abstractmethod
    def num_blocks(self) -> Any:
        """CTAs of the grid."""

    @property
    @abstractmethod
    def num_accumulators(self) -> Any:
        """Accumulator registers per thread."""

    @property
    @abstractmethod
    def smem_bytes(self) -> Any:
        """Bytes of shared memory."""

    @property
    @abstractmethod
    def estimated_cycles(self) -> Any:
        """Estimated latency in clock cycles."""

    @property
    def usage_features(self) -> dict[str, Any]:
        """Further features of the usage for cost models, by name."""
        return {"all_threads": self.num_blocks * self.num_threads}

    @classmethod
    @functools.lru_cache(maxsize=64)
    def list_legal(cls, w: Any) -> tuple[Self, Any]:
        """Return the configs that meet the required rules and fit `SHARED_BYTES`, and that each of them does."""
        fits: Rule = ("shared memory", lambda t: t.smem_bytes <= cls.SHARED_BYTES)
        legal = cls.from_options(cls.list_options(w), w=w).select_meeting([*cls.list_required(w), fits])
        return legal, np.ones(len(next(iter(legal._columns().values()))), bool)

    @classmethod
    def has_config(cls, w: Any) -> bool:
        """Return whether there is a legal config."""
        return bool(np.any(cls.list_legal(w)[1]))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def select_default(cls, w: Any) -> Self:
        """Return the config with the lowest estimate among the legal ones."""
        configs, is_legal = cls.list_legal(w)
        return select_cheapest(configs, is_legal, cls.list_pruned(w), configs.estimated_cycles)

    @classmethod
    def list_starting_configs(cls, w: Any) -> list[dict[str, Any]]:
        """Return the knobs of the best estimates, one for each tile, with all shared memory that the rules permit."""
        options = cls.list_options(w)
        legal = cls.from_options(options, w=w).select_meeting([*cls.list_required(w), *cls.list_pruned(w)])
        tiles = np.stack([getattr(legal, name) for name in cls.TILE_KNOBS])
        if not tiles.size:
            return []
        order = np.argsort(legal.estimated_cycles, kind="stable")
        _, first_of_tile = np.unique(tiles[:, order], axis=1, return_index=True)
        best = order[np.sort(first_of_tile)[:NUM_STARTING_CONFIGS]].tolist()
        return [{name: getattr(config, name) for name in options} for config in map(legal.row, best)]

    @classmethod
    def compute_usage(cls, w: Any, columns: Columns) -> ResourceUsage:
        """Return the resources that configs use."""
        config = cls.from_columns(columns, w=w)
        return ResourceUsage(
            threads=config.num_threads,
            shared_bytes=np.zeros_like(config.smem_bytes),
            accumulators=config.num_accumulators,
            blocks=config.num_blocks,
            dynamic_shared_bytes=config.smem_bytes,
            estimate=config.estimated_cycles,
            estimate_seconds_per_unit=cls.SECONDS_PER_CYCLE,
            **config.usage_features,
        )

    @classmethod
    def declare_knobs(cls, w: Any, k: Knobs) -> Self:
        """Declare the knobs, with the defaults of the lowest estimate, and return their values."""

        def make_config(values: Mapping[str, Any]) -> Any:
            return cls.from_columns(values, w=w)  # without further knobs of the schedule

        default = cls.select_default(w)
        declare_choices(k, cls.list_options(w), default, cls.MISSING_KNOBS)
        add_rules(k, make_config, cls.list_required(w), cls.list_pruned(w))
        prune_by_estimate(k, make_config, float(default.estimated_cycles))
        return make_config(k.values)


def limit_compute_threads(max_threads: int) -> Rule:
    """Return the condition that a CTA has at most some threads that compute, and that its registers fit."""
    return (
        f"at most {max_threads} threads compute, and their registers fit",
        lambda t: (
            (t.compute_threads <= max_threads)
            & (t.registers <= MAX_REGISTERS_PER_THREAD)
            & (t.registers * t.num_threads <= REGISTERS_PER_MULTIPROCESSOR)
        ),
    )
