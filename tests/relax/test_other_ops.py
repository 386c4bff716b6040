"""Other operations than convolutions: means over the space, which the emulator executes, and linear layers."""

import emulate
import numpy as np
import pytest
import torch
from relax_models import CPU, differ, exported
from torch import nn
from tvm import relax
from tvm.ir import IRModule

import tvmconv.relax
from tvmconv.compiler import nvrtc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.devices import find_device
from tvmconv.relax.linear import convert_linear_layers
from tvmconv.relax.reductions import make_mean_function


@pytest.mark.parametrize(
    ("shape", "dtype", "output_dtype"),
    [
        ((2, 5, 7, 40), "float16", "float16"),
        ((1, 61, 33), "float32", "float32"),
        ((2, 3, 29, 31, 7), "float16", "float32"),
    ],
)
def test_mean_equals_numpy(shape, dtype, output_dtype):
    function = make_mean_function(shape, dtype, output_dtype).with_attr("global_symbol", "main")
    lowered = lower_module(IRModule({"main": function}), find_device("sm_80").make_target())
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    expected = x.astype(np.float64).mean(tuple(range(1, len(shape) - 1)), keepdims=True)
    found = emulate.run(lowered, [x])
    assert (found.shape, found.dtype) == (expected.shape, output_dtype)
    assert np.abs(found - expected).max() < (1e-3 if output_dtype == "float16" else 1e-6)


@pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason="NVRTC is missing")
def test_mean_between_kernels_has_no_cast_of_its_own():
    pooled = nn.Sequential(nn.Conv2d(8, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 8, 1)).eval()
    mod = tvmconv.relax.to_float16(exported(pooled, torch.randn(1, 8, 9, 9)))
    optimized = tvmconv.relax.optimize_with_report(mod, "sm_80")
    text = optimized.mod["main"].script()
    assert text.count("R.astype") == 2  # the input and the output
    assert text.count("tvmconv_mean_1x7x7x16_float16_float16") == 1
    optimized.compile()


def test_linear_layer_is_a_convolution_with_its_epilogue():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(12, 6), nn.Linear(6, 5, bias=False)

        def forward(self, x):
            return self.last(nn.functional.hardswish(self.first(x)))

    model, x = Classifier().eval(), torch.randn(3, 12)
    mod = relax.transform.FoldConstant()(exported(model, x))
    converted = convert_linear_layers(mod)
    optimized = tvmconv.relax.optimize_with_report(converted, CPU)
    assert [line.workload for line in optimized.report.lines] == [
        "conv2d:3x12x1x1,6x12x1x1,s1,p0,bias,hardswish",
        "conv2d:3x6x1x1,5x6x1x1,s1,p0",
    ]
    assert differ(optimized.compile(), model, x) < 1e-5
