"""What a model does, as far as convolutions and their epilogues are concerned: a list of operations on named tensors.

Whatever a model is read from becomes this, and `fuse` finds the epilogues in it.
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
Operand = str | float  # the name of a tensor, or a number that the operation has for good


@dataclass(frozen=True)
class ModelOp:
    """One operation of a model.

    Attributes:
        kind: `conv`; `norm`, which is a factor and a summand for each channel; a name in `pointwise.FUNCTIONS`, of
            which `sub` and `div` begin with a tensor; or "" for all else.
        reads: the tensors that it reads; what it normalises is a norm's first.
        writes: those that it writes; what counts is the first.
        compute: what it does to each element of what it reads, if it is pointwise.
        name: of a convolution.
        workload: of a convolution; its epilogue is its own bias at most.
    """

    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    compute: Callable[..., Any] | None = field(default=None, repr=False)
    name: str = ""
    workload: Conv | None = None


@dataclass
class ModelGraph:
    """The operations of a model in the order in which they are executed.

    Attributes:
        ops: all that read or write tensors, those that mean nothing here as well.
        shapes: of the tensors for which they are known.
        constants: tensors that do not depend on the model's inputs.
        outputs: tensors that are seen by others than the operations.
        skipped_layers: convolutions that are no workloads, each with the reason.
    """

    ops: list[ModelOp] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    skipped_layers: list[str] = field(default_factory=list)

    def add(self, op: ModelOp) -> None:
        """Append an operation; what is made of constants alone is constant."""
        self.ops.append(op)
        if self.constants.issuperset(op.reads):
            self.constants.update(op.writes)

    def add_pointwise(self, kind: str, operands: list[Operand], writes: tuple[str, ...], **options: Any) -> None:
        """Append an operation on each element.

        Args:
            kind: a name in `pointwise.FUNCTIONS`.
            operands: what it takes, in order.
            writes: the tensors that it writes.
            options: keyword arguments of the function.
        """
        reads = tuple(operand for operand in operands if isinstance(operand, str))
        is_tensor_first = isinstance(operands[0], str) or kind not in ("sub", "div")
        self.add(
            ModelOp(kind if is_tensor_first else "", reads, writes, pointwise.bind_operands(kind, operands, **options))
        )

    def add_conv(self, name: str, reads: tuple[str, ...], writes: tuple[str, ...], make: Callable[[], Conv]) -> None:
        """Append a convolution, or say why it is left out.

        Args:
            name: of the layer.
            reads: the tensors that it reads.
            writes: the tensors that it writes.
            make: gives its workload; raises WorkloadError if it is none.
        """
        try:
            self.add(ModelOp("conv", reads, writes, name=name, workload=make()))
        except WorkloadError as error:
            self.skip_layer(name, str(error))
            self.add(ModelOp("", reads, writes))

    def skip_layer(self, name: str, reason: str) -> None:
        """Say of a convolution why it is left out."""
        self.skipped_layers.append(f"{name}: {reason}")


def make_convolution(
    x: Shape, weight: Shape, *, stride: Shape, padding: Shape, dilation: Shape, groups: int, dtype: str, bias: bool
) -> Conv:
    """The workload of a convolution, of one axis of space or more.

    Args:
        x: N×C×space.
        weight: O×(C/groups)×kernel.
        stride: a number for each axis of space.
        padding: one for each axis, for both its sides; or before all axes and then behind all.
        dilation: one for each axis.
        groups: of the channels.
        dtype: of the elements, as `dtypes.DTYPES` has it.
        bias: whether there is one.

    Raises:
        WorkloadError: there is no such workload.
    """
    sizes = {"s": stride, "p": padding, "d": dilation, "g": (groups,)}
    options = [f"{letter}{join_sizes(numbers)}" for letter, numbers in sizes.items()]
    text = ",".join([join_sizes(x), join_sizes(weight), *options, dtypes.validate_dtype(dtype).text, *["bias"] * bias])
    workload = parse(f"conv{len(x) - 2}d:{text}")
    assert isinstance(workload, Conv)
    return workload
