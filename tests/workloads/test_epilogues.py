"""Epilogues: each operation alone and all in any order, in the text, the reference and the declaration."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nasty_workloads import declares_its_reference, evaluate

from tvmconv.workloads import Conv2d, parse
from tvmconv.workloads.dtypes import DTYPES, get_numpy_dtype
from tvmconv.workloads.epilogue import load_ops
from tvmconv.workloads.layout import LAYOUTS

USUAL = (("bias",), ("bias", "relu"), ("bias", "add", "silu"), ("gelu",), ("clamp",))
BY_HAND = {
    "bias": lambda y, bias: y + bias,
    "add": lambda y, residual: y + residual,
    "drelu": lambda y, activation: y if activation > 0 else 0.0,
    "relu": lambda y: y if y > 0 else 0.0,
    "silu": lambda y: y / (1 + math.exp(-y)),
    "gelu": lambda y: y / 2 * (1 + math.erf(y / math.sqrt(2))),
    "clamp": lambda y: min(max(y, 0.0), 1.0),
    "relu6": lambda y: min(max(y, 0.0), 6.0),
    "hardsigmoid": lambda y: min(max(y / 6 + 0.5, 0.0), 1.0),
    "hardswish": lambda y: y * min(max(y / 6 + 0.5, 0.0), 1.0),
    "sigmoid": lambda y: 1 / (1 + math.exp(-y)),
    "tanh": math.tanh,
    "elu": lambda y: y if y > 0 else math.exp(y) - 1,
    "softplus": lambda y: math.log1p(math.exp(y)),
    "mish": lambda y: y * math.tanh(math.log1p(math.exp(y))),
    "gelu_tanh": lambda y: y / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))),
    "leaky_relu": lambda y: y if y > 0 else 0.01 * y,
    "leaky_relu0.1": lambda y: y if y > 0 else 0.1 * y,
    "leaky_relu0.2": lambda y: y if y > 0 else 0.2 * y,
    "prelu": lambda y, slope: y if y > 0 else slope * y,
    "selu": lambda y: 1.0507009873554805 * (y if y > 0 else 1.6732632423543772 * (math.exp(y) - 1)),
    "hardtanh": lambda y: min(max(y, -1.0), 1.0),
    "quick_gelu": lambda y: y / (1 + math.exp(-1.702 * y)),
    "hard_mish": lambda y: y / 2 * min(max(y + 2, 0.0), 2.0),
    "scale": lambda y, scale: y * scale,
    "tensor_scale": lambda y, scale: y * scale,
}

orders = st.lists(st.sampled_from(sorted(BY_HAND)), unique=True).map(tuple)
few_in_order = st.lists(st.sampled_from(sorted(BY_HAND)), unique=True, max_size=5).map(tuple)  # compiled in a second


def conv(epilogue, dtype="float32", layout="nchw"):
    return Conv2d(2, 4, 5, 4, 6, 3, 3, padding=1, groups=2, dtype=dtype, layout=layout, epilogue=epilogue)


def test_all_operations_are_known():
    assert sorted(load_ops()) == sorted([*BY_HAND, "quantize", "stats", "zero_point"])


@given(orders)
def test_the_text_has_the_operations_in_their_order(epilogue):
    workload = conv(epilogue)
    assert workload.text == ",".join(["conv2d:2x4x5x4,6x2x3x3,s1,p1,g2", *epilogue])
    assert parse(workload.text) == workload
    assert parse(workload.text).epilogue == epilogue


@given(orders, st.sampled_from(LAYOUTS))
@settings(max_examples=12)
def test_the_reference_is_the_operations_one_after_another(epilogue, layout):
    workload = conv(epilogue, layout=layout)
    inputs = workload.inputs(seed=0)
    arguments = dict(zip(workload.argument_names, inputs, strict=False))
    expected = conv((), layout=layout).reference(*inputs[:2])
    channels = -1 if workload.output_layout == "nhwc" else 1
    for place in np.ndindex(expected.shape):
        for name in epilogue:
            channel = (place[channels],)
            index = {"bias": channel, "prelu": channel, "scale": channel, "add": place, "drelu": place}.get(name)
            index = (0,) if name == "tensor_scale" else index
            read = () if index is None else (float(arguments[name][index]),)
            expected[place] = BY_HAND[name](expected[place], *read)
    np.testing.assert_allclose(workload.reference(*inputs), expected, rtol=1e-12, atol=1e-12)


EPILOGUES = [*((name,) for name in BY_HAND), *USUAL[1:3]]
IN_TURN = [  # each epilogue in one dtype, and with `-m slow` in every other one, and in both layouts
    pytest.param(epilogue, dtype, LAYOUTS[(i + j) // 2 % 2], marks=[pytest.mark.slow] if j > 1 else [])
    for i, epilogue in enumerate(EPILOGUES)
    for j, dtype in enumerate(name for name, each in DTYPES.items() if not each.has_8_bits)
    if (i + j) % 2 == 0
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("epilogue", "dtype", "layout"), IN_TURN)
def test_the_declaration_computes_the_reference(epilogue, dtype, layout):
    assert declares_its_reference(conv(epilogue, dtype, layout))


@given(few_in_order)
@settings(max_examples=6)
def test_the_declaration_of_any_order_computes_the_reference(epilogue):
    assert declares_its_reference(conv(epilogue))


def test_where_the_exponential_overflows_silu_is_zero():
    workload = parse("conv2d:1x1x1x2,1x1x1x1,silu")
    x, one = np.array([-1000.0, 1000.0], "float32").reshape(1, 1, 1, 2), np.ones((1, 1, 1, 1), "float32")
    for y in (workload.reference(x, one), evaluate(workload, x, one)):
        assert y.ravel().tolist() == [0.0, 1000.0]


def test_a_16_bit_sum_is_rounded_once_behind_the_epilogue():
    """A sum of 1 + 2^-9 is no bfloat16; with a bias of -1 the small part is what is left."""
    workload = parse("conv2d:1x2x1x1,1x2x1x1,bf16,bias")
    x = np.array([1, 2**-9], get_numpy_dtype("bfloat16")).reshape(1, 2, 1, 1)
    ones, bias = np.ones((1, 2, 1, 1), get_numpy_dtype("bfloat16")), np.array([-1], "float32")
    assert float(evaluate(workload, x, ones, bias).item()) == 2**-9
