"""Batch normalizations with sum and activation in compiled graphs: the operators, and what they compute."""

import copy
import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch
from host_cuda import compile_kernels
from torch import nn
from torch.nn import functional as pytorch
from training import differ, in_double, lay_out, run_with_gradients

from tvmconv.compiler import nvrtc
from tvmconv.torch import batch_norm_kernels, batch_norm_source, running_statistics, training_backend, weight_casts
from tvmconv.torch import batch_norm_operators as operators
from tvmconv.torch.backend import backend
from tvmconv.torch.batch_norm_fusion import find_norm_sites
from tvmconv.torch.batch_norm_source import ACTIVATION_CODE, SECOND_ARRAY, make_source
from tvmconv.torch.conv_call import FORWARD, STATS_IN_GRAPHS, make_workload
from tvmconv.torch.kernel_table import TableEntry, table
from tvmconv.torch.signature import parse_signature
from tvmconv.torch.training_activations import ACTIVATIONS

EPS = 1e-5
KERNELS = "sum_elements", "finish_stats", "apply", "sum_gradients", "finish_gradients", "apply_gradients"
IN_GRAPHS = (
    *(operators.normalize_in_graph, operators.compute_stats_in_graph),
    *(running_statistics.update_in_graph, running_statistics.increase_counters),
)


@pytest.fixture(autouse=True)
def empty_table():
    yield
    table.clear()


def draw(*shape):
    return lay_out(torch.randn(shape), True)


def normalize(x, residual, weight, bias, activation):
    """A normalization of x, to which that of another tensor is added, by the operators; with PyTorch in float64."""
    if x.dtype is torch.float64:
        z0, y = (pytorch.batch_norm(each, None, None, weight, bias, True, eps=EPS) for each in (residual, x))
        z0 = ACTIVATIONS[activation](z0)
        return ACTIVATIONS[activation](y + z0), z0
    options = None, None, weight, bias, 0.1, EPS, activation
    z0, stand_in = operators.normalize_in_graph(residual, *options)
    return operators.normalize_in_graph(x, *options, z0, stand_in)[0], z0


@pytest.mark.parametrize("activation", ACTIVATION_CODE)
def test_gradients_of_both_readers_are_those_of_float64(activation):
    torch.manual_seed(0)
    tensors = [draw(3, 6, 5, 4) * 2 + 1, draw(3, 6, 5, 4), torch.rand(6) + 0.5, torch.randn(6)]
    factors = [draw(3, 6, 5, 4) for _ in range(2)]
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        outputs = normalize(*leaves, activation)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, [each.to(dtype) for each in factors])])
    assert differ(*results) < 1e-5


def test_operators_are_as_pytorch_wants_them():
    x, residual, dz = (draw(2, 4, 3, 3) for _ in range(3))
    weight, stats = torch.rand(4), operators.batch_norm_stats(x)
    with_gradients = [each.clone().requires_grad_() for each in (x, residual, weight)]
    parameters = stats, weight, None, EPS, "silu"
    calls = [
        (operators.batch_norm_stats, (x,)),
        (operators.batch_norm_act, (*with_gradients[:2], None, stats, with_gradients[2], None, EPS, "relu")),
        (operators.batch_norm_act_backward, (dz, dz, x, residual, None, *parameters)),
        (operators.batch_norm_act_backward, (dz, dz[:, :, :1, :1].expand(dz.shape), x, None, None, *parameters)),
        (operators.mean_pixels, (x, x.new_empty(()).expand(x.shape).clone().requires_grad_())),
        (running_statistics.update_running_stats, ([weight], [weight.clone()], [stats], [1.5], 0.1)),
        (weight_casts.cast_all, ([*with_gradients, weight.clone().requires_grad_()], torch.bfloat16)),
        (running_statistics.increase_counters, ([torch.tensor(3)], 1)),
    ]
    for operator, arguments in calls:
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        assert set(torch.library.opcheck(operator, arguments, test_utils=checks).values()) == {"SUCCESS"}


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels, filters, activation):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.BatchNorm2d(4), activation)
        self.second = nn.Sequential(nn.Conv2d(4, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters))
        self.shortcut = nn.Sequential()
        if channels != filters:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, filters, 1, bias=False), nn.BatchNorm2d(filters))
        self.activation = activation

    def forward(self, x):
        y = self.second(self.first(x))
        y += self.shortcut(x)
        return self.activation(y)


def make_network(activation):
    torch.manual_seed(0)
    blocks = [Block(3, 8, activation), Block(8, 8, activation), Block(8, 8, activation)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -1, 1)
    return model


def install_stats(tasks, *_):
    """Have a "kernel" return the statistics of all outputs that are normalized."""

    def launch(x, weight, bias, add, *, stats):
        y = pytorch.conv2d(x, weight, padding=weight.shape[2] // 2)
        stats[1], stats[0] = torch.var_mean(y, [0, 2, 3], correction=0)
        return lay_out(y, True)

    for task in tasks:
        if task.example.is_normalized:
            signature = parse_signature(make_workload(task.product, task.call).text)
            table.install(STATS_IN_GRAPHS, task.call, TableEntry("kernel", signature, launch, "kernel", "tuned"))
    return []


@pytest.mark.sample(1)
@pytest.mark.parametrize(("activation", "returns_stats"), [(nn.ReLU(inplace=True), True), (nn.SiLU(), False)])
def test_compiled_residual_networks_train_as_pytorchs(monkeypatch, activation, returns_stats):
    torch._dynamo.reset()  # sizes that were others in a graph of another test would be symbols
    monkeypatch.setattr(training_backend, "fill_table", install_stats)
    monkeypatch.setattr(training_backend, "can_return_stats", lambda call, device: returns_stats)
    model, x, graphs = make_network(activation), draw(4, 3, 6, 5), []

    def compile_rest(gm, inputs):
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    options = {"choose": "tuned", "fallback_backend": compile_rest}
    compiled = torch.compile(copy.deepcopy(model), backend=backend, options=options)
    expected = in_double(model)
    found = run_with_gradients(compiled._orig_mod, x, compiled)
    assert differ(found, run_with_gradients(expected, x.double()), floor=1e-3) < 1e-4
    for one, other in zip(compiled._orig_mod.buffers(), expected.buffers(), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-6)
    nodes = {each: [node for node in graphs[0].graph.nodes if node.target is each] for each in IN_GRAPHS}
    numbers = [len(each) for each in nodes.values()]
    assert numbers == [7, 3 if returns_stats else 7, 1, 1]  # kernels return the statistics where there is no bias
    assert sum(node.args[-1] is not None for node in nodes[operators.normalize_in_graph]) == 2  # stand-ins


def install_pytorch(tasks, *_):
    """Have a "kernel" compute all forward passes."""

    def launch(x, weight, bias, add):
        return lay_out(pytorch.conv2d(x, weight, padding=weight.shape[2] // 2), True)

    for task in tasks:
        if task.product == FORWARD:
            signature = parse_signature(make_workload(task.product, task.call).text)
            table.install(FORWARD, task.call, TableEntry("kernel", signature, launch, "kernel", "tuned"))
    return []


def test_weights_are_cast_at_once(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(training_backend, "fill_table", install_pytorch)
    first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
    model = nn.Sequential(first, nn.ReLU(), *(nn.Conv2d(4, 4, 1, bias=False) for _ in range(3)))
    x, graphs = draw(2, 3, 6, 5), []
    model[2].requires_grad_(False)

    def compile_rest(gm, inputs):
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    compiled = torch.compile(copy.deepcopy(model), backend=backend, options={"fallback_backend": compile_rest})
    results = []
    for network in (compiled, model):
        with torch.autocast("cpu", torch.bfloat16):
            y = network(x)
        y.float().square().sum().backward()
        layers = getattr(network, "_orig_mod", network)
        results.append([y, *(layers[index].weight.grad for index in (0, 3, 4))])
    assert differ(*results) < 1e-2
    assert all(each.dtype is torch.float32 for each in results[0][1:])
    (cast,) = (node for node in graphs[0].graph.nodes if node.target is weight_casts.cast_all)
    assert len(cast.args[0]) == 3
    assert not graphs[0].graph.eliminate_dead_code()


class Readers(nn.Module):
    """A normalization between two convolutions, with a function between, and one of the result."""

    def __init__(self, between, momentum=0.1):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)])
        self.norm, self.between = nn.BatchNorm2d(4, momentum=momentum), between

    def forward(self, x):
        return self.convs[1](self.between(self.norm(self.convs[0](x)), x))


def overwrite(y, x):
    other = x.new_ones(y.shape)
    other += y
    return other


BETWEEN = {
    "nothing": (lambda y, x: y, 1),
    "an activation": (lambda y, x: pytorch.hardswish(y), 1),
    "bounds of ReLU6": (lambda y, x: pytorch.hardtanh(y, 0.0, 6.0), 1),
    "other bounds": (lambda y, x: pytorch.hardtanh(y), 0),
    "another activation": (lambda y, x: pytorch.gelu(y), 0),
    "a gate": (lambda y, x: y * pytorch.relu(y).mean((2, 3), keepdim=True), 0),
    "a pooling": (lambda y, x: pytorch.max_pool2d(pytorch.relu(y), 2), 1),
    "a sum that writes to another tensor": (overwrite, 0),
    "a product": (lambda y, x: pytorch.relu(y) * 2, 0),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("between", "count"), BETWEEN.values(), ids=BETWEEN)
def test_operators_compute_normalizations_between_other_kernels(between, count):
    assert count_sites(Readers(between), draw(2, 3, 4, 4)) == count


def test_other_modes_and_layouts_are_left_to_the_compiler():
    model, x = Readers(lambda y, x: pytorch.relu(y)), draw(2, 3, 4, 4)
    assert count_sites(copy.deepcopy(model).double(), x.double()) == 0
    assert count_sites(model, x.contiguous()) == 0
    model.norm.eval()
    assert count_sites(model, x) == 0


GATE = BETWEEN["a gate"][0]


def test_without_a_compiler_operators_compute_all_normalizations(monkeypatch):
    monkeypatch.setattr(training_backend, "fill_table", lambda *_: [])
    torch.manual_seed(0)
    model, x = nn.Sequential(Readers(GATE), nn.BatchNorm2d(4), nn.SiLU(inplace=True)), draw(4, 3, 6, 5)
    assert (count_sites(model, x), count_sites(model, x, is_eager=True)) == (0, 2)
    options = {"choose": "tuned", "fallback_backend": "eager"}
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=backend, options=options)
    calls, run = [], operators.batch_norm_act
    monkeypatch.setattr(operators, "batch_norm_act", lambda *values: calls.append(values) or run(*values))
    found = run_with_gradients(compiled._orig_mod, x, compiled)
    assert len(calls) == 2
    assert differ(found, run_with_gradients(in_double(model), x.double()), floor=1e-3) < 1e-3


class TwoReaders(nn.Module):
    """A normalization that two convolutions read, as in the first block of a stage of a ResNet."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(size, 4, 1) for size in (3, 4, 4))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = pytorch.relu(self.norm(self.convs[0](x)))
        return self.convs[1](y) * self.convs[2](y)


def test_gradients_of_two_convolutions_are_added_by_the_operator(monkeypatch):
    monkeypatch.setattr(training_backend, "fill_table", lambda *_: [])
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x, calls = TwoReaders(), draw(4, 3, 6, 5), []
    options = {"choose": "tuned", "fallback_backend": "eager"}
    compiled = torch.compile(copy.deepcopy(model), backend=backend, options=options)
    run = operators.batch_norm_act_backward
    monkeypatch.setattr(operators, "batch_norm_act_backward", lambda *values: calls.append(values) or run(*values))
    found = run_with_gradients(compiled._orig_mod, x, compiled)
    assert differ(found, run_with_gradients(in_double(model), x.double()), floor=1e-3) < 1e-4
    assert [values[1] is not None for values in calls] == [True]


class Excitation(nn.Module):
    """A normalization with activation, and squeeze and excitation after it."""

    def __init__(self, pool):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(size, 4, 1) for size in (3, 4, 4))
        self.norm, self.pool = nn.BatchNorm2d(4), pool

    def forward(self, x):
        y = pytorch.silu(self.norm(self.convs[0](x)))
        return self.convs[2](y * torch.sigmoid(self.convs[1](self.pool(y))))


def average(y):
    return y.mean((2, 3), keepdim=True)


@pytest.mark.parametrize(("pool", "count"), [(nn.AdaptiveAvgPool2d(1), 1), (average, 1), (nn.AvgPool2d((6, 5)), 0)])
def test_the_gradient_of_a_mean_stays_one_number_per_channel(monkeypatch, pool, count):
    monkeypatch.setattr(training_backend, "fill_table", lambda *_: [])
    torch.manual_seed(0)
    model, x, calls = Excitation(pool), draw(4, 3, 6, 5), []
    torch._dynamo.reset()
    options = {"choose": "tuned", "fallback_backend": "eager"}
    compiled = torch.compile(copy.deepcopy(model), backend=backend, options=options)
    run = operators.batch_norm_act_backward
    monkeypatch.setattr(operators, "batch_norm_act_backward", lambda *values: calls.append(values) or run(*values))
    found = run_with_gradients(compiled._orig_mod, x, compiled)
    assert differ(found, run_with_gradients(in_double(model), x.double()), floor=1e-3) < 1e-4
    assert [values[1] is not None and values[1].stride()[2:] == (0, 0) for values in calls] == [bool(count)]


@pytest.fixture
def host_kernels(tmp_path, monkeypatch):
    """Kernels that are compiled for the CPU."""
    if not shutil.which("g++"):
        pytest.skip("g++ is missing")
    for module in (batch_norm_source, batch_norm_kernels):
        for name, size in (("THREADS", 16), ("COMBINED_CHANNELS", 4), ("COMBINING_THREADS", 2)):
            monkeypatch.setattr(module, name, size)

    class HostKernels:
        def __init__(self, source, _):
            folder = tmp_path / str(len(list(tmp_path.iterdir())))
            folder.mkdir()
            names = [name for name in KERNELS if f"{name}(const " in source]
            self._functions = compile_kernels(source, names, folder)

        def launch(self, name, launch, parameters):
            self._functions[name](launch, parameters)

    monkeypatch.setattr(batch_norm_kernels, "SourceKernels", HostKernels)
    monkeypatch.setattr(batch_norm_kernels, "_load_kernels", batch_norm_kernels._load_kernels.__wrapped__)
    device = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    torch.manual_seed(0)


def test_kernels_on_the_cpu_add_a_gradient_of_samples(host_kernels):
    x, dz, second = draw(3, 6, 5, 4), draw(3, 6, 5, 4), torch.randn(3, 6)
    parameters = operators.batch_norm_stats(x), torch.rand(6), torch.randn(6), EPS, "silu"
    found = batch_norm_kernels.differentiate([dz, second], x, None, *parameters, None)
    expanded = second.view(3, 6, 1, 1).expand(x.shape)
    expected = operators.batch_norm_act_backward(dz, expanded, x, None, None, *parameters)
    assert differ(found[:2], [each.double() for each in expected[:2]]) < 1e-5


def test_kernels_on_the_cpu_keep_a_mask_of_the_activation(host_kernels):
    x, residual, *gradients = (draw(3, 8, 5, 4) for _ in range(4))
    parameters = operators.batch_norm_stats(x), torch.rand(8), torch.randn(8), EPS, "relu6"
    z, mask = batch_norm_kernels.apply(x, residual, *parameters)
    expected, _, no_mask = operators.batch_norm_act(x, residual, None, *parameters)
    assert (mask.numel(), no_mask.numel()) == (x.numel() // 4, 0)
    assert differ([z], [expected.double()]) < 1e-5
    found = batch_norm_kernels.differentiate(gradients, x, None, *parameters, mask)
    expected = operators.batch_norm_act_backward(*gradients, x, residual, None, *parameters)
    assert differ(found, [each.double() for each in expected]) < 1e-5


def count_sites(model, x, *, is_eager=False):
    counts = []

    def compile_graph(gm, inputs):
        recorder, _ = training_backend._record(gm, inputs)
        is_convolution = training_backend._is_convolution
        counts.append(len(find_norm_sites(gm.graph, recorder.metadata, is_convolution, is_eager=is_eager)))
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=compile_graph, fullgraph=True)(x)
    return counts[0]


def test_kernels_do_not_spill_registers():
    kernels = {}
    groups = batch_norm_source.STATS, batch_norm_source.APPLY, batch_norm_source.GRADIENTS
    for group, (activation, has_mask) in itertools.product(groups, (("silu", False), ("relu", True))):
        options = {"vector": 8, "has_residual": True, "second": SECOND_ARRAY, "has_mask": has_mask}
        source = make_source(group, "bfloat16", activation, **options)
        found = nvrtc.compile_cubin(source, "sm_80").kernels
        kernels |= {(name, has_mask): resources for name, resources in found.items()}
    assert len(kernels) == 12
    assert all(resources.spills == 0 and resources.registers <= 128 for resources in kernels.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [5, 72, 528])
def test_kernels_compute_the_operators(dtype, channels):
    torch.manual_seed(0)
    x, residual, *gradients = (lay_out(torch.randn(3, channels, 9, 7).to(dtype), True) for _ in range(4))
    x, weight, bias = x * 2 + 3, torch.rand(channels) + 0.5, torch.randn(channels)
    for activation in ACTIVATION_CODE:
        for residual_or_none, second in (
            (None, None),
            (None, gradients[1]),
            (residual, None),
            (residual, gradients[1]),
            (None, gradients[1][:, :, :1, :1].expand(x.shape)),
            (residual, gradients[1][:, :, :1, :1].expand(x.shape)),
        ):
            results = []
            for device in ("cuda", "cpu"):

                def move(tensor, device=device):
                    if tensor is None or tensor.stride()[-1:] != (0,):
                        return None if tensor is None else tensor.to(device)
                    return tensor[:, :, :1, :1].to(device).expand(tensor.shape)

                stats = operators.batch_norm_stats(move(x))
                parameters = stats, move(weight), move(bias), EPS, activation
                z, _, mask = operators.batch_norm_act(move(x), move(residual_or_none), None, *parameters)
                assert bool(mask.numel()) == (
                    device == "cuda"
                    and residual_or_none is not None
                    and activation in ("relu", "relu6")
                    and channels * x.element_size() % 16 == 0
                )
                pair = (None, mask) if mask.numel() else (move(residual_or_none), None)
                tensors = move(gradients[0]), move(second), move(x), *pair
                results.append([stats, z, *operators.batch_norm_act_backward(*tensors, *parameters)])
            found, wanted = ([each.cpu() for each in one if each.numel()] for one in results)
            assert differ(found, [each.double() for each in wanted]) < {2: 1e-2, 4: 1e-5}[x.element_size()]
