"""What decides what a model computes is followed: weights, modes, arguments, autocast."""

import copy

import pytest
import torch
from small_models import Model, NormAct, X, differ, optimized, runs
from torch.autograd import forward_ad
from torch.nn import Conv2d


def test_weights_that_change_are_seen(faster, block):
    other = copy.deepcopy(block)
    for change in (
        lambda model: model.conv1.weight.mul_(2),
        lambda model: model.shortcut[0].bias.add_(1),
        lambda model: model.bn2.running_var.mul_(3),
        lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
        lambda model: model.load_state_dict({k: v * 2.0 for k, v in model.state_dict().items()}, assign=True),
    ):
        with torch.no_grad():
            change(faster)
            change(other)
        assert differ(faster, other) < 1e-5


@torch.no_grad()
def test_weights_in_memory_that_others_had_are_seen():
    model = Conv2d(16, 16, 3, bias=False).eval()
    x = torch.randn(1, 16, 8, 8)
    ours = optimized(model, x)
    assert differ(ours, model, x) < 1e-5
    for _ in range(5):
        for _ in range(2):
            ours.load_state_dict({"weight": torch.randn_like(model.weight)}, assign=True)
        model.load_state_dict(ours.state_dict())
        assert differ(ours, model, x) < 1e-5
        assert differ(ours.bfloat16().float(), model.bfloat16().float(), x) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(("norm", "part"), [(torch.nn.BatchNorm2d(4), "1"), (NormAct(4, torch.relu), "")])
def test_statistics_that_training_mode_updates_are_seen(norm, part):
    """PyTorch writes to them without a new version."""
    model = torch.nn.Sequential(Conv2d(4, 4, 3), norm).eval()
    ours = optimized(model)
    assert runs(ours) == {"0": True}
    for each in (ours, model):
        each.get_submodule(part).train()
        each(X)
        each.eval()
    assert differ(ours, model) < 1e-5


def test_transforms_are_those_of_pytorch(faster, block):
    wanted = torch.func.jvp(block, (X,), (X,))
    torch.testing.assert_close(torch.func.jvp(faster, (X,), (X,)), wanted, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), forward_ad.dual_level():
        y = forward_ad.unpack_dual(faster(forward_ad.make_dual(X, X)))
    torch.testing.assert_close(tuple(y), wanted, rtol=1e-4, atol=1e-5)
    parameters = {name: torch.stack([value, 2 * value]) for name, value in block.named_parameters()}

    def run_all(model):
        return torch.func.vmap(lambda each: torch.func.functional_call(model, each, X))(parameters)

    torch.testing.assert_close(run_all(faster), run_all(block), rtol=1e-4, atol=1e-5)


def test_a_copy_has_weights_of_its_own(faster, made, block):
    with torch.no_grad():
        faster.conv1.weight.mul_(3)
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.conv1.weight.mul_(3)
    assert differ(faster, other) < 1e-5
    assert differ(made, block) < 1e-5


def test_gradients_and_training_are_pytorch_s(faster, block):
    x = X.clone().requires_grad_()
    faster(x).sum().backward()
    wanted = X.clone().requires_grad_()
    block(wanted).sum().backward()
    assert torch.allclose(x.grad, wanted.grad, atol=1e-4)
    faster.requires_grad_(True)
    faster(X).sum().backward()
    assert faster.conv1.weight.grad is not None
    before = faster.bn1.running_mean.clone()
    faster.train()
    faster(X)
    assert not torch.equal(before, faster.bn1.running_mean)


def test_later_hooks_and_training_normalisations_are_seen(faster, block):
    other = copy.deepcopy(block)
    for model in (faster, other):
        model.shortcut[1].train()
    assert differ(faster, other) < 1e-5
    assert torch.equal(faster.shortcut[1].running_mean, other.shortcut[1].running_mean)
    for model in (faster, other):
        model.conv2.register_forward_hook(lambda module, given, y: y * 2)
    assert differ(faster, other) < 1e-5


def test_dropout_alone_may_be_set_to_training(faster):
    faster.dropout.train()
    with torch.no_grad():
        assert not torch.equal(faster(X), faster(X))
    faster.dropout.eval()
    with torch.no_grad():
        assert torch.equal(faster(X), faster(X))


def test_autocast_decides_on_the_dtype(block):
    with torch.autocast("cpu", torch.bfloat16):
        model = optimized(block)
        assert all(",bf16" in line.workload for line in model.report().lines)
        assert differ(model, block) < 0.03
    assert differ(model, block) < 1e-6  # without it, by PyTorch


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("args", "named", "drops"),
    [
        ((), {}, True),
        ((True, False), {}, True),
        ((False,), {}, False),
        ((), {"training": False}, False),
        ((), {"inplace": False, "training": True}, True),
    ],
)
def test_only_dropout_that_drops_nothing_is_taken_out(args, named, drops):
    def call(model, x):
        return torch.relu(torch.nn.functional.dropout(model.conv(x), 1.0, *args, **named))

    model = Model(call, conv=Conv2d(4, 4, 1))
    ours = optimized(model)
    assert differ(ours, model) < 1e-5 or drops
    assert (float(ours(X).abs().max()) == 0) == drops
    assert ours.report().lines[0].workload.endswith("bias" if drops else "bias,relu")


class Choosing(torch.nn.Module):
    """Two convolutions, one of which runs, as its arguments say."""

    def __init__(self, first):
        super().__init__()
        self.one, self.other, self.first = Conv2d(4, 4, 1), Conv2d(4, 4, 1), first

    def forward(self, x, mask=None, *, flag=False):
        conv = self.one if self.first(x, mask, flag) else self.other
        return torch.relu(conv(x)) if mask is None else torch.relu(conv(x) * mask)


CHOICES = [lambda x, mask, flag: mask is None, lambda x, mask, flag: not flag]


@pytest.mark.parametrize("first", CHOICES)
def test_absent_arguments_and_flags_decide_as_in_the_model(first):
    model, mask = Choosing(first).eval(), torch.rand(4, 1, 1)
    ours = optimized(model)
    assert [line.workload.partition("p0,")[2] for line in ours.report().lines if line.workload] == ["bias,relu"]
    for call in (
        lambda model: model(X),
        lambda model: model(X, None),
        lambda model: model(X, mask),
        lambda model: model(X, mask=mask),
        lambda model: model(X, flag=True),
        lambda model: model(x=X, flag=False),
    ):
        with torch.no_grad():
            torch.testing.assert_close(call(ours), call(model), rtol=1e-4, atol=1e-5)


def test_random_values_are_computed_at_each_call():
    ours = optimized(Model(lambda m, x: m.conv(x) + torch.randn(2, 4, 9, 11), conv=Conv2d(4, 4, 1)))
    assert runs(ours) == {"conv": True}
    assert differ(ours, ours) > 0.01


def test_autocast_that_a_model_changes_is_as_in_the_model():
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model.first(x)
        return model.second(y.float())

    model = Model(call, first=Conv2d(4, 4, 1), second=Conv2d(4, 4, 1))
    ours = optimized(model)
    assert [",bf16" in line.workload for line in ours.report().lines] == [True, False]
    assert differ(ours, model) < 0.03
