"""Conditions on workloads that say in an error message what is needed and what a workload has instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvmconv.workloads.layout import CHANNELS_LAST
from tvmconv.workloads.text import join_sizes

WorkloadCondition = Callable[[Any], bool]


@dataclass(frozen=True)
class Requirement:
    """A condition on workloads and its description.

    Attributes:
        description: what a workload must have, as it follows "with": "layout nhwc".
        predicate: `f(w)`, whether the workload has it.
        describe_actual: `f(w)`, what the workload has instead, as it follows "this workload has": "nchw".
    """

    description: str
    predicate: WorkloadCondition
    describe_actual: Callable[[Any], str]

    def __call__(self, w: Any) -> bool:
        """Whether the workload meets the requirement."""
        return bool(self.predicate(w))


@dataclass(frozen=True)
class AllConditions:
    """A condition that holds where all of its parts hold; the first part that does not is the one described.

    Attributes:
        conditions: requirements or bare functions; a part is only asked where all parts before it hold.
    """

    conditions: tuple[WorkloadCondition, ...]

    def __call__(self, w: Any) -> bool:
        """Whether the workload meets all parts."""
        return all(condition(w) for condition in self.conditions)


def all_of(*conditions: WorkloadCondition) -> AllConditions:
    """Combine conditions into one that holds where all of them do.

    Example:
        >>> condition = all_of(CHANNELS_LAST_LAYOUT, one_group)
    """
    return AllConditions(conditions)


def describe_unmet(condition: WorkloadCondition, w: Any) -> str:
    """Say which part of a condition a workload does not meet, to follow "hopper computes conv2d in float16".

    A bare function is described by the first line of its docstring, where that begins with "Whether".
    """
    if isinstance(condition, AllConditions):
        return next(
            (describe_unmet(subcondition, w) for subcondition in condition.conditions if not subcondition(w)), ""
        )
    if isinstance(condition, Requirement):
        return f" with {condition.description}; this workload has {condition.describe_actual(w)}"
    summary = (inspect.getdoc(condition) or "").partition("\n")[0]
    if summary.startswith("Whether "):
        return f" where {summary.removeprefix('Whether ').rstrip('.')}; this workload is not of that kind"
    return " for some workloads; its condition does not hold for this one"


CHANNELS_LAST_LAYOUT = Requirement(f"layout {CHANNELS_LAST}", lambda w: w.layout == CHANNELS_LAST, lambda w: w.layout)
"""The channels are last in memory."""

ONE_GROUP = Requirement("one group", lambda w: w.groups == 1, lambda w: f"{w.groups} groups")
"""Each output channel reads all input channels."""

STRIDE_1 = Requirement("stride 1", lambda w: set(w.stride) == {1}, lambda w: f"stride {join_sizes(w.stride)}")
"""The filter is applied to each pixel."""

DILATION_1 = Requirement("dilation 1", lambda w: set(w.dilation) == {1}, lambda w: f"dilation {join_sizes(w.dilation)}")
"""The taps of the filter are adjacent."""
