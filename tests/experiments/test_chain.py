"""What a chain of layers is measured on, and what is told of it."""

import numpy as np
import pytest

from tvmconv.experiments.chain import Link, steady, without_common
from tvmconv.workloads import parse


@pytest.mark.parametrize("epilogue", ["", ",relu"])
def test_weights_neither_blow_up_activations_nor_let_them_vanish(epilogue):
    w = parse(f"conv2d:1x64x8x8,64x64x1x1,f16,nhwc{epilogue}")
    x = w.inputs(0)[0]
    size = np.sqrt(np.mean(x.astype(float) ** 2))
    for seed in range(12):
        _, k = steady(w, w.inputs(seed))
        assert k.dtype == np.float16
        x = w.reference(x, k)
    assert 1 / 3 < np.sqrt(np.mean(x**2)) / size < 3


def link(how):
    return Link("a", "conv2d:1x4x6x6,4x4x3x3", "tiling", "tuned", False, False, 1e-6, 2e-6, how)


def test_what_a_library_says_of_every_layer_is_told_once():
    common, links = without_common([link("cuDNN 9, fused, in NHWC"), link("cuDNN 9, in NHWC")])
    assert common == ["cuDNN 9", "in NHWC"]
    assert [each.how for each in links] == ["fused", ""]
    assert without_common([link("")]) == ([], [link("")])
