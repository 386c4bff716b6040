"""Quantized models: scales, epilogues, which tensors have 8 bits, accuracy, and kernels on an OpenCL device."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import tvmconv.torch
from tvmconv.baselines.torch_calls import apply_op
from tvmconv.compiler import nvrtc
from tvmconv.errors import ModelError
from tvmconv.torch import layer_search, timing
from tvmconv.torch.eight_bit_rounding import quantize_weight, round_to_8_bits
from tvmconv.torch.observers import AbsoluteHistogram
from tvmconv.torch.quantization_operators import quantize as quantize_tensor
from tvmconv.torch.quantization_operators import quantize_gated
from tvmconv.torch.quantize_kernel import make_source
from tvmconv.torch.quantized_epilogue import plan_epilogue
from tvmconv.torch.quantized_selection import make_sharing_key
from tvmconv.torch.report import PYTORCH_NAME

E4M3 = torch.float8_e4m3fn


def test_kernels_that_round_to_8_bits_compile():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        kernels = [*nvrtc.compile_cubin(make_source(dtype, torch.int8), "sm_80").kernels]
        assert sorted(kernels) == ["quantize", "quantize_gated"]
    assert nvrtc.compile_cubin(make_source(torch.float16, E4M3), "sm_90").kernels


class Residual(nn.Module):
    """A classifier of small images with a residual block, a strided convolution and one layer of few channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 1)
        self.norm, self.last, self.head = nn.BatchNorm2d(16), nn.Conv2d(16, 32, 3, 2, 1), nn.Linear(32, 4)

    def forward(self, x):
        x = functional.relu(self.stem(x))
        x = functional.relu(self.norm(self.second(functional.silu(self.first(x)))) + x)
        return self.head(functional.relu(self.last(x)).mean((2, 3)))


def draw_gratings(count, generator):
    """Return noisy gratings in four directions, and the directions."""
    direction = torch.randint(0, 4, (count,), generator=generator)
    angle, phase = direction * torch.pi / 4, 6.28 * torch.rand(count, generator=generator)
    y, x = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    wave = torch.sin(1.3 * along + phase[:, None, None])
    return (wave + 0.8 * torch.randn(count, 12, 12, generator=generator))[:, None], direction


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    generator, model = torch.Generator().manual_seed(0), Residual()
    parameters = [*model.parameters()]
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(40):  # by signs of gradients, as torch.optim takes seconds to import
        images, directions = draw_gratings(64, generator)
        gradients = torch.autograd.grad(functional.cross_entropy(model(images), directions), parameters)
        with torch.no_grad():
            for parameter, momentum, gradient in zip(parameters, momenta, gradients, strict=True):
                momentum.lerp_(gradient, 0.2)
                parameter.sub_(momentum.sign(), alpha=0.01 * (1 - step / 40))
    return model.eval(), [draw_gratings(64, generator)[0] for _ in range(3)], draw_gratings(2000, generator)


@pytest.mark.parametrize("dtype", ["i8", "e4m3"])
def test_trained_model_keeps_its_accuracy(trained, dtype):
    model, batches, (images, directions) = trained

    def measure_accuracy(network):
        with torch.no_grad():
            return float((network(images).argmax(1) == directions).double().mean())

    quantized = tvmconv.torch.quantize(model, batches[0], dtype=dtype, calibrate=batches)
    assert measure_accuracy(model) > 0.95
    assert measure_accuracy(quantized) > measure_accuracy(model) - 0.005
    first, *others = quantized.report().lines
    assert "1 input channels per group" in first.explanation
    assert all(f",{dtype},nhwc,scale" in line.workload and "error 0.0" in line.explanation for line in others)


def test_chains_and_residuals_are_stored_in_8_bits(trained):
    model, batches, _ = trained
    quantized = tvmconv.torch.quantize(model, batches[0], dtype="i8", calibrate=batches, observer="minmax")
    texts = [line.workload.partition("nhwc,")[2] for line in quantized.report().lines[1:]]
    assert texts == ["scale,bias,silu,quantize", "scale,bias,add,relu,quantize", "scale,bias,relu"]
    (code,) = quantized.graph_code()
    assert len(re.findall(r"self\.quantize_\w+\(", code)) == 1  # of the input and residual of the block


class Pointwise(nn.Module):
    """A residual block of pointwise convolutions, after which a convolution with padding reads the sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(16, 16, 1) for _ in range(3))
        self.padded = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        x = functional.relu(self.first(x))
        x = functional.relu(self.third(functional.relu(self.second(x))) + x)
        return self.padded(x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_outputs_of_relu_use_all_integers_unless_readers_pad_them(device):
    """The bias has the zero point -128 of such an output, and the store saturates in place of the ReLU."""
    torch.manual_seed(0)
    model, batches = Pointwise().eval(), [torch.randn(2, 16, 7, 7) for _ in range(2)]
    model, batches = model.to(device), [batch.to(device) for batch in batches]
    options = {"dtype": "i8", "calibrate": batches, "observer": "minmax"}
    quantized = tvmconv.torch.quantize(model, batches[0], **options)
    texts = [line.workload.partition("nhwc,")[2] for line in quantized.report().lines]
    assert texts == ["scale,bias,quantize", "scale,bias,quantize", "scale,bias,add,relu,quantize", "scale,bias"]
    zero_points = [each.zero_points for name, each in quantized.graph.named_modules() if name.startswith("quantized_")]
    assert [(each.input, each.output, each.residual) for each in zero_points] == [
        (0, -128, 0),
        (-128, -128, 0),
        (-128, 0, -128),
        (0, 0, 0),
    ]
    optimized = tvmconv.torch.optimize(model, batches[0], choose="tuned", **options)
    assert all(line.implementation != PYTORCH_NAME for line in optimized.report().lines)
    tolerance = 1e-5 if device == "cpu" else 3e-3  # of a few results that are rounded the other way
    with torch.no_grad():
        assert (optimized(batches[1]) - quantized(batches[1])).norm() < tolerance * quantized(batches[1]).norm()


class Gated(nn.Module):
    """A block with squeeze and excitation, as EfficientNet has."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x):
        x = functional.silu(self.first(x))
        gate = self.excite(functional.silu(self.squeeze(x.mean((2, 3), keepdim=True)))).sigmoid()
        return self.last(gate * x)


def test_products_with_a_gate_are_rounded_by_one_operator():
    torch.manual_seed(0)
    model, batches = Gated().eval(), [torch.randn(2, 16, 7, 7) for _ in range(2)]
    quantized = tvmconv.torch.quantize(model, batches[0], dtype="i8", calibrate=batches)
    (code,) = quantized.graph_code()
    assert re.search(r"self\.quantize_\w+\(\w+, \w+\)", code)
    assert " * " not in code
    with torch.no_grad():
        expected, outputs = model(batches[0]), quantized(batches[0])
    assert (outputs - expected).norm() < 0.02 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 48, 7, 9), (3, 32, 5), (2, 24, 6, 6)])
def test_gated_rounding_on_a_gpu(gpu, dtype, shape):
    x = torch.randn(shape, device=gpu.text).to(dtype)
    gate = torch.rand(*shape[:2], *(1 for _ in shape[2:]), device=gpu.text).to(dtype)
    factor = torch.tensor([30.0], device=gpu.text)
    for result_dtype, zero_point in ((torch.int8, 0), (torch.int8, -128), (E4M3, 0)):
        y = quantize_gated(x, gate, factor, result_dtype, zero_point)
        wanted = quantize_gated(x.cpu(), gate.cpu(), factor.cpu(), result_dtype, zero_point)
        if shape[1] % 16:  # PyTorch rounds the product to its dtype before
            wanted = quantize_tensor((x * gate).cpu(), factor.cpu(), result_dtype, zero_point)
        assert torch.equal(y.cpu().float(), wanted.float())


def test_scales_of_nonnegative_values_have_255_steps():
    histogram = AbsoluteHistogram()
    histogram.add(torch.rand(1000))
    assert not histogram.has_negative
    scales = [histogram.choose_scale(torch.int8, "minmax", zero_point) for zero_point in (0, -128)]
    assert scales[0] / scales[1] == pytest.approx(255 / 127)
    assert histogram.choose_scale(torch.int8, "mse", -128) == pytest.approx(scales[1], rel=0.05)
    histogram.add(torch.tensor([-0.1]))
    assert histogram.has_negative


def test_single_pixels_with_few_weights_are_not_quantized():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 32, 1)).eval(), torch.randn(2, 32, 6, 6)
    (line,) = tvmconv.torch.quantize(model, x, dtype="i8", calibrate=[x]).report().lines
    assert "one pixel per image with 1,024 weights" in line.explanation


def test_layers_with_large_errors_are_not_quantized(trained):
    model, batches, _ = trained
    quantized = tvmconv.torch.quantize(model, batches[0], dtype="e4m3", calibrate=batches, max_layer_error=0.02)
    notes = [line.explanation for line in quantized.report().lines]
    assert any("more than 0.02" in note for note in notes)
    assert "operands in e4m3" in quantized.report().notes[0]
    with torch.no_grad():
        assert torch.isfinite(quantized(batches[0])).all()


def test_changed_weights_are_quantized_again_and_gradients_are_pytorchs():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(16, 8, 3, groups=1)), torch.randn(2, 16, 6, 6)
    quantized = tvmconv.torch.quantize(model, x, dtype="i8", calibrate=[x])
    with torch.no_grad():
        quantized.original[0].weight.mul_(3.0)
        model[0].weight.mul_(3.0)
        assert (quantized(x) - model(x)).norm() < 0.02 * model(x).norm()
    assert torch.equal(quantized(x.clone().requires_grad_()), model(x))


def test_depthwise_layers_have_operands_of_int8_only():
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 32, 1), nn.ReLU6(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.ReLU6(), nn.Conv2d(32, 16, 1)]
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 16, 7, 7)
    report = tvmconv.torch.quantize(model, x, dtype="i8", calibrate=[x]).report()
    texts = [line.workload.partition("i8,nhwc,")[2] for line in report.lines]
    assert texts == ["scale,bias,relu6,quantize", "scale,bias,relu6,quantize", "scale,bias"]
    report = tvmconv.torch.quantize(model, x, dtype="e4m3", calibrate=[x]).report()
    assert ["e4m3" in line.workload for line in report.lines] == [True, False, True]


def test_kernels_compute_what_pytorch_computes(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)  # every kernel is taken, whatever its time is
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.SiLU(), nn.Conv2d(16, 8, 1)).eval()
    batches = [torch.randn(2, 16, 6, 6) for _ in range(2)]
    x, options = batches[0][:1], {"dtype": "e4m3", "calibrate": batches}
    ours = tvmconv.torch.optimize(model, x, choose="tuned", **options)
    with torch.no_grad():
        expected = tvmconv.torch.quantize(model, x, **options)(x)
        assert torch.allclose(ours(x), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(ours(batches[0]), model(batches[0]))  # other shapes are PyTorch's
        texts = [line.workload.partition("e4m3,nhwc,")[2] for line in ours.report().lines]
        assert texts == ["scale,bias,silu,quantize", "scale,bias"]
        ours.save(tmp_path / "model.tvmconv")
        assert torch.equal(tvmconv.torch.load(tmp_path / "model.tvmconv")(x), ours(x))


@pytest.mark.usefixtures("shared_processes")
def test_layers_to_quantize_are_searched_in_8_bits_only(tmp_path, monkeypatch):
    searched = []

    class FakeSearch:
        products = ()

        def __init__(self, tasks, *_):
            searched.extend(task.workload_text for task in tasks)

        def run(self, preparation):
            assert not [*preparation]

    monkeypatch.setattr(layer_search, "ProductSearch", FakeSearch)
    monkeypatch.setattr(timing, "MAX_SAMPLES", 1)
    monkeypatch.setattr(timing, "MAX_TIMING_SECONDS", 0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1)]
    x = torch.randn(1, 3, 6, 6)
    options = {"dtype": "i8", "calibrate": [x], "choose": "tuned", "log": tmp_path / "log.jsonl"}
    ours = tvmconv.torch.optimize(nn.Sequential(*layers).eval(), x, seconds=60, **options)
    assert sorted(searched) == [
        "conv2d:1x16x6x6,16x16x1x1,s1,p0,i8,nhwc,scale,bias,quantize",
        "conv2d:1x3x6x6,16x3x1x1,s1,p0,nchw-nhwc,bias,relu",
    ]
    lines = ours.report().lines
    assert [line.workload.partition("p0,")[2] for line in lines] == [
        "nchw-nhwc,bias,relu",
        "i8,nhwc,scale,bias,quantize",
        "out-f32,i8,nhwc,scale,bias",
    ]
    assert all(line.implementation != PYTORCH_NAME for line in lines)


@pytest.mark.parametrize(
    ("quantized_seconds", "rounding_seconds", "expected"),
    [
        ([8, 11, 8, 8], 3.0, [True, True, True, True]),  # the output of the second need not be rounded
        ([8, 11, 8, 8], 0.5, [True, False, True, True]),
        ([8, 8, 11, 11], 0.5, [True, True, False, False]),
        ([11, 9, 9, 9], 4.0, [False, False, False, False]),  # each would be faster if its input were rounded before
        ([7, 11, 11, 7], 3.0, [True, True, True, True]),
        ([5, 14, 14, 5], 3.0, [True, False, False, True]),  # only without both
    ],
)
def test_layers_are_quantized_if_the_model_is_faster(monkeypatch, quantized_seconds, rounding_seconds, expected):
    channels = [16, 24, 32, 40, 48]
    seconds_by_filter = {f",{o}x{c}": s for c, o, s in zip(channels, channels[1:], quantized_seconds, strict=False)}

    def get_seconds(self, name, call):
        if name.startswith("rounding"):
            return rounding_seconds
        if ",i8," not in name:  # in the model's precision
            return 100.0 if name.startswith("the whole before") else 10.0
        return next(s for text, s in seconds_by_filter.items() if text in name)

    monkeypatch.setattr(timing.TimingCache, "get_seconds", get_seconds)
    monkeypatch.setattr(timing.TimingCache, "measure", lambda self, name, call: 1.0 if name.endswith("i8") else 10.0)
    torch.manual_seed(0)
    layers = [nn.Conv2d(c, o, 1) for c, o in itertools.pairwise(channels)]
    x = torch.randn(1, 16, 6, 6)
    lines = tvmconv.torch.optimize(nn.Sequential(*layers).eval(), x, dtype="i8", calibrate=[x]).report().lines
    assert [",i8," in line.workload for line in lines] == expected


def test_searches_with_and_without_a_residual_are_not_shared():
    texts = [f"conv2d:1x16x6x6,16x16x1x1,s1,p0,{rest}" for rest in ("i8,nhwc,scale,relu,quantize", "i8,nhwc,scale,add")]
    texts.append(texts[0].replace("i8,nhwc,scale,relu,quantize", "out-f16,i8,nhwc,scale"))
    plain, with_residual, also_plain = map(make_sharing_key, texts)
    assert plain == also_plain != with_residual


def test_epilogues_in_units_of_the_residual():
    """The operations with the planned numbers are those of the layer, whatever precedes and follows the residual."""
    sums, residual = torch.randn(4, 3, 5, dtype=torch.float64), torch.randint(-9, 9, (4, 3, 5)).double()
    bias, scale, output_scale, residual_scale = torch.randn(3).double(), torch.rand(3).double() + 0.5, 0.3, 0.7
    for before, after in itertools.product([(), ("relu",), ("silu",)], repeat=2):
        names = (*before, "add", *after)
        plan = plan_epilogue(names, has_bias=True, output_scale=output_scale, residual_scale=residual_scale)
        if before == after == ("silu",):
            assert plan is None
            continue
        given = {"scale": scale / plan.unit, "bias": bias / plan.unit, "add": residual}
        given |= {"tensor_scale": plan.tensor_scale, "quantize": plan.quantize}
        wanted = {"scale": scale, "bias": bias, "add": residual * residual_scale}
        y, expected = sums, sums
        for name in plan.ops:
            y = apply_op(name, y, given.get(name))
        for name in ("scale", "bias", *names):
            expected = apply_op(name, expected, wanted.get(name))
        assert torch.allclose(y, expected / output_scale)


def test_scales_of_observers():
    torch.manual_seed(0)
    batches = [torch.randn(5000), 3 * torch.randn(5000), torch.tensor([40.0, float("inf"), float("nan"), 0.0])]
    histogram, reversed_histogram = AbsoluteHistogram(), AbsoluteHistogram()
    for batch in batches:
        histogram.add(batch)
    for batch in batches[::-1]:
        reversed_histogram.add(batch)
    thresholds = {name: 127 * histogram.choose_scale(torch.int8, name) for name in ("minmax", "percentile", "mse")}
    assert thresholds["minmax"] == pytest.approx(40.0)
    assert 8 < thresholds["percentile"] < 12
    assert thresholds["percentile"] < thresholds["mse"] < 40
    assert reversed_histogram.choose_scale(torch.int8, "mse") == pytest.approx(thresholds["mse"] / 127, rel=0.1)
    assert 448 * histogram.choose_scale(E4M3, "mse") > 30  # floats have small steps for small numbers
    assert AbsoluteHistogram().choose_scale(E4M3, "mse") == 1.0


def test_tiny_activations_do_not_become_nan():
    x = torch.relu(torch.randn(1, 16, 4, 4)) * 1e-38
    quantized = tvmconv.torch.quantize(nn.Conv2d(16, 4, 1, bias=False), x, dtype="e4m3", calibrate=[x])
    assert ",e4m3," in quantized.report().lines[0].workload
    assert quantized(x).isfinite().all()


def test_rounding_saturates_to_nearest_even():
    numbers = torch.tensor([0.5, 1.5, -2.5, 300.0, -300.0, float("inf"), float("nan")])
    assert round_to_8_bits(numbers, torch.int8).tolist() == [0, 2, -2, 127, -128, 127, 0]
    assert round_to_8_bits(numbers * 2, E4M3)[3:6].tolist() == [448.0, -448.0, 448.0]
    assert round_to_8_bits(numbers, E4M3)[6].isnan()
    rounded = quantize_tensor(numbers.view(1, 7, 1, 1).half(), torch.tensor([2.0]), torch.int8)
    assert rounded.flatten().tolist() == [1, 3, -5, 127, -128, 127, 0]
    rounded = quantize_tensor(numbers.view(1, 7, 1, 1).half(), torch.tensor([1.0]), torch.int8, -100)
    assert rounded.flatten().tolist() == [-100, -98, -102, 127, -128, 127, -100]
    weight, scale = quantize_weight(torch.tensor([[[1.0, -2.0]], [[0.0, 0.0]]]), torch.int8)
    assert weight.tolist() == [[[64, -127]], [[0, 0]]]
    assert scale.tolist() == pytest.approx([2 / 127, 1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "i4", "calibrate": [torch.zeros(1, 16, 4, 4)]}, "expected one of e4m3, i8"),
        ({"dtype": "i8", "calibrate": []}, "at least one input"),
        ({"dtype": "i8", "calibrate": torch.zeros(1, 16, 4, 4)}, "expected a list of inputs"),
        ({"dtype": "i8"}, "expected a list of inputs"),
        ({"dtype": "i8", "calibrate": 5}, "expected a list of inputs of the model for dtype='i8', not int"),
        ({"dtype": "i8", "calibrate": [torch.zeros(1, 16, 4, 4)], "max_layer_error": "1"}, "a positive number"),
        ({"dtype": "i8", "calibrate": [torch.zeros(1, 2, 4, 4)]}, "for calibration"),
        ({"dtype": "i8", "calibrate": [torch.zeros(1, 16, 4, 4)], "observer": "max"}, "expected one of mse"),
        ({"dtype": "i8", "calibrate": [torch.zeros(1, 16, 4, 4)], "train": True}, "no quantization"),
    ],
)
def test_invalid_options_of_quantization(options, message):
    with pytest.raises(ModelError, match=message):
        tvmconv.torch.optimize(nn.Conv2d(16, 4, 1), torch.zeros(1, 16, 4, 4), **options)
