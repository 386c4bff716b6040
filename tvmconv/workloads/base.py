"""The interface that every workload provides, whatever its operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tvmconv.html import make_html_properties
from tvmconv.workloads import dtypes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tvm import te, tirx


@dataclass(frozen=True)
class OutputSample:
    """A sample of a workload's correct outputs, against which a kernel is verified."""

    positions: NDArray[np.int64]  # flat index of each output in the output tensor's memory, in elements
    values: NDArray[np.float64]
    max_errors: NDArray[np.float32]  # largest absolute error of a correct kernel at each position, positive


class Workload(Protocol):
    """An operator on tensors of fixed shapes, with at least two inputs and one output.

    Workloads are immutable and hashable. Two workloads are equal exactly when their texts are equal.
    """

    operator: ClassVar[str]  # name of the operator and prefix of the text, such as `conv2d`
    EXAMPLE: ClassVar[str]  # text of a workload, quoted in error messages

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.text}>"

    def _repr_html_(self) -> str:
        shapes = [
            f"{'×'.join(map(str, shape))} {dtype}"
            for shape, dtype in zip(self.argument_shapes, self.argument_dtypes, strict=True)
        ]
        values = {
            **dict(zip(self.argument_names, shapes, strict=True)),
            "operations": f"{self.flops / 1e9:.4g} GFLOP",
            "bytes": f"at least {self.min_bytes / 1e6:.4g} MB",
            "intensity": f"{self.arithmetic_intensity:.3g} FLOP/byte",
            "epilogue": ", ".join(self.epilogue),
        }
        return make_html_properties(self.text, values)

    @property
    def dtype(self) -> str:
        """Data type in which elements are stored and multiplied, one of `tvmconv.workloads.dtypes.DTYPES`."""

    @property
    def storage(self) -> str:
        """Element type in memory of the output, and of each input without an element type of its own."""
        return dtypes.DTYPES[self.dtype].storage

    @property
    def tolerance(self) -> float:
        """Largest relative L2 error of a correct result against `reference`."""
        return dtypes.DTYPES[self.dtype].tolerance

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Names of the operations on each sum before it is stored, in order; see `tvmconv.workloads.epilogue`."""

    @property
    def required_features(self) -> tuple[str, ...]:
        """Properties that a schedule has to support explicitly, among `tvmconv.workloads.features.ALL_FEATURES`."""
        return ()

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the kernel's arguments, inputs first and the output last."""

    @property
    def argument_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the kernel's arguments in memory order, one for each of `argument_names`."""

    @property
    def argument_dtypes(self) -> tuple[str, ...]:
        """Element types of the kernel's arguments in memory, one for each of `argument_names`."""

    @property
    def flops(self) -> int:
        """Number of floating-point operations; a multiply-add counts as two, and taps in the padding count."""

    @property
    def min_bytes(self) -> int:
        """Minimum memory traffic in bytes: used input elements are read once, output elements are written once."""

    @property
    def arithmetic_intensity(self) -> float:
        """`flops` divided by `min_bytes`, in FLOP per byte: the x axis of a roofline plot."""
        return self.flops / self.min_bytes

    @property
    def text(self) -> str:
        """Canonical text, from which `parse` returns an equal workload."""

    def inputs(self, seed: int) -> tuple[NDArray[Any], ...]:
        """Draw standard normal inputs from a seed (not negative): arrays of the arguments' shapes and dtypes."""

    def reference(self, *inputs: NDArray[Any]) -> NDArray[np.float64]:
        """Return the correct output for these inputs in memory order, computed in float64."""

    def declare(self) -> tuple[te.Tensor, ...]:
        """Declare the computation in tensor expressions and return one tensor for each of `argument_names`."""

    def prim_func(self) -> tirx.PrimFunc:
        """Return the declaration as an unscheduled TIR function, ready for `tvm.s_tir.Schedule`.

        Examples:
            >>> import tvmconv as tc
            >>> len(tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1").prim_func().params)
            3
        """
        from tvm import te

        return te.create_prim_func(list(self.declare()))

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read the text of a workload of this class; raise WorkloadError if it is malformed or contradictory."""
