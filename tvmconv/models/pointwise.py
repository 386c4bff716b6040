"""Pointwise operations of models as functions of NumPy arrays; activations are recognized by their values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.workloads import epilogue

# Sample points at which activations are compared, and the tolerated difference. A GELU with constants rounded to
# bfloat16 differs from the exact one by 3e-5, and its tanh approximation differs by 5e-4.
SAMPLES = np.linspace(-8.0, 8.0, 257)
TOLERANCE = 1e-4


def _sigmoid(x: NDArray[Any]) -> NDArray[Any]:
    return 1 / (1 + np.exp(-x))


def _erf(x: NDArray[Any]) -> NDArray[Any]:
    from scipy.special import erf

    return erf(x)


def _gelu(x: NDArray[Any], *, by_tanh: bool = False) -> NDArray[Any]:
    if by_tanh:
        return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
    return x * (1 + _erf(x * np.sqrt(0.5))) / 2


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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "same": lambda x: x,
    "neg": np.negative,
    "exp": np.exp,
    "erf": _erf,
    "tanh": np.tanh,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "softplus": _softplus,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "relu6": lambda x: _clip(x, low=0, high=6),
    "hardswish": lambda x: x * _hardsigmoid(x),
    "hardsigmoid": _hardsigmoid,
    "clip": _clip,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
}


def bind_operands(kind: str, operands: Sequence[str | float], **options: Any) -> Callable[..., Any]:
    """Return a function of the tensor operands alone, with the numbers bound.

    Args:
        kind: A name in `FUNCTIONS`.
        operands: Numbers, and names of tensors.
        options: Keyword arguments of the function.
    """
    function = functools.partial(FUNCTIONS[kind], **options)

    def compute(*tensors: Any) -> Any:
        remaining = iter(tensors)
        return function(*(next(remaining) if isinstance(operand, str) else operand for operand in operands))

    return compute


def match_activation(y: Any) -> str | None:
    """Return the epilogue operation whose values at `SAMPLES` are `y`, "" for the identity, None if there is none."""
    y = np.asarray(y)
    if y.shape != SAMPLES.shape:
        return None
    for name, reference in {"": FUNCTIONS["same"], **_collect_references()}.items():
        if np.allclose(y, reference(SAMPLES), rtol=0, atol=TOLERANCE):
            return name
    return None


def _collect_references() -> dict[str, Callable[..., Any]]:
    return {op.name: op.reference for op in epilogue.load_ops().values() if op.argument_kind is None}
