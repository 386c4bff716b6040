"""Epilogues: operations on each output between its sum and its store, available in every schedule.

An epilogue is a list of operations in the order in which they are applied. The files in `tvmconv/workloads/epilogues/`
define the operations: text, tensor expression and float64 reference. An operation that reads a tensor (a
bias, a residual) adds an argument of its name to the kernel.
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
    """One operation of an epilogue."""

    name: str  # text of the operation in a workload, and name of its argument if it reads one
    # Function from a value (and the argument's element for it) to the new value, in tensor expressions of the
    # accumulator's type. It imports TVM itself if it needs more than operators.
    compute: Callable[..., tirx.Expr] = field(repr=False)
    # The same function on float64 arrays, which broadcast against each other.
    reference: Callable[..., NDArray[np.float64]] = field(repr=False)
    # `channel` for one number per output channel in the accumulator's type, `tensor` for one number in that type,
    # `output` for a tensor of the output's shape and type, None for an operation without an argument. `stats` is a
    # second result: mean and variance of each output channel, of shape (2, O) in the accumulator's type.
    argument_kind: Literal["channel", "output", "tensor", "stats"] | None = None
    # Whether the operation only adds its argument; an accumulator may then start from the argument.
    is_addition: bool = False
    # Function from standard normal numbers, the typical size of the operation's input, and the storage dtype of the
    # output to the argument of a test. None for the numbers themselves.
    draw: Callable[[NDArray[np.float32], float, str], NDArray[np.float32]] | None = field(default=None, repr=False)

    @property
    def reads_argument(self) -> bool:
        """Whether the operation reads its argument."""
        return self.argument_kind in ("channel", "output", "tensor")


QUANTIZE = "quantize"  # operation before an output of 8 bits
ZERO_POINT = "zero_point"  # operation after it, for outputs in i8 whose zero is another integer
STATS = "stats"  # operation that leaves the output as it is, and returns the statistics of its channels

_registry: dict[str, EpilogueOp] = {}


def register_op(op: EpilogueOp) -> None:
    """Register an operation; raise WorkloadError if another file has registered one of that name."""
    existing = _registry.get(op.name)
    if existing and existing.compute.__code__.co_filename != op.compute.__code__.co_filename:
        raise WorkloadError(f"epilogue {quote(op.name)} is registered already: expected a new name")
    _registry[op.name] = op


@functools.cache
def _load_op_modules() -> None:
    for module in pkgutil.iter_modules(epilogues.__path__):
        importlib.import_module(f"{epilogues.__name__}.{module.name}")


def load_ops() -> dict[str, EpilogueOp]:
    """Return all operations by name, in alphabetical order whatever the order of imports."""
    _load_op_modules()
    return dict(sorted(_registry.items()))


def validate_epilogue(names: object) -> tuple[str, ...]:
    """Return the operations' names of an epilogue, which is one name, or a tuple or list of names. Raises WorkloadError
    for an unknown or repeated name, or another type.
    """
    op_names = (names,) if isinstance(names, str) else names
    if not isinstance(op_names, (tuple, list)):
        raise WorkloadError(f"epilogue={quote(names)}: expected a list of {', '.join(load_ops())}")
    for name in op_names:
        if name not in load_ops():
            raise WorkloadError(f"epilogue={quote(names)}: expected operations of {', '.join(load_ops())}")
        if op_names.count(name) > 1:
            raise WorkloadError(f"epilogue={quote(names)}: expected {name} at most once")
    if STATS in op_names[:-1]:
        raise WorkloadError(f"epilogue={quote(names)}: expected {STATS} as the last operation")
    return tuple(op_names)


def get_ops(names: Sequence[str]) -> list[EpilogueOp]:
    """Return the operations of an epilogue, in order."""
    return [load_ops()[name] for name in names]


def apply_to_expression(names: Sequence[str], value: tirx.Expr, read: Callable[[str], tirx.Expr]) -> tirx.Expr:
    """Apply an epilogue to a sum in tensor expressions of the accumulator's type. `read` returns the element of an
    operation's argument for this output, in the accumulator's type.
    """
    for op in get_ops(names):
        value = op.compute(value, read(op.name)) if op.reads_argument else op.compute(value)
    return value


def apply_to_array(names: Sequence[str], y: NDArray[np.float64], arguments: dict[str, Any]) -> NDArray[np.float64]:
    """Apply an epilogue to sums in float64, with the operations' arguments by name, which broadcast against them."""
    for op in get_ops(names):
        y = op.reference(y, arguments[op.name]) if op.reads_argument else op.reference(y)
    return y
