"""Models that `optimize(train=True)` returns: training, checkpoints, hooks, compilation, and several processes."""

import copy
import json

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint
from training import build_entries, differ, in_double, run_with_gradients

import tvmconv.torch
from tvmconv.errors import ModelError
from tvmconv.torch import functional as F  # noqa: N812  as PyTorch's is usually named
from tvmconv.torch import get_training_report
from tvmconv.torch.conv_call import FORWARD_BIAS, WGRAD
from tvmconv.torch.kernel_table import table
from tvmconv.torch.trainable import make_trainable

EXAMPLE = torch.randn(2, 4, 6, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def empty_table():
    yield
    table.clear()


@pytest.fixture(scope="module")
def optimized():
    """A model of which all three products of two equal convolutions run by kernels, and the model."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(layers[0], torch.nn.BatchNorm2d(4), torch.nn.ReLU(), layers[1], torch.nn.Dropout(0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmconv.torch.kernels.MAX_CANDIDATES", 1)  # the first is right, and others take time to build
        trainable = tvmconv.torch.optimize(model, EXAMPLE.requires_grad_(), train=True, choose="tuned")
    entries = dict(table._entries)
    yield model, trainable, entries
    table.clear()


@pytest.fixture
def trained(optimized):
    """The model and its trainable copy, with the kernels in the table."""
    model, trainable, entries = optimized
    for (product, call), entry in entries.items():
        table.install(product, call, entry)
    return model, trainable


def train(model, num_steps=3, run=None):
    """The losses of some steps of a copy of a model, whose dropout has the same seed."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(0)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (run or torch.nn.Module.__call__)(model, EXAMPLE.detach().requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_optimize_returns_a_model_of_the_same_tensors(trained):
    model, trainable = trained
    assert list(trainable.state_dict()) == list(model.state_dict())
    assert all(one is other for one, other in zip(trainable.parameters(), model.parameters(), strict=True))
    assert all(one is other for one, other in zip(trainable.buffers(), model.buffers(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert int(model[1].num_batches_tracked) == 0
    assert type(model[0]) is torch.nn.Conv2d
    report = get_training_report(trainable)
    assert [(line.path, line.product) for line in report.lines] == [
        (path, product) for path in ("0", "3") for product in ("forward", "dgrad", "wgrad")
    ]
    assert all(line.implementation != "PyTorch" and line.tvmconv_seconds for line in report.lines)
    assert json.loads(report.to_json())["lines"][0]["path"] == "0"
    assert "the whole step" in str(report)
    assert "<table" in report._repr_html_()


def test_losses_are_those_of_pytorch(trained):
    model, trainable = trained
    assert train(trainable) == pytest.approx(train(model), rel=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_the_same(trained, reentrant):
    model, trainable = trained

    def run(each, x):
        return checkpoint(lambda value: torch.nn.Module.__call__(each, value), x, use_reentrant=reentrant)

    assert train(trainable, run=run) == pytest.approx(train(model), rel=1e-4)


def test_hooks_and_accumulated_gradients_are_those_of_pytorch(trained):
    model, trainable = (copy.deepcopy(each).eval() for each in trained)
    ready = []
    for parameter in trainable.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)
    for each in (model, trainable):
        each[0].weight.requires_grad_(False)
        for factor in (1, 2):  # two parts of a batch
            each(factor * EXAMPLE.detach()).square().sum().backward()
    assert trainable[0].weight.grad is None
    assert len(ready) == 2 * (len(list(trainable.parameters())) - 1)
    for one, other in zip(model.parameters(), trainable.parameters(), strict=True):
        assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_a_model_without_a_report_is_refused():
    with pytest.raises(ModelError, match="Linear has no report"):
        get_training_report(torch.nn.Linear(2, 2))


def test_the_backend_has_kernels_in_differentiated_graphs(trained, monkeypatch):
    model, _ = trained
    monkeypatch.setattr("tvmconv.torch.kernels.MAX_CANDIDATES", 1)
    options = {"choose": "tuned", "fallback_backend": "aot_eager"}
    other = torch.compile(copy.deepcopy(model).eval(), backend="tvmconv", options=options)
    found = run_with_gradients(other._orig_mod, EXAMPLE, other)
    assert differ(found, run_with_gradients(in_double(model).eval(), EXAMPLE.double())) < 1e-5
    assert len(table.calls) == 1


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone."""
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def wrap_in_ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def shard(model):
    from torch.distributed.fsdp import fully_shard  # takes a second, which every worker would take to collect the tests

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.parametrize("wrap", [wrap_in_ddp, shard])
def test_wrappers_for_distributed_training_compute_the_same(trained, process_group, wrap):
    model, trainable = trained
    wanted = train(model)
    wrapped = wrap(copy.deepcopy(trainable))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(0)
    losses = []
    for _ in wanted:
        optimizer.zero_grad()
        loss = wrapped(EXAMPLE.detach().requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-4)


def train_in_a_process(rank, num_processes, folder):
    """One process of distributed training on its part of a batch; its kernels are built for that part."""
    store = distributed.FileStore(f"{folder}/store{num_processes}", num_processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_processes)
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(4, 6, 3, padding=1)
    batch = torch.randn(4, 4, 7, 8)[rank::num_processes]
    with F.record_calls() as calls:
        F.conv2d(batch, layer.weight, layer.bias, padding=1)
    for product, entry in build_entries(calls[0].call, {FORWARD_BIAS: "tiling", WGRAD: "tiling"}).items():
        table.install(product, calls[0].call, entry)
    trainable = make_trainable(torch.nn.Sequential(layer))
    trainable[0].uses_kernels = True
    model = torch.nn.parallel.DistributedDataParallel(trainable)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
    if rank == 0:
        torch.save(layer.weight.detach(), f"{folder}/weight{num_processes}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_the_weights_of_one(tmp_path):
    for count in (1, 2):
        torch.multiprocessing.spawn(train_in_a_process, (count, str(tmp_path)), nprocs=count)
    one, two = (torch.load(tmp_path / f"weight{count}.pt") for count in (1, 2))
    assert torch.allclose(one, two, atol=1e-5)
