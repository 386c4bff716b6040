"""The registry of operators by name, and the parser of workload texts."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, TypeVar

import tvmconv.workloads.operators as folder
from tvmconv.errors import WorkloadError
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    from tvmconv.workloads.base import Workload

_registry: dict[str, type[Workload]] = {}

W = TypeVar("W", bound="type[Workload]")


def operator(workload: W) -> W:
    """Register a class of workloads under the name in its `operator` attribute, as a class decorator.

    Raises WorkloadError if another module has registered an operator of that name.
    """
    existing = _registry.get(workload.operator)
    if existing and existing.__module__ != workload.__module__:
        name = quote(workload.operator)
        raise WorkloadError(f"operator {name} is defined in {existing.__module__} and {workload.__module__}")
    _registry[workload.operator] = workload
    _parse.cache_clear()
    return workload


@functools.cache
def _load_operators() -> None:
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")


def operators() -> dict[str, type[Workload]]:
    """Return the classes of all workloads by operator name."""
    _load_operators()
    return dict(_registry)


def parse(text: str) -> Workload:
    """Read a workload from its text.

    Args:
        text: Text of a workload, `OPERATOR:SIZES`, in the format that the `parse` of the operator's class describes.

    Returns:
        The workload.

    Raises:
        WorkloadError: The operator is unknown, the text is malformed, or its numbers contradict each other.

    Examples:
        >>> import tvmconv
        >>> tvmconv.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1").flops
        231211008
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
    return _parse(text)


@functools.lru_cache(maxsize=4096)  # logs repeat their workloads, which are immutable
def _parse(text: str) -> Workload:
    return _registry[text.partition(":")[0]].parse(text)


def as_workload(workload: Workload | str) -> Workload:
    """Return a workload unchanged, or read it from its text; raise WorkloadError for anything else."""
    if isinstance(workload, str):
        return parse(workload)
    if not isinstance(getattr(workload, "operator", None), str) or not hasattr(workload, "prim_func"):
        example = operators()["conv2d"].EXAMPLE
        raise WorkloadError(f"expected a workload or its text, as in {example}, not {quote(workload)}")
    return workload
