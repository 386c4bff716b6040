"""Epilogues: what is done to each output between its sum and its store, declared once and there in every schedule.

An epilogue is a list of operations in the order in which they are applied. An operation is a file in
`tvmconv/workloads/epilogues/`, which gives its text, its tensor expression and its float64 reference; an operation that
reads a tensor of its own (a bias, a residual) adds an argument of its name to the kernel.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tvmconv.errors import WorkloadError
from tvmconv.workloads import epilogues
from tvmconv.workloads.text import quote

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm import tirx


@dataclass(frozen=True)
class EpilogueOp:
    """One step of an epilogue.

    Attributes:
        name: its text in a workload, and the name of its argument if it takes one.
        compute: from a value in the accumulation dtype, and the argument's element for it if it takes one, to such a
            value, in tensor expressions; imports TVM by itself, if it needs more than operators.
        reference: the same of float64 arrays, which broadcast against each other.
        argument_kind: what it reads besides: `channel` is a number for each output channel, in the accumulation dtype,
            and `output` a tensor like the output.
        is_addition: whether it adds what it reads, and does nothing else: a sum may begin with that.
    """

    name: str
    compute: Callable[..., tirx.Expr] = field(repr=False)
    reference: Callable[..., NDArray[np.float64]] = field(repr=False)
    argument_kind: Literal["channel", "output"] | None = None
    is_addition: bool = False


_registry: dict[str, EpilogueOp] = {}


def register_op(op: EpilogueOp) -> None:
    """Make an operation known, also one of a user's own; raises WorkloadError if its name is taken."""
    existing = _registry.get(op.name)
    if existing and existing.compute.__code__.co_filename != op.compute.__code__.co_filename:
        raise WorkloadError(f"there is an epilogue {quote(op.name)} already")
    _registry[op.name] = op


@functools.cache
def _load_op_modules() -> None:
    for module in pkgutil.iter_modules(epilogues.__path__):
        importlib.import_module(f"{epilogues.__name__}.{module.name}")


def load_ops() -> dict[str, EpilogueOp]:
    """All operations by name, in alphabetical order, whatever imported them first."""
    _load_op_modules()
    return dict(sorted(_registry.items()))


def validate_epilogue(names: object) -> tuple[str, ...]:
    """The names of an epilogue's operations, in order; raises WorkloadError."""
    op_names = (names,) if isinstance(names, str) else names
    if not isinstance(op_names, (tuple, list)):
        raise WorkloadError(f"epilogue={quote(names)}: expected a list of {', '.join(load_ops())}")
    for name in op_names:
        if name not in load_ops():
            raise WorkloadError(f"epilogue={quote(names)}: expected operations of {', '.join(load_ops())}")
        if op_names.count(name) > 1:
            raise WorkloadError(f"epilogue={quote(names)}: expected {name} at most once")
    return tuple(op_names)


def get_ops(names: Sequence[str]) -> list[EpilogueOp]:
    """The operations of an epilogue, in order."""
    return [load_ops()[name] for name in names]


def apply_to_expression(names: Sequence[str], value: tirx.Expr, read: Callable[[str], tirx.Expr]) -> tirx.Expr:
    """Apply an epilogue in tensor expressions.

    Args:
        names: of its operations.
        value: a sum, in the accumulation dtype.
        read: from an operation's name to its argument's element for this output, in the accumulation dtype.
    """
    for op in get_ops(names):
        value = op.compute(value, read(op.name)) if op.argument_kind else op.compute(value)
    return value


def apply_to_array(names: Sequence[str], y: NDArray[np.float64], arguments: dict[str, Any]) -> NDArray[np.float64]:
    """Apply an epilogue in float64.

    Args:
        names: of its operations.
        y: the sums.
        arguments: of the operations that take one, in float64, by name; they broadcast against `y`.
    """
    for op in get_ops(names):
        y = op.reference(y, arguments[op.name]) if op.argument_kind else op.reference(y)
    return y
