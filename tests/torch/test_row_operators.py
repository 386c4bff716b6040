"""Layer normalizations and element-wise operations in graphs with gradients: operators, kernels, and the fusion."""

import copy
import shutil

import pytest
import torch
from convnext import make_network
from host_cuda import compile_kernels
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from training import differ, in_double, lay_out, run_with_gradients

import tvmconv.torch
from tvmconv.compiler import nvrtc
from tvmconv.errors import ModelError
from tvmconv.torch import elementwise_source, layer_norm_source, row_kernels, training, training_backend, typed_source
from tvmconv.torch import row_operators as operators
from tvmconv.torch.backend import backend
from tvmconv.torch.row_fusion import fuse_rows
from tvmconv.torch.training_activations import ACTIVATIONS

EPS = 1e-5
NAMES = {
    "layer_norm": operators.layer_norm,
    "activate": operators.activate,
    "scale_add": operators.scale_add,
    "gate": operators.gate,
}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def draw(*shape, dtype=F32, is_channels_last=False):
    return lay_out(torch.randn(shape), is_channels_last).to(dtype)


def make_cases(dtype, low_dtype=None, channels=6, sizes=(5, 4)):
    """Return operators with arguments, and the same functions in PyTorch, by name."""
    torch.manual_seed(0)
    vectors = [torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(channels)]
    noise = torch.tensor([0.0, 1.25, 1.25]).view(3, 1, 1, 1)
    rows = draw(3, sizes[0], channels, dtype=dtype) + 1
    images = draw(3, channels, *sizes, dtype=dtype, is_channels_last=True)
    types = F32, low_dtype
    layer_scale = vectors[0].view(-1, 1, 1)

    def normalize(x, x_bias, weight, bias, *_):
        return functional.layer_norm(x + x_bias, (channels,), weight, bias, EPS)

    def normalize_plain(x, *_):
        return functional.layer_norm(x, (channels,), eps=EPS)

    def activate(name, shape):
        return lambda x, bias, *_: ACTIVATIONS[name](x + bias.view(shape))

    def scale_add(z, bias, scale, noise, x, *_):
        z = z + bias.view(-1, *(1,) * (z.dim() - 2)) if z.dim() > 3 else z + bias
        z = z if scale is None else z * scale
        return (z if noise is None else z * noise) + x

    residual = draw(3, channels, *sizes, is_channels_last=True)
    return {
        "norm": (operators.layer_norm, (rows, vectors[2], *vectors[:2], EPS, *types), normalize),
        "plain norm": (operators.layer_norm, (rows, None, None, None, EPS, *types), normalize_plain),
        **{
            f"{name} of {'images' if is_last else 'rows'}": (
                operators.activate,
                (images if is_last else rows, vectors[1], name, is_last),
                activate(name, (-1, 1, 1) if is_last else (-1,)),
            )
            for name, is_last in zip(elementwise_source.ACTIVATION_CODE, (True, False) * 3, strict=False)
        },
        "residual": (operators.scale_add, (images, vectors[1], layer_scale, noise, residual, *types, True), scale_add),
        "sum": (
            operators.scale_add,
            (rows, vectors[1], None, None, draw(3, sizes[0], channels), *types, False),
            scale_add,
        ),
        "gate": (operators.gate, (images, torch.rand(3, channels, 1, 1).to(dtype)), torch.mul),
    }


CASES = tuple(make_cases(F32))


def is_leaf(argument):
    """Whether an argument needs a gradient: all tensors but the random numbers of three samples."""
    return isinstance(argument, torch.Tensor) and argument.numel() != 3


def make_leaves(arguments):
    leaves = [each.detach().requires_grad_() if is_leaf(each) else each for each in arguments]
    return leaves, [each for each in leaves if is_leaf(each)]


def run(operator, arguments):
    """Return results of an operator, factors of their sum, and gradients of its tensors in float64."""
    torch.manual_seed(1)
    inputs, leaves = make_leaves(arguments)
    results = operator(*inputs)
    results = list(results)[:2] if isinstance(results, (tuple, list)) else [results]
    results = [each for each in results if each.numel()]
    factors = [torch.randn(each.shape).to(each.device, each.dtype) for each in results]
    return results, factors, [each.double().cpu() for each in torch.autograd.grad(results, leaves, factors)]


def run_in_double(function, arguments, factors):
    inputs, leaves = make_leaves([each.double() if isinstance(each, torch.Tensor) else each for each in arguments])
    result = function(*inputs)
    return result, torch.autograd.grad(result, leaves, sum(factor.double() for factor in factors))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "low_dtype", "tolerance"), [(F32, None, 1e-5), (F32, BF16, 1e-2), (BF16, BF16, 2e-2)]
)
def test_gradients_are_those_of_float64(name, dtype, low_dtype, tolerance):
    operator, arguments, function = make_cases(dtype, low_dtype)[name]
    results, factors, gradients = run(operator, arguments)
    expected, expected_gradients = run_in_double(function, arguments, factors)
    assert all(differ([each], [expected]) < tolerance for each in results)
    assert differ(gradients, expected_gradients) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_operators_are_as_pytorch_wants_them(name):
    for dtype, low_dtype in ((F32, None), (F32, BF16)):
        operator, arguments, _ = make_cases(dtype, low_dtype)[name]
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        assert set(torch.library.opcheck(operator, tuple(make_leaves(arguments)[0]), test_utils=checks).values()) == {
            "SUCCESS"
        }


class Device:
    multi_processor_count = 2


@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is missing")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels", [6, 8, 200])
def test_kernels_on_the_cpu(name, channels, tmp_path, monkeypatch):
    operator, arguments, _ = make_cases(F32, F32, channels)[name]
    expected = run(operator, arguments)
    for module in (typed_source, row_kernels):
        monkeypatch.setattr(module, "THREADS", 64)
        monkeypatch.setattr(module, "COMBINED_CHANNELS", 4)
        monkeypatch.setattr(module, "COMBINING_THREADS", 2)
    monkeypatch.setattr(layer_norm_source, "WARP_LANES", (2, 1))
    monkeypatch.setattr(layer_norm_source, "MAX_STEPS", 2 if channels < 100 else 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Device)
    count = iter(range(100))

    class HostKernels:
        def __init__(self, source, _):
            folder = tmp_path / str(next(count))
            folder.mkdir()
            names = [each for each in (*KERNEL_NAMES, "add_parts") if f"\n{each}(" in source or f" {each}(" in source]
            self._functions = compile_kernels(source, names, folder)

        def launch(self, kernel, launch, parameters):
            self._functions[kernel](launch, parameters)

    monkeypatch.setattr(row_kernels, "SourceKernels", HostKernels)
    for loader in LOADERS:
        monkeypatch.setattr(row_kernels, loader, getattr(row_kernels, loader).__wrapped__)
    monkeypatch.setattr(operators, "_is_on_gpu", lambda _: True)
    found = run(operator, arguments)
    for one, other in zip(found, expected, strict=True):
        assert differ(one, [each.double() for each in other]) < 1e-5


LOADERS = [name for name in vars(row_kernels) if name.startswith("_load_")]
KERNEL_NAMES = (
    *("layer_norm", "layer_norm_backward", "activate", "activate_backward"),
    *("scale_add", "scale_add_backward", "gate", "gate_backward"),
)


def test_sources_compile_for_gpus():
    for arch, dtype in (("sm_80", "bfloat16"), ("sm_90", "float16")):
        types = {"X": "float32", "Y": "float32", "LOW": dtype}
        sources = [elementwise_source.make_scale_add_source(8, {"Z": dtype, **types})]
        gradients = {"has_dy": True, "has_low": True}
        sources.append(elementwise_source.make_scale_add_backward_source(8, {"Z": dtype, **types}, **gradients))
        for is_backward in (False, True):
            options = {"is_backward": is_backward}
            sources.append(elementwise_source.make_activation_source(8, dtype, "gelu_tanh", **options))
            sources.append(elementwise_source.make_gate_source(8, {"X": dtype, "S": dtype}, **options))
        for num_vectors in (12, 96, 256):
            lanes, steps = layer_norm_source.choose_lanes(num_vectors)
            sizes = 8, lanes, steps, types, row_kernels._count_rows_in_flight(steps)
            sources.append(layer_norm_source.make_forward_source(*sizes))
            sources.append(layer_norm_source.make_backward_source(*sizes, num_sums=3, **gradients))
        for each in sources:
            kernels = nvrtc.compile_cubin(each, arch).kernels
            assert all(resources.stack_bytes <= 16 for resources in kernels.values())


def test_rows_of_many_channels_have_kernels():
    assert [layer_norm_source.choose_lanes(count) for count in (1, 12, 96, 97, 768, 769)] == [
        *((1, 1), (16, 1), (32, 3), (128, 1), (256, 3)),
        None,
    ]
    assert row_kernels.can_normalize(6144, F16)
    assert not row_kernels.can_normalize(1025, F16)


def capture(model, x):
    """Return the fused graph of a model."""
    graphs = []

    def compile_graph(gm, inputs):
        recorder, _ = training_backend._record(gm, inputs)
        graphs.append(fuse_rows(gm, recorder.metadata, training_backend._is_convolution))
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=compile_graph, fullgraph=True)(x)
    return graphs[0].graph


def compile_eagerly(model, fallback_backend="eager"):
    options = {"choose": "tuned", "fallback_backend": fallback_backend}
    return torch.compile(copy.deepcopy(model), backend=backend, options=options)


def count_operators(graph):
    return {name: sum(node.target is each for node in graph.nodes) for name, each in NAMES.items()}


@pytest.fixture
def without_search(monkeypatch):
    monkeypatch.setattr(training_backend, "fill_table", lambda *_: [])
    torch._dynamo.reset()


@pytest.mark.parametrize("fallback_backend", ["eager", "aot_eager"])
def test_a_network_trains_as_in_float64(without_search, fallback_backend):
    model, x = make_network(), draw(4, 3, 16, 12, is_channels_last=True)
    compiled, results = compile_eagerly(model, fallback_backend), []
    for network, images, function in ((compiled._orig_mod, x, compiled), (in_double(model), x.double(), None)):
        torch.manual_seed(2)
        results.append(run_with_gradients(network, images, function))
    assert differ(*results, floor=1e-3) < 1e-4
    assert count_operators(capture(model, x)) == {"layer_norm": 5, "activate": 3, "scale_add": 3, "gate": 0}


def test_optimized_models_run_as_fused_graphs(without_search, monkeypatch):
    """All parameters stay; evaluation and other batches run, too, and a copy of the model runs without graphs."""
    monkeypatch.setattr(training, "fill_table", lambda *_: [])
    monkeypatch.setattr(training, "_time_step", lambda *_: 1.0)
    model, x = make_network(), draw(4, 3, 16, 12, is_channels_last=True)
    fused = tvmconv.torch.optimize(model, x, train=True, fused=True, choose="tuned")
    note = next(note for note in tvmconv.torch.get_training_report(fused).notes if "graph" in note)
    assert "5 layer normalizations, 3 activations, 3 sums of residual blocks." in note
    assert "5 linear" in note  # are left to PyTorch
    assert list(fused.state_dict()) == list(model.state_dict())
    assert all(one is other for one, other in zip(model.parameters(), fused.parameters(), strict=True))
    for images in (x, x[:3]):
        results = []
        for network, each in ((fused, images), (copy.deepcopy(fused), images), (in_double(model), images.double())):
            torch.manual_seed(2)
            results.append(run_with_gradients(network, each))
        assert all(differ(result, results[2], floor=1e-3) < 1e-4 for result in results[:2])
    with torch.no_grad():
        torch.manual_seed(2)
        assert differ([fused.eval()(x[:3])], results[2][:1]) < 1e-4


def test_graphs_that_are_no_faster_do_not_run(without_search, monkeypatch):
    times = iter((2.0, 3.0))  # of PyTorch, and of the graph; no layer has kernels
    monkeypatch.setattr(training, "fill_table", lambda *_: [])
    monkeypatch.setattr(training, "_time_step", lambda *_: next(times))
    model, x = make_network(), draw(4, 3, 16, 12, is_channels_last=True)
    fused = tvmconv.torch.optimize(model, x, train=True, fused=True)
    assert "no faster with the operators" in str(tvmconv.torch.get_training_report(fused))
    assert fused._compiled_call_impl is None
    with pytest.raises(ModelError, match="expected train=True"):
        tvmconv.torch.optimize(model, x, fused=True)


class Checkpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def test_models_that_do_not_run_as_graphs_run_as_before(without_search, monkeypatch):
    """PyTorch captures a checkpoint, but not its writes to the counter of a normalization."""
    monkeypatch.setattr(training, "fill_table", lambda *_: [])
    monkeypatch.setattr(training, "_time_step", lambda *_: 1.0)
    model, x = Checkpoint(), draw(2, 3, 5, 4, is_channels_last=True)
    fused = tvmconv.torch.optimize(model, x, train=True, fused=True, choose="tuned")
    assert "does not run as a graph: the model does not run" in str(tvmconv.torch.get_training_report(fused))
    assert not model.layers[1].running_mean.any()  # to which checkpoints write in the backward pass
    expected = run_with_gradients(in_double(model), x.double())
    assert differ(run_with_gradients(fused, x), expected, floor=1e-3) < 1e-4


def test_layers_under_autocast_read_results_in_16_bits(without_search):
    model, x = make_network(0.0), draw(4, 3, 16, 12, is_channels_last=True)
    compiled = compile_eagerly(model)
    results = []
    for network in (model, compiled):
        with torch.autocast("cpu", BF16):
            y = network(x)
        y.float().square().sum().backward()
        results.append([y.float(), *(each.grad for each in getattr(network, "_orig_mod", network).parameters())])
    assert differ(results[1], [each.double() for each in results[0]], floor=1e-2) < 5e-2
    with torch.autocast("cpu", BF16):
        graph = capture(model, x)
    convolutions = [node for node in graph.nodes if node.target is torch.conv2d]
    assert sum(node.args[2] is None for node in convolutions) == 6  # the bias is the next operator's
    pairs = [node for node in graph.nodes if node.target is operators.scale_add]
    assert [node.args[5:7] for node in pairs][:2] == [(F32, BF16), (F32, None)]


class Gate(nn.Module):
    def __init__(self, change=lambda y: y):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
        self.change = change

    def forward(self, x):
        y = self.change(self.first(x))
        return torch.sigmoid(self.second(y.mean((2, 3), keepdim=True))) * y


def test_gates_are_operators(without_search):
    model, x = Gate(), draw(2, 3, 5, 4, is_channels_last=True)
    compiled = compile_eagerly(model)
    found = run_with_gradients(compiled._orig_mod, x, compiled)
    assert differ(found, run_with_gradients(in_double(model), x.double()), floor=1e-3) < 1e-4
    assert count_operators(capture(model, x))["gate"] == 1
    assert count_operators(capture(model, x.contiguous()))["gate"] == 0


def overwrite(y, x, scale):
    z = y * scale
    y.mul_(2)
    return z + x


OTHERS = {
    "a factor that needs a gradient": lambda y, x, s: y * s.mean((1, 2, 3), keepdim=True) + x,
    "a sum into the other tensor": lambda y, x, s: x.clone().add_(y * 0.5),
    "an overwritten operand": lambda y, x, s: overwrite(y, x, s.mean((0, 2, 3), keepdim=True)),
    "other shapes": lambda y, x, s: y * s[:1, :, :1, :1] + x[:1],
    "a number": lambda y, x, s: y * 2 + 1,
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_other_operations_stay_those_of_pytorch(change):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1, bias=False)

        def forward(self, x):
            return change(self.conv(x), x, torch.sigmoid(self.conv(x)))

    graph = capture(Other(), draw(2, 3, 5, 4, is_channels_last=True))
    assert set(count_operators(graph).values()) == {0}


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "low_dtype", "tolerance"), [(F16, F16, 4e-3), (BF16, BF16, 2e-2), (F32, None, 1e-5)])
@pytest.mark.parametrize(
    ("channels", "sizes"), [(5, (5, 4)), (96, (5, 4)), (520, (5, 4)), (64, (2111, 3)), (768, (353, 7))]
)
def test_kernels_compute_the_operators(dtype, low_dtype, tolerance, channels, sizes):
    """Thousands of rows have sums of several CTAs; each run has the same bits."""
    for name, (operator, arguments, _) in make_cases(dtype, low_dtype, channels, sizes).items():
        expected = run(operator, arguments)
        on_gpu = [each.cuda() if isinstance(each, torch.Tensor) else each for each in arguments]
        found, again = run(operator, on_gpu), run(operator, on_gpu)
        for one, other in ((found[0], expected[0]), (found[2], expected[2])):
            difference = differ([each.cpu() for each in one], [each.double() for each in other])
            assert difference < tolerance, name
        for index in (0, 2):
            assert all(map(torch.equal, found[index], again[index])), name
