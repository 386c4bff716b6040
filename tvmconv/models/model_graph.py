"""The graph of a model as far as convolutions and their epilogues matter: a list of operations on named tensors.

All model formats are translated to this graph, in which `epilogue_fusion` finds the epilogues.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.errors import WorkloadError
from tvmconv.workloads import dtypes, epilogue, parse
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.quantization import WEIGHT_PREFIX
from tvmconv.workloads.text import join_sizes

Shape = tuple[int, ...]
Operand = str | float  # name of a tensor, or a constant number


@dataclass(frozen=True)
class QuantizedFormat:
    """The representation of a tensor in 8 bits with one scale; unsigned integers are signed ones less 128."""

    dtype: str  # element type, one of `dtypes.EIGHT_BIT_DTYPES`
    zero_point: int = 0  # number that stands for zero


@dataclass(frozen=True)
class ModelOp:
    """One operation of a model.

    Its kind is `conv`; `norm`, a factor and a summand per channel; `quantize`, whose result has `quantized_format`; the
    name of a pointwise function, where `sub` and `div` have a tensor as first operand; or "" for all other operations.
    """

    kind: str
    reads: tuple[str, ...]  # names of tensors; a norm reads the tensor that it normalizes first
    writes: tuple[str, ...]  # names of tensors, the main result first
    compute: Callable[..., Any] | None = field(default=None, repr=False)  # of the elements, if it is pointwise
    name: str = ""  # of a convolution
    workload: ConvOperator | None = None  # of a convolution, with its own scale and bias at most as the epilogue
    quantized_format: QuantizedFormat | None = None  # of the result of a quantization


@dataclass
class ModelGraph:
    """The operations of a model in the order of execution, those of unknown kind included."""

    ops: list[ModelOp] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)  # known shapes by tensor name
    constants: set[str] = field(default_factory=set)  # tensors that do not depend on the model's inputs
    parameters: set[str] = field(default_factory=set)  # constants that training changes, such as weights
    dequantized: dict[str, QuantizedFormat] = field(default_factory=dict)  # formats from which floats were computed
    outputs: set[str] = field(default_factory=set)  # tensors that are read from outside the graph
    skipped_layers: list[str] = field(default_factory=list)  # convolutions that are no workload, with the reason

    def add(self, op: ModelOp) -> None:
        """Append an operation; results computed from constants only are constants."""
        self.ops.append(op)
        if self.constants.issuperset(op.reads):
            self.constants.update(op.writes)

    def add_pointwise(self, kind: str, operands: list[Operand], writes: tuple[str, ...], **options: Any) -> None:
        """Append an operation by the name of a pointwise function, with its operands in order and its options."""
        function = functools.partial(find_pointwise_function(kind), **options)

        def compute(*tensors: Any) -> Any:
            remaining = iter(tensors)
            return function(*(next(remaining) if isinstance(operand, str) else operand for operand in operands))

        reads = tuple(operand for operand in operands if isinstance(operand, str))
        is_tensor_first = isinstance(operands[0], str) or kind not in ("sub", "div")
        self.add(ModelOp(kind if is_tensor_first else "", reads, writes, compute))

    def add_conv(
        self, name: str, reads: tuple[str, ...], writes: tuple[str, ...], make: Callable[[], ConvOperator]
    ) -> None:
        """Append a convolution whose workload `make` returns, or note the WorkloadError that it raises."""
        try:
            self.add(ModelOp("conv", reads, writes, name=name, workload=make()))
        except WorkloadError as error:
            self.skip_layer(name, str(error))
            self.add(ModelOp("", reads, writes))

    def skip_layer(self, name: str, reason: str) -> None:
        """Note the reason why a convolution is skipped."""
        self.skipped_layers.append(f"{name}: {reason}")


def make_convolution(
    x: Shape,
    weight: Shape,
    *,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int,
    dtype: str,
    bias: bool,
    output_padding: Shape | None = None,
    options: Sequence[str] = (),
) -> ConvOperator:
    """Return the workload of a convolution, with further options before its bias; raise WorkloadError if there is none.

    The shapes are N×C×space and O×(C/groups)×kernel. Padding has one number per axis for both sides, or the numbers
    before all axes and then after all axes. With `output_padding`, the convolution is transposed, and its weight is
    C×(O/groups)×kernel.
    """
    sizes = {"s": stride, "p": padding, "d": dilation, "g": (groups,)}
    if output_padding is not None:
        sizes["op"] = output_padding
    pieces = [
        join_sizes(x),
        join_sizes(weight),
        *(f"{letter}{join_sizes(numbers)}" for letter, numbers in sizes.items()),
    ]
    text = ",".join([*pieces, dtypes.validate_dtype(dtype).text, *options, *["bias"] * bias])
    workload = parse(f"conv{len(x) - 2}d{'' if output_padding is None else '_transpose'}:{text}")
    assert isinstance(workload, ConvOperator)
    return workload


def make_quantized_convolution(
    x: Shape,
    weight: Shape,
    formats: Sequence[QuantizedFormat],
    *,
    padding: Shape,
    bias: bool,
    out_dtype: str,
    **how: Any,
) -> ConvOperator:
    """Return the workload of a convolution of operands in 8 bits, whose sums are scaled; raise WorkloadError likewise.

    Kernels pad with zeros. If another number stands for zero, the input is padded before. The bias then has the sum of
    the weights times this number.

    Args:
        x: Shape of the input.
        weight: Shape of the weight.
        formats: Formats of both, of which the weight's zero point is 0.
        padding: Padding as of `make_convolution`.
        bias: Whether the convolution has a bias.
        out_dtype: Element type of a result that is not quantized.
        how: Other arguments of `make_convolution`.
    """
    if formats[0].zero_point and any(padding):
        ndim = len(weight) - 2
        sizes = zip(x[2:], (*padding, *padding)[:ndim], (*padding, *padding)[ndim : 2 * ndim], strict=True)
        x, padding = (*x[:2], *(sum(each) for each in sizes)), (0,) * ndim
    options = [f"out-{dtypes.DTYPES[out_dtype].text}", "scale"]
    if formats[1].dtype != formats[0].dtype:
        options.insert(0, f"{WEIGHT_PREFIX}{dtypes.DTYPES[formats[1].dtype].text}")
    bias = bias or formats[0].zero_point != 0
    return make_convolution(x, weight, padding=padding, bias=bias, dtype=formats[0].dtype, options=options, **how)


def find_pointwise_function(kind: str) -> Callable[..., Any]:
    """Return a function of NumPy arrays: one of `POINTWISE_FUNCTIONS`, or the reference of an epilogue operation."""
    return POINTWISE_FUNCTIONS.get(kind) or epilogue.load_ops()[kind].reference


def _erf(x: NDArray[Any]) -> NDArray[Any]:
    from scipy.special import erf

    return erf(x)


def _gelu(x: NDArray[Any], *, by_tanh: bool = False) -> NDArray[Any]:
    return epilogue.load_ops()["gelu_tanh" if by_tanh else "gelu"].reference(x)


def _clip(x: NDArray[Any], *, low: float = -np.inf, high: float = np.inf) -> NDArray[Any]:
    return np.minimum(np.maximum(x, low), high)


def _hardsigmoid(x: NDArray[Any], *, slope: float = 1 / 6, shift: float = 0.5) -> NDArray[Any]:
    return _clip(x * slope + shift, low=0, high=1)


def _leaky_relu(x: NDArray[Any], *, slope: float = 0.01) -> NDArray[Any]:
    return np.where(x > 0, x, slope * x)


def _elu(x: NDArray[Any], *, alpha: float = 1.0) -> NDArray[Any]:
    return np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def _softplus(x: NDArray[Any], *, beta: float = 1.0) -> NDArray[Any]:
    return np.logaddexp(0, beta * x) / beta


POINTWISE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "same": lambda x: x,
    "neg": np.negative,
    "exp": np.exp,
    "erf": _erf,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "softplus": _softplus,
    "gelu": _gelu,
    "hardsigmoid": _hardsigmoid,
    "clip": _clip,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
}
