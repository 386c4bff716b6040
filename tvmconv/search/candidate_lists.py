"""Lists of configs to try for a workload, which builder processes compute for the search of many workloads at once.

Search spaces and predictions take up to a second for each workload. The process that directs the search asks builder
processes for these lists, and is free meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from tvmconv import registry
from tvmconv.cost_model.recommend import make_prior, recommend_configs
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.space import Config
from tvmconv.space.search_space import Space
from tvmconv.workloads import Workload

MAX_FIRST_CONFIGS = 12  # configs of a workload before neighbours of the fastest ones
MAX_NEIGHBORS = 8  # neighbours of a config, those with the best predictions or estimates
MAX_CACHED_SPACES = 64  # search spaces that a process keeps


class ListedConfig(NamedTuple):
    """A schedule's name and a config of it."""

    schedule: str
    config: Config

    @property
    def key(self) -> str:
        """Text that is equal for equal configs."""
        return f"{self.schedule} {sorted(self.config.items())}"


def list_first_configs(workload: Workload, device: Device) -> list[ListedConfig]:
    """Return the configs to try first: predictions, defaults, and those with which schedules start, in turns.

    Args:
        workload: Workload to compute.
        device: Device to run on, or architecture to compile for.

    Returns:
        Distinct legal configs, the most promising first. Raises ScheduleError if no schedule computes the workload.
    """
    first_schedule, *others = registry.schedules_to_tune(workload, device.kind, device.arch)
    predictions = (ListedConfig(each.schedule, each.config) for each in recommend_configs(workload, device))
    own_configs = _iterate_own_configs(workload, first_schedule, device)
    other_configs = _interleave([_iterate_own_configs(workload, schedule, device) for schedule in others])
    turns = _interleave([predictions, own_configs, own_configs, other_configs])
    return list(islice({each.key: each for each in turns}.values(), MAX_FIRST_CONFIGS))


def list_neighbors(workload: Workload, device: Device, schedule_name: str, config: Config) -> list[ListedConfig]:
    """Return the legal configs that differ from a config in one knob, those with the best predicted times first.

    They are ranked by the cost model, else by the schedule's estimate, else in a random order.
    """
    space = _make_space(workload, schedule_name, device)
    points = space.list_neighbors(space.project(config))
    if not len(points):
        return []
    order = np.random.default_rng(0).permutation(len(points))
    prior = make_prior(workload, schedule_name, space, device)
    usage = space.compute_usage(points)
    if prior is not None:
        order = np.argsort(prior(points), kind="stable")
    elif usage is not None and usage.estimate is not None:
        order = np.argsort(usage.estimate, kind="stable")
    return [ListedConfig(schedule_name, space.config_from_point(points[i])) for i in order[:MAX_NEIGHBORS]]


def _iterate_own_configs(workload: Workload, schedule: registry.Schedule, device: Device) -> Iterator[ListedConfig]:
    """Yield the default of a schedule, and the legal configs with which its search starts; none if it fails."""
    with contextlib.suppress(Error):
        space = _make_space(workload, schedule.name, device)
        for config in (space.default, *schedule.list_starting_configs(workload)):
            point = space.project(config)
            if space.is_legal(point[None])[0]:
                yield ListedConfig(schedule.name, space.config_from_point(point))


@functools.lru_cache(MAX_CACHED_SPACES)
def _make_space(workload: Workload, schedule_name: str, device: Device) -> Space:
    return registry.find_schedule(workload, schedule_name).space(workload, device.limits)


def _interleave(iterables: Iterable[Iterable[ListedConfig]]) -> Iterator[ListedConfig]:
    """Yield items of all iterables in turns; an iterator that is given twice has two items in each turn."""
    for group in zip_longest(*iterables):
        yield from (each for each in group if each is not None)
