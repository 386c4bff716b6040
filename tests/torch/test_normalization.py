"""Batch normalization in training by statistics that a convolution returns, with PyTorch in place of the kernels."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as pytorch
from training import differ, in_double, lay_out, run_with_gradients

from tvmconv.torch import functional as F  # noqa: N812  as PyTorch's is usually named
from tvmconv.torch import normalization, training
from tvmconv.torch.conv_call import FORWARD_STATS, STATS_IN_GRAPHS, make_workload
from tvmconv.torch.conv_operators import convolution_stats
from tvmconv.torch.kernel_table import TableEntry, table
from tvmconv.torch.product_task import ProductTask, collect_tasks
from tvmconv.torch.signature import parse_signature
from tvmconv.torch.trainable import list_layers, make_trainable


@pytest.fixture(autouse=True)
def empty_table():
    yield
    table.clear()


def install(call):
    """A "kernel" with statistics in the table: PyTorch's, which counts its launches."""

    def launch(x, weight, bias, add, *, stats):
        assert bias is None
        assert add is None
        launches.append(call)
        y = pytorch.conv2d(x, weight, stride=call.stride, padding=call.padding[:2], groups=call.groups)
        stats[1], stats[0] = torch.var_mean(y.float(), [0, 2, 3], correction=0)
        return lay_out(y, True)

    launches = []
    signature = parse_signature(make_workload(FORWARD_STATS, call).text)
    for product in (FORWARD_STATS, STATS_IN_GRAPHS):
        table.install(product, call, TableEntry("kernel", signature, launch, "kernel", "tuned"))
    return launches


def prepare(model, x):
    """A trainable copy of a model whose convolutions before normalizations return statistics, and their launches."""
    trainable = make_trainable(model)
    with F.record_calls() as calls:
        training.run_step(trainable, (x,), has_backward=False)
    layers, launches = list_layers(trainable), []
    for recorded in calls:
        if layers[recorded.path].normalized_by:
            launches.append(install(recorded.call))
    training._enable_kernels(trainable, calls)
    return trainable, launches


def make_model(**options):
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(4, 8, 3, stride=2, bias=False), torch.nn.BatchNorm2d(8, **options), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(8, 6, 1, bias=False), torch.nn.BatchNorm2d(6, **options)]
    model = torch.nn.Sequential(*layers)
    for module in model:
        if isinstance(module, torch.nn.BatchNorm2d) and module.affine:
            torch.nn.init.uniform_(module.weight, 0.5, 2)
            torch.nn.init.uniform_(module.bias, -1, 1)
    return model


X = lay_out(torch.randn(3, 4, 9, 8, generator=torch.Generator().manual_seed(0)), True)
OPTIONS = {
    "default": {},
    "momentum": {"momentum": 0.3, "eps": 1e-2},
    "cumulative average": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
    "not affine": {"affine": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_gradients_and_buffers_are_those_of_pytorch(options):
    model = make_model(**options)
    trainable, launches = prepare(copy.deepcopy(model), X)
    assert len(launches) == 2
    for number in range(1, 4):
        x = X * number + number
        assert differ(run_with_gradients(trainable, x), run_with_gradients(in_double(model), x.double())) < 1e-5
        run_with_gradients(model, x)
        assert [len(each) for each in launches] == [number, number]
    for (name, found), wanted in zip(trainable.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6), name
    assert list(trainable.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_graphs_take_statistics(backend):
    model = make_model()
    trainable, launches = prepare(copy.deepcopy(model), X)
    compiled = torch.compile(copy.deepcopy(trainable), backend=backend, fullgraph=True)
    for number in range(1, 3):
        x = X * number + number
        found = run_with_gradients(compiled._orig_mod, x, compiled)
        assert differ(found, run_with_gradients(in_double(model), x.double())) < 1e-5
        run_with_gradients(model, x)
        assert [len(each) for each in launches] == [number, number]
    for (name, one), other in zip(compiled._orig_mod.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), name
    assert compiled._orig_mod[0].output_stats is None


def test_the_operator_with_statistics_is_as_pytorch_wants_it():
    x, weight = torch.randn(2, 4, 5, 5, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    options = [1, 1], [1] * 4, [1, 1], 1, False, [0, 0], True
    result = torch.library.opcheck(convolution_stats, (x, weight, *options))
    assert set(result.values()) == {"SUCCESS"}
    y, stats = convolution_stats(x, weight, *options)
    assert normalization.compute_stats_error(stats, y) < 1e-6


def test_a_batch_of_inputs_has_the_statistics_of_each():
    xs, weight = torch.randn(3, 2, 4, 5, 5), torch.randn(6, 4, 3, 3)
    options = [1, 1], [1] * 4, [1, 1], 1, False, [0, 0], True
    outputs, stats = torch.vmap(lambda one: convolution_stats(one, weight, *options))(xs)
    for x, *found in zip(xs, outputs, stats, strict=True):
        for tensor, expected in zip(found, convolution_stats(x, weight, *options), strict=True):
            assert torch.allclose(tensor, expected, atol=1e-5)


def test_second_derivatives_are_those_of_pytorch():
    model = make_model()
    trainable, launches = prepare(copy.deepcopy(model), X)

    def penalize(module, dtype=torch.float32):
        x = X.to(dtype, copy=True).requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), list(module.parameters()))

    wanted = penalize(in_double(model), torch.float64)
    assert differ(penalize(trainable), wanted, floor=1e-3) < 1e-5
    assert all(launches)


def test_frozen_parameters_have_no_gradients():
    trainable, launches = prepare(make_model(), X)
    trainable[1].weight.requires_grad_(False)
    trainable[0].weight.requires_grad_(False)
    trainable(X).square().sum().backward()
    assert trainable[1].weight.grad is None
    assert trainable[0].weight.grad is None
    assert trainable[1].bias.grad is not None
    assert all(launches)


def test_evaluation_frozen_statistics_and_changed_outputs_run_by_pytorch():
    model = make_model()
    trainable, launches = prepare(copy.deepcopy(model), X)
    for module in (trainable, model):
        module[1].eval()  # frozen statistics in a network that trains
    assert torch.allclose(trainable(X), model(X), atol=1e-5)
    for module in (trainable, model):
        module.eval()
    count = len(launches[0])
    assert torch.allclose(trainable(X), model(X), atol=1e-5)
    assert len(launches[0]) == count
    y = normalization.attach_stats(torch.randn(2, 3, 4, 4), torch.zeros(2, 3))
    assert normalization.find_stats(y) is not None
    y += 1
    assert normalization.find_stats(y) is None


class Between(torch.nn.Module):
    """A normalization that does not read the output of the convolution itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(4, 8, 3, bias=False), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x) + 1)


@pytest.mark.parametrize("model", [Between(), torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), torch.nn.SyncBatchNorm(4))])
def test_other_pairs_are_not_recorded(model):
    assert not any(prepare(model.eval() if isinstance(model, torch.nn.Sequential) else model, X)[1])


def test_products_with_statistics_are_compared_with_the_normalization():
    """Both passes of a normalization by given statistics equal those of PyTorch."""
    trainable = make_trainable(make_model())
    with F.record_calls() as calls:
        training.run_step(trainable, (X,), has_backward=False)
    marked = [replace(recorded, is_normalized=True) for recorded in calls]
    tasks = [task for task in collect_tasks(marked) if task.product == FORWARD_STATS]
    assert [task.workload.text for task in tasks] == [
        "conv2d:3x4x9x8,8x4x3x3,s2,p0,nhwc,stats",
        "conv2d:3x8x4x3,6x8x1x1,s1,p0,nhwc,stats",
    ]
    task: ProductTask = tasks[0]
    y = task.run_by_pytorch(task.make_operands())
    variance, mean = torch.var_mean(y, [0, 2, 3], correction=0)
    stats = torch.stack([mean, variance])
    example = normalization.NormalizationExample.for_output(task.call)
    running = [each.clone() for each in example.running]
    found = example.run(y, stats)
    updated = [each.clone() for each in example.running]
    wanted = replace(example, running=tuple(running)).run(y, None)
    for one, other in zip([*found, *updated], [*wanted, *running], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    assert normalization.compute_stats_error(stats, y) < 1e-6
    assert normalization.compute_stats_error(stats * 1.1, y) > 1e-2
