"""`torch.compile(model, backend="tvmconv")`, on the CPU through OpenCL."""

import copy
import logging

import pytest
import torch
from small_models import Block, X, with_statistics

from tvmconv.errors import DeviceError, TuningError
from tvmconv.torch.backend import backend
from tvmconv.torch.layout_plan import LayoutCosts

TUNED = {"choose": "tuned", "fallback_backend": "eager"}


@pytest.fixture
def block():
    torch._dynamo.reset()
    return with_statistics(Block())


def compiled(model, **options):
    return torch.compile(model, backend=backend, options={**TUNED, **options})


def assert_same(ours, theirs, x=X):
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def told(caplog):
    """The reports that were logged."""
    return [record.getMessage() for record in caplog.records if record.name == "tvmconv.torch"]


@torch.no_grad()
def test_a_compiled_models_convolutions_run_by_fused_kernels(block, caplog):
    caplog.set_level(logging.INFO, "tvmconv.torch")
    assert_same(compiled(block, fallback_backend="aot_eager"), block)
    (report,) = told(caplog)
    assert report.count("p1,bias,relu ") == report.count("p1,bias,add,relu ") == report.count("p0,bias ") == 1
    assert "the whole model" in report


@torch.no_grad()
def test_weights_that_change_are_seen(block):
    ours, other = compiled(block), copy.deepcopy(block)
    assert_same(ours, other)
    for model in (block, other):
        model.conv1.weight.mul_(2)
        model.bn2.running_var.mul_(3)
    assert_same(ours, other)
    for model in (block, other):
        model.load_state_dict({name: value * 0.5 for name, value in other.state_dict().items()})
    assert_same(ours, other)
    new = torch.nn.Parameter(torch.randn_like(block.conv1.weight))
    for model in (block, other):
        model.conv1.weight = new
    assert_same(ours, other)


@torch.no_grad()
def test_other_models_and_training_mode_run_as_before(block, caplog):
    caplog.set_level(logging.INFO, "tvmconv.torch")
    linear = torch.nn.Linear(11, 3).eval()
    assert_same(compiled(linear), linear)
    assert not told(caplog)
    block.bn1.train()
    ours, other = compiled(block), copy.deepcopy(block)
    assert_same(ours, other)
    torch.testing.assert_close(block.bn1.running_mean, other.bn1.running_mean)


class Called(torch.nn.Module):
    """Calls functions in a way that it is given, on parameters and on a buffer."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.weight = torch.nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("bias", torch.rand(4))

    def forward(self, x):
        return self.call(x, self.weight, self.bias)


CALLS = {
    "p0,bias": lambda x, weight, bias: torch.conv2d(x, weight, bias),
    "p1": lambda x, weight, bias: torch.nn.functional.conv2d(padding=1, weight=weight, input=x),
    "p0,bias,relu": lambda x, weight, bias: torch.relu(
        torch.nn.functional.batch_norm(torch.conv2d(x, weight), bias, bias, bias, bias)
    ),
    "p2,bias": lambda x, weight, bias: torch.nn.functional.batch_norm(
        input=torch.conv2d(x, weight, padding=2), running_mean=bias, running_var=bias
    ),
}


@pytest.mark.sample(1)
@torch.no_grad()
@pytest.mark.parametrize("call", CALLS)
def test_arguments_by_name_and_frozen_ones_are_taken(call, caplog):
    caplog.set_level(logging.INFO, "tvmconv.torch")
    torch._dynamo.reset()
    model = Called(CALLS[call]).eval()
    assert_same(compiled(model), model)
    (report,) = told(caplog)
    assert f"s1,{call} " in report


@torch.no_grad()
def test_a_graph_in_which_autocast_changes_is_left_alone(block, caplog):
    caplog.set_level(logging.INFO, "tvmconv.torch")

    def within(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)
        return torch.relu(y)

    assert torch.equal(compiled(within)(X), within(X))
    assert not told(caplog)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(block)(X)
    assert ",bf16,bias,relu" in told(caplog)[0]


@torch.no_grad()
def test_by_default_the_faster_runs_and_it_is_known_by_its_name(block):
    assert "tvmconv" in torch._dynamo.list_backends()
    assert_same(torch.compile(block, backend="tvmconv", options={"fallback_backend": "eager"}), block)


@torch.no_grad()
def test_without_a_device_of_ours_it_is_the_other_backend_alone(block, monkeypatch, caplog):
    def absent(place, named):
        raise DeviceError("there is no OpenCL device")

    monkeypatch.setattr("tvmconv.torch.backend.find_device_for", absent)
    assert_same(compiled(block), block)
    assert "there is no OpenCL device: PyTorch computes the convolutions" in told(caplog)


def test_an_option_that_there_is_not_is_refused():
    with pytest.raises(TuningError, match="option 'second': expected one of seconds, log, choose, fallback_backend"):
        backend(None, (), options={"second": 1})
    with pytest.raises(TuningError, match="choose='fast'"):
        backend(None, (), options={"choose": "fast"})


@torch.no_grad()
def test_layouts_inside_a_compiled_graph_are_planned(monkeypatch, caplog):
    """Kernels are cheapest channels last; the result has the strides of PyTorch."""
    caplog.set_level(logging.INFO, "tvmconv.torch")
    torch._dynamo.reset()

    class FixedCosts(LayoutCosts):
        def kernel_seconds(self, text):
            return {"nchw": 1e-5, "nchw-nhwc": 5e-6, "nhwc-nchw": 5e-6, "nhwc": 1e-6}

    monkeypatch.setattr("tvmconv.torch.inference.LayoutCosts", FixedCosts)
    model = torch.nn.Sequential(*(torch.nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))).eval()
    ours, x = compiled(model), X[:, :, 0]
    assert_same(ours, model, x)
    assert ours(x).stride() == model(x).stride()
    assert "Inside the model, images are channels last at 3 convolutions" in told(caplog)[0]
