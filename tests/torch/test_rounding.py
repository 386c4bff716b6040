"""TF32: what truncation takes away, and what is done about it; kernels that truncate are emulated."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from tvmconv.torch.layer import is_tf32_allowed, make_input_key
from tvmconv.torch.rounding import MEAN_TRUNCATION_LOSS, compensate_truncation, is_truncating, round_to_tf32
from tvmconv.torch.signature import parse_signature
from tvmconv.workloads.dtypes import round_operand


def truncated(x):
    return (x.contiguous().view(torch.int32) & -(1 << 13)).view(torch.float32)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_numbers_are_rounded_as_everywhere():
    x = torch.cat(
        [torch.randn(1000) * 10.0 ** torch.randint(-20, 20, (1000,)), torch.tensor([0.0, -0.0, 1 + 2.0**-11])]
    )
    assert np.array_equal(round_to_tf32(x).numpy(), round_operand("tf32", x.numpy()))
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    torch.testing.assert_close(round_to_tf32(odd), odd, equal_nan=True)


def test_a_random_number_loses_what_the_formula_says():
    x = torch.exp(torch.rand(1 << 20, dtype=torch.float64) * 20 - 10).float()
    lost = ((x - truncated(x)) / x).double().mean()
    assert float(lost) == pytest.approx(MEAN_TRUNCATION_LOSS, rel=0.01)


def test_a_chain_of_layers_is_as_right_as_with_rounding():
    weights = [torch.randn(16, 16, 3, 3) / 12 for _ in range(40)]
    x = torch.randn(1, 16, 16, 16)

    def result(of_input, of_weight):
        y = x.double()
        for weight in weights:
            y = functional.conv2d(of_input(y), of_weight(weight), padding=1).relu() * math.sqrt(2)
        return y.double()

    wanted = result(lambda y: y, lambda weight: weight.double())

    def error(of_input, of_weight):
        y = result(lambda y: of_input(y.float()).double(), lambda weight: of_weight(weight).double())
        return float((y - wanted).norm() / wanted.norm())

    to_nearest = error(round_to_tf32, round_to_tf32)
    made_good = error(truncated, lambda weight: compensate_truncation(weight.double()))
    assert error(truncated, truncated) > 2 * made_good
    assert made_good < 1.3 * to_nearest


@pytest.mark.parametrize(
    ("text", "epilogue"),
    [
        ("1x8x5x7,16x8x3x3,s2,p1", ""),
        ("2x4x6x6,4x4x1x1", ",bias,add,relu"),
        ("1x8x6x6,8x1x5x5,p2,g8", ",sigmoid"),
        ("1x8x5x7,16x8x3x3,s2,p1", ",add,gelu"),
        ("2x4x6x6,4x4x1x1", ",hardswish,clamp"),
    ],
)
def test_a_kernel_that_truncates_is_known_by_what_it_computes(text, epilogue):
    form = parse_signature(f"conv2d:{text},tf32,nhwc{epilogue}")
    w = form.workload

    def kernel(of_input):
        def launch(x, weight, bias, add):
            y = functional.conv2d(of_input(x), weight, None, w.stride, w.padding[:2], w.dilation, w.groups)
            return form.apply_activations(y)

        return launch

    place = torch.device("cpu")
    assert is_truncating(form, kernel(truncated), place)
    assert not is_truncating(form, kernel(round_to_tf32), place)
    assert not is_truncating(form, kernel(lambda x: x), place)


def test_a_key_is_shape_dtype_device_and_whether_tf32_is_allowed():
    x = torch.zeros(1, 2, 3, 4)
    assert make_input_key(x) == ((1, 2, 3, 4), torch.float32, torch.device("cpu"), False)
    with torch.autocast("cpu", torch.bfloat16):
        assert make_input_key(x)[1] is torch.bfloat16
        assert make_input_key(torch.zeros(1, dtype=torch.int64))[1] is torch.int64


def test_tf32_is_read_by_either_name():
    before = torch.backends.cudnn.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cudnn.allow_tf32 = allowed
            assert is_tf32_allowed() is allowed
        if hasattr(torch.backends.cudnn, "conv"):
            torch.backends.cudnn.conv.fp32_precision = "ieee"
            assert not is_tf32_allowed()
            torch.backends.cudnn.conv.fp32_precision = "tf32"
            assert is_tf32_allowed()
    finally:
        torch.backends.cudnn.allow_tf32 = before
