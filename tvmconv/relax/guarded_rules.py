"""TVM's default pipeline with rules of dlight that may fail: where a rule raises an error, the next one schedules.

In TVM 0.27, some rules assert what does not hold for each function that they accept ("There are some consumers of the
cache-write stage that are not properly inlined"). One such function would keep a whole model from being compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx
from tvm.ir.transform import Sequential
from tvm.s_tir import dlight

if TYPE_CHECKING:
    from tvm.target import Target


def make_default_pipeline(target: Target) -> Any:
    """Return TVM's default pipeline for a target; for CUDA, with rules that may fail."""
    if target.kind.name != "cuda":
        return relax.get_default_pipeline(target)
    backend = relax.backend.cuda.pipeline
    stages: Sequence[Callable[[Target], list[Any]]] = (
        backend.library_dispatch_passes,
        backend.legalize_passes,
        backend.dataflow_lower_passes,
        backend.finalize_passes,
    )
    return Sequential([_guard_pass(each) for stage in stages for each in stage(target)])


def _guard_pass(each: Any) -> Any:
    """Return a pass with rules that may fail if it applies rules, and any other as it is. The last rule, which applies
    to all functions, may not fail.
    """
    if each.info.name != "ApplyDefaultSchedule":
        return each
    *rules, last = each.rules
    return dlight.ApplyDefaultSchedule(*map(guard_rule, rules), last)


def guard_rule(rule: dlight.base.ScheduleRule) -> dlight.base.ScheduleRule:
    """Return a rule that leaves a function to the next rule where `rule` raises an error."""

    @dlight.base.ScheduleRule.from_callable(type(rule).__name__)
    def apply_rule(function: tirx.PrimFunc, target: Target, tunable: bool) -> Any:
        try:
            return rule.apply(function, target, tunable)
        except Exception:  # TVM raises many types
            return None

    return apply_rule
