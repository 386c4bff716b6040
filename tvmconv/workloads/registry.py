"""The operators by name, and the way from a text to a workload."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, TypeVar

from tvmconv.errors import WorkloadError
from tvmconv.workloads import operators as folder
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvmconv.workloads.base import Workload

_registry: dict[str, type[Workload]] = {}

W = TypeVar("W", bound="type[Workload]")


def operator(workload: W) -> W:
    """Mark a class of workloads, of `tvmconv.workloads.base.Workload`, as what its `operator` names.

    Raises:
        WorkloadError: there is another one of that name.
    """
    existing = _registry.get(workload.operator)
    if existing and existing.__module__ != workload.__module__:
        name = quote(workload.operator)
        raise WorkloadError(f"operator {name} is defined in {existing.__module__} and {workload.__module__}")
    _registry[workload.operator] = workload
    return workload


@functools.cache
def _load_operators() -> None:
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")


def operators() -> dict[str, type[Workload]]:
    """All classes of workloads by the names of their operators."""
    _load_operators()
    return dict(_registry)


def parse(text: str) -> Workload:
    """Read a workload from its text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`.

    Raises:
        WorkloadError: the operator is unknown, the text malformed, or its numbers contradict each other.
    """
    workload_classes = operators()
    if not isinstance(text, str):
        raise WorkloadError(
            f"expected the text of a workload, as in {workload_classes['conv2d'].EXAMPLE}, not {quote(text)}"
        )
    name, colon, _ = text.partition(":")
    if not colon:
        raise WorkloadError(f"{quote(text)}: expected OPERATOR:SIZES, as in {workload_classes['conv2d'].EXAMPLE}")
    if name not in workload_classes:
        raise WorkloadError(f"unknown operator {quote(name)}: expected one of {', '.join(workload_classes)}")
    return workload_classes[name].parse(text)


def as_workload(workload: Workload | str) -> Workload:
    """Return a workload as it is, or read it from its text.

    Raises:
        WorkloadError: the text is malformed, or the argument is neither a text nor a workload.
    """
    if isinstance(workload, str):
        return parse(workload)
    if not isinstance(getattr(workload, "operator", None), str) or not hasattr(workload, "prim_func"):
        example = operators()["conv2d"].EXAMPLE
        raise WorkloadError(f"expected a workload or its text, as in {example}, not {quote(workload)}")
    return workload
