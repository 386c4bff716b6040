"""Conditions on workloads with descriptions for error messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST
from tvmconv.workloads.text import join_sizes

WorkloadCondition = Callable[[Any], bool]


@dataclass(frozen=True)
class Requirement:
    """A condition on workloads with its description."""

    description: str  # required property, to follow "with", such as "layout nhwc"
    predicate: WorkloadCondition  # function `f(w)` that returns whether the workload has the property
    # Function `f(w)` that describes the actual property, to follow "this workload has".
    describe_actual: Callable[[Any], str]

    def __call__(self, w: Any) -> bool:
        """Return whether the workload meets the requirement."""
        return bool(self.predicate(w))


@dataclass(frozen=True)
class AllConditions:
    """A conjunction of conditions, of which the first unmet one is described."""

    # Requirements or plain functions, evaluated in order until one is not met.
    conditions: tuple[WorkloadCondition, ...]

    def __call__(self, w: Any) -> bool:
        """Return whether the workload meets all conditions."""
        return all(condition(w) for condition in self.conditions)


def all_of(*conditions: WorkloadCondition) -> AllConditions:
    """Combine conditions into one that is met if all of them are met.

    Examples:
        >>> condition = all_of(CHANNELS_LAST_LAYOUT, ONE_GROUP)
    """
    return AllConditions(conditions)


def describe_unmet(condition: WorkloadCondition, w: Any) -> str:
    """Return a description of the unmet condition, to follow "hopper computes conv2d in float16". A plain function is
    described by the first line of its docstring if that begins with "Whether" or "Return whether".
    """
    if isinstance(condition, AllConditions):
        return next((describe_unmet(part, w) for part in condition.conditions if not part(w)), "")
    if isinstance(condition, Requirement):
        return f" with {condition.description}; this workload has {condition.describe_actual(w)}"
    summary = (inspect.getdoc(condition) or "").partition("\n")[0]
    if match := re.fullmatch(r"(?:W|Return w)hether (.*?)\.?", summary):
        return f" where {match[1]}; this workload is not of that kind"
    return " for some workloads; this workload does not meet its condition"


CHANNELS_LAST_LAYOUT = Requirement(f"layout {CHANNELS_LAST}", lambda w: w.layout == CHANNELS_LAST, lambda w: w.layout)
"""The channel axis is the innermost one in memory."""

CHANNELS_FIRST_LAYOUT = Requirement(
    f"layout {CHANNELS_FIRST}", lambda w: w.layout == CHANNELS_FIRST, lambda w: w.layout
)
"""The columns of a row are the innermost axis in memory."""

SOME_CHANNELS_LAST = Requirement(
    f"layout {CHANNELS_LAST} or a mixed layout",
    lambda w: CHANNELS_LAST in (w.input_layout, w.output_layout),
    lambda w: w.layout,
)
"""The channel axis of X or of Y is the innermost one in memory."""

ONE_GROUP = Requirement("one group", lambda w: w.groups == 1, lambda w: f"{w.groups} groups")
"""Each output channel reads all input channels."""

STRIDE_1 = Requirement("stride 1", lambda w: set(w.stride) == {1}, lambda w: f"stride {join_sizes(w.stride)}")
"""The filter is applied at every pixel."""

DILATION_1 = Requirement("dilation 1", lambda w: set(w.dilation) == {1}, lambda w: f"dilation {join_sizes(w.dilation)}")
"""The taps of the filter are adjacent."""
