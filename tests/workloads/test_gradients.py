"""Gradients and transposed convolutions: texts, references and declarations, and PyTorch's gradients beside them."""

import numpy as np
import pytest
from cubins import space_of
from random_gradients import draw_text

import tvmconv as tc
from tvmconv.errors import WorkloadError
from tvmconv.workloads.conv_gradient import DerivedConv

NUM_RANDOM = 180
NUM_EXECUTED = 12
TEXTS = [draw_text(seed) for seed in range(NUM_RANDOM)]
EXECUTED_TEXTS = [text for text in TEXTS if ",f16" not in text][:NUM_EXECUTED]  # PoCL has no float16


def compute_with_torch(w: DerivedConv, inputs):
    """Compute a workload in float64 by PyTorch's autograd through the padded forward convolution."""
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    last = w.layout == "nhwc"
    forward = w.forward
    arrays = [torch.from_numpy(np.asarray(array, np.float64)) for array in inputs]
    operands = [array.movedim(-1, 1) if last else array for array in arrays[:2]]
    sides = [side for pair in zip(w.pad_low[::-1], w.pad_high[::-1], strict=True) for side in pair]
    convolve = getattr(functional, f"conv{w.spatial_ndim}d")
    x = torch.zeros(forward.input_shape, dtype=torch.float64, requires_grad=True)
    k = torch.zeros(forward.weight_shape, dtype=torch.float64, requires_grad=True)
    dy, other = operands
    with torch.no_grad():
        (x if w.RESULT == "dK" else k).copy_(other)
    y = convolve(functional.pad(x, sides), k, None, w.stride, 0, w.dilation, w.groups)
    y.backward(dy)
    result = (k if w.RESULT == "dK" else x).grad
    for name in w.epilogue:
        values = dict(zip(w.argument_names[2:-1], arrays[2:], strict=True))
        if name in values:
            value = values[name]
            spread = (-1, *(1,) * w.spatial_ndim)
            value = value.view(spread) if value.dim() == 1 else value.movedim(-1, 1) if last else value
            result = torch.ops.aten.threshold_backward(result, value, 0) if name == "drelu" else result + value
        else:
            result = getattr(functional, name)(result)
    return (result.movedim(1, -1) if last else result).numpy()


@pytest.mark.sample(72)
@pytest.mark.parametrize("text", TEXTS)
def test_the_reference_is_the_gradient_of_pytorch(text):
    w = tc.parse(text)
    inputs = w.inputs(3)
    expected = compute_with_torch(w, inputs)
    np.testing.assert_allclose(w.reference(*inputs), expected, atol=1e-10)
    assert expected.shape == w.argument_shapes[-1]


@pytest.mark.sample(150)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_as_it_was_written(text):
    w = tc.parse(text)
    assert tc.parse(w.text) == w
    assert hash(tc.parse(w.text)) == hash(w)
    assert w.flops == w.forward.flops
    sizes = dict(zip(w.argument_names, w.argument_shapes, strict=True))
    moved = sum(int(np.prod(shape)) for shape in sizes.values()) * 4
    assert 0 < w.min_bytes <= moved


def test_random_workloads_have_all_kinds_ranks_dtypes_and_layouts():
    drawn = [tc.parse(text) for text in TEXTS]
    found = {(w.kind, w.spatial_ndim, w.dtype) for w in drawn}
    assert len(found) == 3 * 3 * 4
    assert {(w.kind, w.layout, w.groups > 1, max(w.stride) > 1, max(w.dilation) > 1) for w in drawn} >= {
        (kind, layout, grouped, True, dilated)
        for kind in ("dgrad", "wgrad", "transpose")
        for layout in ("nchw", "nhwc")
        for grouped in (False, True)
        for dilated in (False, True)
    }


@pytest.mark.sample(5)
@pytest.mark.parametrize("text", EXECUTED_TEXTS)
@pytest.mark.parametrize("name", ["default", "implicit_gemm"])
def test_schedules_compute_gradients_on_opencl(text, name):
    verification = tc.build(text, name, device="opencl:0").verify()
    assert verification.ok, verification.fault


@pytest.mark.parametrize(
    "text",
    [
        "conv2d_dgrad:2x8x9x7,8x8x3x3,s2,p1,nhwc",
        "conv2d_wgrad:2x8x9x7,6x8x3x3,s1,p1",
        "conv2d_transpose:1x8x5x5,8x6x4x4,s2,p1",
    ],
)
def test_tiling_computes_gradients_on_opencl(text):
    assert tc.build(text, "tiling", device="opencl:0").verify().ok


def test_searched_tiles_of_gradients_fit_a_block():
    w = tc.parse("conv2d_dgrad:2x256x14x14,256x256x3x3,s2,p1,f16,nhwc")
    space = space_of(w, "tiling")
    for point in space.sample_legal(4, np.random.default_rng(0)):
        tc.build(w, "tiling", arch="sm_90", config=space.config_from_point(point))


@pytest.mark.parametrize("text", TEXTS[:24])
def test_pytorch_calls_compute_the_same(text):
    torch = pytest.importorskip("torch")
    from tvmconv.baselines.torch_gradient_calls import list_gradient_calls

    w = tc.parse(text)
    inputs = w.inputs(5)
    tensors = [torch.from_numpy(np.asarray(array, np.float32)) for array in inputs]
    for call in list_gradient_calls(w):
        y = call.finish(call.compute(*call.prepare(*tensors))).numpy()
        np.testing.assert_allclose(y, w.reference(*inputs), atol=1e-3)


@pytest.mark.parametrize("text", ["conv2d_dgrad:1x8x6x6,8x8x3x3,s1,p1", "conv2d_wgrad:1x8x6x6,8x8x3x3,s1,p1"])
def test_cuda_is_generated(text):
    for name in ("default", "tiling", "implicit_gemm"):
        assert "__global__" in tc.build(text, name, arch="sm_90").source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conv2d_dgrad:1x8x6x6,8x8x3x3,s1,p1,relu", "conv2d_dgrad supports only add"),
        ("conv2d_wgrad:1x8x6x6,8x8x3x3,s1,p1,bias", "conv2d_wgrad supports only add"),
        ("conv2d_dgrad:1x8x6x6,8x8x3x3,s2,p1,op1", "expected an option"),
        ("conv2d_transpose:1x8x6x6,4x8x3x3,s1,p1", "has 4 input channels: 8 channels need 8x8x3x3"),
        ("conv2d_transpose:1x8x6x6,8x4x3x3,s2,p1,op2", "expected less than the stride"),
        ("conv2d_transpose:1x8x1x1,8x4x3x3,s1,p2", "is empty: expected less padding"),
        ("conv2d_dgrad:1x8x6x6,8x8x9x9,s1,p1", "is larger than the padded image"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(text, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        tc.parse(text)
    assert "\n" not in str(caught.value)
