"""The graph of a model as far as convolutions and their epilogues matter: a list of operations on named tensors.

All model formats are translated to this graph, in which `epilogue_fusion` finds the epilogues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvmconv.errors import WorkloadError
from tvmconv.models import pointwise
from tvmconv.workloads import Conv, dtypes, parse
from tvmconv.workloads.text import join_sizes

Shape = tuple[int, ...]
Operand = str | float  # name of a tensor, or a constant number


@dataclass(frozen=True)
class ModelOp:
    """One operation of a model.

    Attributes:
        kind: `conv`; `norm`, a factor and a summand per channel; a name in `pointwise.FUNCTIONS`, where `sub` and `div`
            have a tensor as first operand; or "" for all other operations.
        reads: Names of the tensors that it reads; a norm reads the tensor that it normalizes first.
        writes: Names of the tensors that it writes, the main result first.
        compute: Function of the elements that it reads, if it is pointwise.
        name: Name of a convolution.
        workload: Workload of a convolution, whose epilogue is at most its own bias.
    """

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compute: Callable[..., Any] | None = field(default=None, repr=False)
    name: str = ""
    workload: Conv | None = None


@dataclass
class ModelGraph:
    """The operations of a model in the order of execution.

    Attributes:
        ops: All operations that read or write tensors, of unknown kind included.
        shapes: Known shapes by tensor name.
        constants: Names of tensors that do not depend on the model's inputs.
        outputs: Names of tensors that are read from outside the graph.
        skipped_layers: One line per convolution that is not a workload, with the reason.
    """

    ops: list[ModelOp] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    skipped_layers: list[str] = field(default_factory=list)

    def add(self, op: ModelOp) -> None:
        """Append an operation; results computed from constants only are constants."""
        self.ops.append(op)
        if self.constants.issuperset(op.reads):
            self.constants.update(op.writes)

    def add_pointwise(self, kind: str, operands: list[Operand], writes: tuple[str, ...], **options: Any) -> None:
        """Append a pointwise operation.

        Args:
            kind: A name in `pointwise.FUNCTIONS`.
            operands: Operands in order.
            writes: Names of the tensors that it writes.
            options: Keyword arguments of the function.
        """
        reads = tuple(operand for operand in operands if isinstance(operand, str))
        is_tensor_first = isinstance(operands[0], str) or kind not in ("sub", "div")
        self.add(
            ModelOp(kind if is_tensor_first else "", reads, writes, pointwise.bind_operands(kind, operands, **options))
        )

    def add_conv(self, name: str, reads: tuple[str, ...], writes: tuple[str, ...], make: Callable[[], Conv]) -> None:
        """Append a convolution, or note the reason why it is skipped.

        Args:
            name: Name of the layer.
            reads: Names of the tensors that it reads.
            writes: Names of the tensors that it writes.
            make: Function that returns its workload, or raises WorkloadError if there is none.
        """
        try:
            self.add(ModelOp("conv", reads, writes, name=name, workload=make()))
        except WorkloadError as error:
            self.skip_layer(name, str(error))
            self.add(ModelOp("", reads, writes))

    def skip_layer(self, name: str, reason: str) -> None:
        """Note the reason why a convolution is skipped."""
        self.skipped_layers.append(f"{name}: {reason}")


def make_convolution(
    x: Shape, weight: Shape, *, stride: Shape, padding: Shape, dilation: Shape, groups: int, dtype: str, bias: bool
) -> Conv:
    """Return the workload of a convolution over one or more spatial axes.

    Args:
        x: Shape of the input, N×C×space.
        weight: Shape of the weight, O×(C/groups)×kernel.
        stride: One number per spatial axis.
        padding: One number per axis for both sides, or the numbers before all axes and then after all axes.
        dilation: One number per spatial axis.
        groups: Number of groups.
        dtype: Dtype of the elements, one of `dtypes.DTYPES`.
        bias: Whether there is a bias.

    Raises:
        WorkloadError: There is no such workload.
    """
    sizes = {"s": stride, "p": padding, "d": dilation, "g": (groups,)}
    options = [f"{letter}{join_sizes(numbers)}" for letter, numbers in sizes.items()]
    text = ",".join([join_sizes(x), join_sizes(weight), *options, dtypes.validate_dtype(dtype).text, *["bias"] * bias])
    workload = parse(f"conv{len(x) - 2}d:{text}")
    assert isinstance(workload, Conv)
    return workload
