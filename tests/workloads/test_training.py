"""The layers of training steps: gradients of layers as workloads, of suites and of models."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import WorkloadError
from tvmconv.workloads.training import input_gradient, weight_gradient

LAYERS = [
    "conv2d:2x6x9x7,4x3x3x3,s2x1,p1x0,g2",
    "conv1d:2x4x11,6x4x3,s1,p2,d2,nhwc",
    "conv1d_transpose:2x4x7,4x3x4,s2,p1",
    "conv1d_transpose:2x4x7,4x2x3,s3,p1x2,op1,g2,nhwc",
    "conv2d_transpose:2x6x5x4,6x2x3x4,s2,p1,op1x0,g2",
    "conv2d_transpose:1x3x5x4,3x1x3x3,s1x2,p1,d2,g3,nhwc",
    "conv2d_transpose:2x4x5x4,4x5x2x2,s2,p0,bias,relu",
    "conv3d_transpose:1x4x3x2x3,4x2x2x3x2,s2,p0x1x0,nhwc",
]


def compute_gradients(w, x, k, dy):
    """Compute dX and dK of a layer in float64 by PyTorch's autograd; all arrays are in memory order."""
    torch = pytest.importorskip("torch")
    functional, rank, last = torch.nn.functional, w.spatial_ndim, w.layout == "nhwc"
    x, k, dy = (torch.from_numpy(np.asarray(array, np.float64)) for array in (x, k, dy))
    x, k = (array.movedim(-1, 1) if last else array for array in (x, k))
    dy = dy.movedim(-1, 1) if last else dy
    x.requires_grad_()
    k.requires_grad_()
    if w.kind == "transpose":
        full = getattr(functional, f"conv_transpose{rank}d")(
            x, k, None, w.stride, 0, w.output_padding, w.groups, w.dilation
        )
        crop = (
            slice(None),
            slice(None),
            *(slice(low, low + size) for low, size in zip(w.pad_low, w.output_size, strict=True)),
        )
        y = full[crop]
    else:
        sides = [side for pair in zip(w.pad_low[::-1], w.pad_high[::-1], strict=True) for side in pair]
        y = getattr(functional, f"conv{rank}d")(functional.pad(x, sides), k, None, w.stride, 0, w.dilation, w.groups)
    y.backward(dy)
    return [(gradient.movedim(1, -1) if last else gradient).numpy() for gradient in (x.grad, k.grad)]


@pytest.mark.parametrize("text", LAYERS)
def test_gradients_of_layers_are_those_of_pytorch(text):
    w = tc.parse(text)
    x, k = w.inputs(0)[:2]
    dy = np.random.default_rng(1).standard_normal(w.argument_shapes[-1])
    dx, dk = compute_gradients(w, x, k, dy)
    np.testing.assert_allclose(input_gradient(w).reference(dy, k), dx, atol=1e-10)
    operands = (x, dy) if w.kind == "transpose" else (dy, x)
    np.testing.assert_allclose(weight_gradient(w).reference(*operands), dk, atol=1e-10)


def test_the_first_layer_of_a_suite_has_no_dgrad():
    layers = tc.suite("resnet50", 32, dtype="float16", layout="nhwc", epilogue=("bias", "relu"), training=True)
    counts = {layer.name: layer.count for layer in layers}
    assert "conv1.7x7 dgrad" not in counts
    assert counts["conv1.7x7 wgrad"] == 1
    assert counts["conv2_1.3x3"] == counts["conv2_1.3x3 dgrad"] == counts["conv2_1.3x3 wgrad"] == 3
    assert sum(layer.count for layer in layers) == 3 * sum(layer.count for layer in tc.suite("resnet50")) - 1
    texts = {layer.name: layer.workload.text for layer in layers}
    assert texts["conv2_1.3x3"].endswith(",f16,nhwc,bias,relu")
    assert texts["conv2_1.3x3 wgrad"].endswith("conv2d_wgrad:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc")


@pytest.mark.parametrize("text", ["conv2d_dgrad:1x4x8x8,4x4x3x3,s1,p1", "filter1d:64,k5"])
def test_only_forward_layers_have_gradients(text):
    with pytest.raises(WorkloadError, match="expected a convolution or a transposed convolution"):
        weight_gradient(tc.parse(text))
