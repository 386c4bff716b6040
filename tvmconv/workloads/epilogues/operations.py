"""The built-in operations: additions of an argument, activations, and the derivative of ReLU.

`compute_NAME` takes a value of the accumulator's type. TVM is imported inside these functions, so that parsing a
workload does not import it.

Sources: Howard et al., "MobileNets", 2017 (relu6), and "Searching for MobileNetV3", 2019 (hardsigmoid, hardswish);
Maas, Hannun, Ng, "Rectifier Nonlinearities Improve Neural Network Acoustic Models", 2013 (leaky_relu); Hendrycks,
Gimpel, "Gaussian Error Linear Units (GELUs)", 2016; Elfwing, Uchibe, Doya, "Sigmoid-Weighted Linear Units for Neural
Network Function Approximation in Reinforcement Learning", 2017 (silu, or swish); Clevert, Unterthiner, Hochreiter,
"Fast and Accurate Deep Network Learning by Exponential Linear Units", 2016; Dugas, Bengio et al., "Incorporating
Second-Order Functional Knowledge for Better Option Pricing", 2001 (softplus); Misra, "Mish: A Self Regularized
Non-Monotonic Activation Function", 2020.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

import numpy as np

from tvmconv.workloads.dtypes import ACCUMULATOR
from tvmconv.workloads.epilogue import EpilogueOp, register_op

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm import tirx

# PyTorch's default slope is 0.01; early versions of YOLO use 0.1, and discriminators of GANs mostly 0.2.
SLOPES = {"leaky_relu": 0.01, "leaky_relu0.1": 0.1, "leaky_relu0.2": 0.2}
GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715  # constants of GELU's tanh approximation


def _const(number: float) -> tirx.Expr:
    from tvm import tirx

    return tirx.const(number, ACCUMULATOR)


def _max(value: tirx.Expr, bound: float) -> tirx.Expr:
    from tvm import te

    return te.max(value, _const(bound))


def _min(value: tirx.Expr, bound: float) -> tirx.Expr:
    from tvm import te

    return te.min(value, _const(bound))


def _exp(value: tirx.Expr) -> tirx.Expr:
    from tvm import te

    return te.exp(value)


def _compute_leaky_relu(value: tirx.Expr, slope: float) -> tirx.Expr:
    from tvm import te

    return te.max(value, value * _const(slope))


def compute_hardsigmoid(value: tirx.Expr) -> tirx.Expr:
    """Return min(max(value / 6 + 1/2, 0), 1)."""
    return _min(_max(value * _const(1 / 6) + _const(0.5), 0.0), 1.0)


def compute_sigmoid(value: tirx.Expr) -> tirx.Expr:
    """Return 1 / (1 + exp(-value)); where exp overflows, the quotient is zero, which is correct."""
    one = _const(1.0)
    return one / (one + _exp(-value))


def compute_silu(value: tirx.Expr) -> tirx.Expr:
    """Return value / (1 + exp(-value)); where exp overflows, the quotient is zero, which is correct."""
    return value / (_const(1.0) + _exp(-value))


def compute_tanh(value: tirx.Expr) -> tirx.Expr:
    """Return 1 - 2 / (1 + exp(2 · value)), because `--use_fast_math` replaces `tanhf` by a coarse approximation."""
    one, two = _const(1.0), _const(2.0)
    return one - two / (one + _exp(two * value))


def compute_gelu(value: tirx.Expr) -> tirx.Expr:
    """Return value · (1 + erf(value / √2)) / 2."""
    from tvm import te

    return value * _const(0.5) * (_const(1.0) + te.erf(value * _const(math.sqrt(0.5))))


def compute_gelu_tanh(value: tirx.Expr) -> tirx.Expr:
    """Return value / (1 + exp(-2u)), as (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u))."""
    return value / (_const(1.0) + _exp(_const(-2 * GELU_SCALE) * (value + _const(GELU_CUBE) * value * value * value)))


def compute_elu(value: tirx.Expr) -> tirx.Expr:
    """Return max(value, 0) + exp(min(value, 0)) - 1."""
    return _max(value, 0.0) + _exp(_min(value, 0.0)) - _const(1.0)


def compute_softplus(value: tirx.Expr) -> tirx.Expr:
    """Return max(value, 0) + log(1 + exp(-|value|)), which does not overflow."""
    from tvm import te

    return _max(value, 0.0) + te.log(_const(1.0) + _exp(te.min(value, -value)))


def compute_mish(value: tirx.Expr) -> tirx.Expr:
    """Return value · w / (w + 2) with w = n · (n + 2) and n = exp(min(value, 20)). The quotient w / (w + 2) is
    tanh(softplus(value)); from 20 on it is 1 in float32.
    """
    two, n = _const(2.0), _exp(_min(value, 20.0))
    w = n * (n + two)
    return value * (w / (w + two))


def compute_drelu(value: tirx.Expr, activation: tirx.Expr) -> tirx.Expr:
    """Return the gradient before a ReLU, given the gradient behind it and the output of the ReLU."""
    from tvm import tirx

    zero = _const(0.0)
    return tirx.Select(activation > zero, value, zero)


def _reference_sigmoid(y: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-y))


def _reference_hardsigmoid(y: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(y / 6 + 0.5, 0, 1)


def _reference_gelu(y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return y · Φ(y) with the normal distribution function Φ."""
    from scipy.special import ndtr

    return y * ndtr(y)


for op in (
    EpilogueOp("bias", lambda value, bias: value + bias, operator.add, "channel", is_addition=True),
    EpilogueOp("add", lambda value, residual: value + residual, operator.add, "output", is_addition=True),
    EpilogueOp("drelu", compute_drelu, lambda y, activation: np.where(activation > 0, y, 0.0), "output"),
    EpilogueOp("relu", lambda value: _max(value, 0.0), lambda y: np.maximum(y, 0)),
    EpilogueOp("relu6", lambda value: _min(_max(value, 0.0), 6.0), lambda y: np.clip(y, 0, 6)),
    EpilogueOp("clamp", lambda value: _min(_max(value, 0.0), 1.0), lambda y: np.clip(y, 0, 1)),
    EpilogueOp("hardsigmoid", compute_hardsigmoid, _reference_hardsigmoid),
    EpilogueOp("hardswish", lambda value: value * compute_hardsigmoid(value), lambda y: y * _reference_hardsigmoid(y)),
    EpilogueOp("sigmoid", compute_sigmoid, _reference_sigmoid),
    EpilogueOp("silu", compute_silu, lambda y: y * _reference_sigmoid(y)),
    EpilogueOp("tanh", compute_tanh, np.tanh),
    EpilogueOp("gelu", compute_gelu, _reference_gelu),
    EpilogueOp("gelu_tanh", compute_gelu_tanh, lambda y: y * (1 + np.tanh(GELU_SCALE * (y + GELU_CUBE * y**3))) / 2),
    EpilogueOp("elu", compute_elu, lambda y: np.maximum(y, 0) + np.expm1(np.minimum(y, 0))),
    EpilogueOp("softplus", compute_softplus, lambda y: np.logaddexp(0, y)),
    EpilogueOp("mish", compute_mish, lambda y: y * np.tanh(np.logaddexp(0, y))),
):
    register_op(op)


for name, slope in SLOPES.items():
    register_op(
        EpilogueOp(
            name,
            lambda value, slope=slope: _compute_leaky_relu(value, slope),
            lambda y, slope=slope: np.maximum(y, slope * y),
        )
    )
