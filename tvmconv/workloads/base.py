"""What every workload provides, whatever its operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm import te, tirx


@dataclass(frozen=True)
class OutputSample:
    """Some outputs of a workload.

    Attributes:
        positions: where each lies in the output's memory, counted in elements.
        values: what is right, in float64.
        max_errors: the largest error of a right kernel at each, positive, in float32.
    """

    positions: NDArray[np.int64]
    values: NDArray[np.float64]
    max_errors: NDArray[np.float32]


class Workload(Protocol):
    """What to compute: an operator on tensors of fixed shapes, at least two inputs and one output.

    Workloads are immutable and hashable, and two are equal exactly when their texts are.
    """

    operator: ClassVar[str]  # the operator's name, which is also the prefix of the text: `conv2d`
    EXAMPLE: ClassVar[str]  # a text, for messages

    def __hash__(self) -> int:
        """The same for equal workloads."""

    @property
    def dtype(self) -> str:
        """How elements are stored and multiplied, one of `tvmconv.workloads.dtypes.DTYPES`."""

    @property
    def storage(self) -> str:
        """Element type of the output, and of all inputs that are not said to be of another, in memory."""

    @property
    def tolerance(self) -> float:
        """The largest relative L2 error of a right result, against `reference`."""

    @property
    def epilogue(self) -> tuple[str, ...]:
        """The operations on each sum before it is stored, in order; see `tvmconv.workloads.epilogue`."""

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the kernel's arguments, inputs first and the output last."""

    @property
    def argument_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the kernel's arguments as they lie in memory, in the order of `argument_names`."""

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of the kernel's arguments in memory, in the order of `argument_names`."""

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition counted apart, taps in the padding included."""

    @property
    def min_bytes(self) -> int:
        """Least bytes moved to and from memory: each input element that is used read once, each output written once."""

    @property
    def arithmetic_intensity(self) -> float:
        """`flops` over `min_bytes`, in FLOP per byte: the x of a roofline plot."""

    @property
    def text(self) -> str:
        """Canonical text; `parse` of it gives an equal workload."""

    def inputs(self, seed: int) -> tuple[NDArray[Any], ...]:
        """Standard normal inputs drawn from `seed`, C-contiguous, of the arguments' shapes and dtypes."""

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """The right output for these inputs, computed in float64."""

    def declare(self) -> tuple[te.Tensor, ...]:
        """The tensor-expression declaration: one tensor for each of `argument_names`."""

    def prim_func(self) -> tirx.PrimFunc:
        """The declaration as an unscheduled TIR function, ready for `tvm.s_tir.Schedule`."""

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read the text of a workload of this class; raises WorkloadError."""
