"""Operators for training: their gradients, the kernels of the table, and what falls back to PyTorch."""

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as pytorch
from torch.nn.utils import parametrizations
from training import build_entries, by_operators, differ, draw_module, in_double, lay_out, run_with_gradients

import tvmconv.torch
from tvmconv.errors import ModelError
from tvmconv.torch import functional as F  # noqa: N812  as PyTorch's is usually named
from tvmconv.torch import training_backend, tune
from tvmconv.torch.backend import backend
from tvmconv.torch.conv_call import DGRAD, FORWARD, FORWARD_BIAS, WGRAD
from tvmconv.torch.conv_operators import convolution, convolution_dgrad, convolution_wgrad
from tvmconv.torch.kernel_table import table
from tvmconv.torch.product_selection import ProductSelector
from tvmconv.torch.product_task import collect_tasks
from tvmconv.torch.trainable import ROOT_PATH, make_trainable

TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def empty_table():
    yield
    table.clear()


def options_of(ndim, stride=1, low=1, high=1, groups=1, transposed=False, more=0, is_last=False):
    return [stride] * ndim, [low] * ndim + [high] * ndim, [1] * ndim, groups, transposed, [more] * ndim, is_last


CASES = {
    "1d": options_of(1, stride=2),
    "2d": options_of(2, groups=2),
    "2d-asymmetric-last": options_of(2, high=2, is_last=True),
    "3d-last": options_of(3, stride=2, is_last=True),
    "1d-transposed-last": options_of(1, stride=2, transposed=True, more=1, is_last=True),
    "2d-transposed": options_of(2, stride=2, transposed=True, more=1, groups=2),
}


def tensors_of(options, dtype=torch.float64):
    torch.manual_seed(0)
    ndim, groups = len(options[0]), options[3]
    shapes = (2, 4, *[4] * ndim), (4, 4 // groups, *[3] * ndim), (4,)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_operators_are_as_pytorch_wants_them(options):
    x, weight, bias = tensors_of(options)
    dy = torch.randn_like(convolution(x, weight, bias, *options)).requires_grad_()
    results = [
        torch.library.opcheck(convolution, (x, weight, bias, *options)),
        torch.library.opcheck(convolution_dgrad, (dy, weight, list(x.shape), *options)),
        torch.library.opcheck(convolution_wgrad, (dy, x, list(weight.shape), *options)),
    ]
    assert {value for result in results for value in result.values()} == {"SUCCESS"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [CASES["1d"], CASES["2d-asymmetric-last"], CASES["1d-transposed-last"]])
def test_first_and_second_derivatives_are_those_of_differences(options):
    tensors = tensors_of(options)
    assert torch.autograd.gradcheck(convolution, (*tensors, *options))
    assert torch.autograd.gradgradcheck(convolution, (*tensors, *options))


def test_second_derivatives_through_functions_are_those_of_pytorch():
    """A gradient penalty: the loss has the norm of a gradient in it."""
    x, weight, _ = tensors_of(CASES["2d"], torch.float32)

    def penalty(convolve):
        (gradient,) = torch.autograd.grad(convolve(x, weight, padding=1, groups=2).square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, weight))

    with by_operators(lambda: F.conv2d(x, weight, padding=1, groups=2)):
        found = penalty(F.conv2d)
    for one, other in zip(found, penalty(pytorch.conv2d), strict=True):
        assert torch.allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize("seed", range(60))
def test_random_modules_have_the_gradients_of_float64(seed):
    layer, shape = draw_module(seed)
    dtype, is_last = tuple(itertools.product(TOLERANCES, (False, True)))[seed % 6]
    layer = layer.to(dtype)
    layer.weight.data = lay_out(layer.weight.data, is_last)
    x = lay_out(torch.randn(shape, dtype=dtype), is_last)
    wanted = run_with_gradients(in_double(layer), x.double())
    trainable = make_trainable(layer)
    trainable.uses_kernels = True
    with by_operators(lambda: trainable(x)) as calls:
        results = run_with_gradients(trainable, x)
    assert calls  # PyTorch's own convolution did not run in place of the operator
    assert [(one.shape, one.dtype) for one in results] == [(other.shape, dtype) for other in wanted]
    assert differ(results, wanted) < TOLERANCES[dtype]


SCHEDULES = {FORWARD_BIAS: "tiling", DGRAD: "tiling", WGRAD: "tiling"}


@pytest.mark.parametrize("layer", [torch.nn.Conv1d(4, 4, 3), torch.nn.Conv2d(4, 4, (3, 2), padding="same")])
def test_activations_write_to_outputs_in_place(layer):
    """Of channels-last signals, which PyTorch has no format of, and of padding that differs between sides."""
    x = lay_out(torch.randn(2, 4, *[6] * (layer.weight.dim() - 2)), True)
    trainable = make_trainable(torch.nn.Sequential(layer, torch.nn.ReLU(inplace=True)))
    trainable[0].uses_kernels = True
    wanted = run_with_gradients(in_double(torch.nn.Sequential(layer, torch.nn.ReLU())), x.double())
    with by_operators(lambda: trainable(x)) as calls:
        assert differ(run_with_gradients(trainable, x), wanted) < 1e-5
    assert calls[0].call.channels_last


class Counting:
    """A launcher that counts its launches."""

    def __init__(self, launcher):
        self.launcher, self.count = launcher, 0

    def __call__(self, *arguments):
        self.count += 1
        return self.launcher(*arguments)


@pytest.fixture(scope="module")
def built():
    """The entries of a convolution's three products, and its call."""
    x, weight, bias = torch.randn(2, 4, 7, 8), torch.randn(6, 4, 3, 3), torch.randn(6)
    with F.record_calls() as calls:
        F.conv2d(x, weight, bias, padding=1)
    return calls[0].call, build_entries(calls[0].call, SCHEDULES)


@pytest.fixture
def counts(built):
    """Install the kernels in the table; the launchers by product."""
    call, entries = built
    launchers = {product: Counting(entry.launcher) for product, entry in entries.items()}
    for product, entry in entries.items():
        table.install(product, call, replace(entry, launcher=launchers[product]))
    return launchers


def compare_kernels(layer, x):
    """The error of a layer of which all products run by the naive kernels, and the numbers of their launches."""
    trainable = make_trainable(layer)
    trainable.uses_kernels = True
    with F.record_calls() as calls:
        trainable(x)
    forward = FORWARD if layer.bias is None else FORWARD_BIAS
    entries = build_entries(calls[0].call, dict.fromkeys((forward, DGRAD, WGRAD), "default"))
    launchers = {product: Counting(entry.launcher) for product, entry in entries.items()}
    for product, entry in entries.items():
        table.install(product, calls[0].call, replace(entry, launcher=launchers[product]))
    error = differ(run_with_gradients(trainable, x), run_with_gradients(in_double(layer), x.double()))
    return error, [launcher.count for launcher in launchers.values()]


def test_kernels_compute_all_products_of_a_transposed_convolution():
    layer = torch.nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1, output_padding=1, groups=2)
    error, counts = compare_kernels(layer, lay_out(torch.randn(2, 6, 5, 4), True))
    assert error < 1e-5
    assert counts == [1, 1, 1]


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(30))
def test_kernels_of_random_modules_have_the_gradients_of_float64(seed):
    layer, shape = draw_module(seed)
    error, counts = compare_kernels(layer, lay_out(torch.randn(shape), seed % 2 == 1))
    assert error < 1e-5
    assert counts == [1, 1, 1]


def leaves(*frozen, batch=2):
    torch.manual_seed(1)
    tensors = torch.randn(batch, 4, 7, 8), torch.randn(6, 4, 3, 3), torch.randn(6)
    return [tensor.requires_grad_(index not in frozen) for index, tensor in enumerate(tensors)]


def gradients(function, tensors):
    y = function(*tensors, padding=1)
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), needed)]


def agree(found, wanted):
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-3) for one, other in zip(found, wanted, strict=True))


def test_kernels_compute_all_three_products_of_weights_that_change(counts):
    tensors = leaves()
    for number in range(1, 3):
        assert agree(gradients(F.conv2d, tensors), gradients(pytorch.conv2d, tensors))
        assert [launcher.count for launcher in counts.values()] == [number] * 3
        tensors[1].data.mul_(2)  # which PyTorch does not report
        with torch.no_grad():
            tensors[1].add_(1)


@pytest.mark.parametrize(("frozen", "expected"), [((0,), [1, 0, 1]), ((1,), [1, 1, 0]), ((0, 1), [1, 0, 0])])
def test_products_that_nothing_needs_do_not_run(counts, frozen, expected):
    tensors = leaves(*frozen)
    assert agree(gradients(F.conv2d, tensors), gradients(pytorch.conv2d, tensors))
    assert [launcher.count for launcher in counts.values()] == expected


def test_other_batch_sizes_run_by_pytorch(counts):
    tensors = leaves(batch=3)
    assert agree(gradients(F.conv2d, tensors), gradients(pytorch.conv2d, tensors))
    assert [launcher.count for launcher in counts.values()] == [0, 0, 0]


def test_tensors_of_any_strides_are_taken(counts):
    tensors = leaves()
    tensors[0] = tensors[0].detach().repeat_interleave(2, 3)[..., ::2].requires_grad_()
    tensors[1] = tensors[1].detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    assert agree(gradients(F.conv2d, tensors), gradients(pytorch.conv2d, tensors))
    assert counts[WGRAD].count == 1


def test_kernels_run_in_compiled_graphs(counts):
    tensors = leaves()
    layer = torch.nn.Conv2d(4, 6, 3, padding=1)
    layer.weight.data, layer.bias.data = tensors[1].detach(), tensors[2].detach()
    trainable = make_trainable(layer)
    trainable.uses_kernels = True
    compiled = torch.compile(trainable, backend="aot_eager", fullgraph=True)
    wanted = run_with_gradients(in_double(layer), tensors[0].double())
    assert differ(run_with_gradients(trainable, tensors[0], compiled), wanted) < 1e-5
    assert [launcher.count for launcher in counts.values()] == [1, 1, 1]


@pytest.mark.parametrize(
    "normalize", [parametrizations.weight_norm, torch.nn.utils.weight_norm, parametrizations.spectral_norm]
)
def test_convolutions_of_computed_weights_are_trainable(normalize):
    torch.manual_seed(0)
    layer = normalize(torch.nn.Conv2d(4, 6, 3))
    trainable = make_trainable(layer)
    assert all(one is other for one, other in zip(trainable.parameters(), layer.parameters(), strict=True))
    x = torch.randn(2, 4, 7, 8)
    layer.eval()  # spectral normalization changes its buffers in training mode
    trainable.eval()
    with F.record_calls() as calls:
        trainable(x.requires_grad_())
    assert [(each.path, each.needs_wgrad) for each in calls] == [(ROOT_PATH, True)]
    for one, other in zip(run_with_gradients(trainable, x), run_with_gradients(layer, x), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    if normalize is not torch.nn.utils.weight_norm:  # whose modules PyTorch cannot copy
        assert differ([copy.deepcopy(trainable)(x)], [layer(x).double()]) < 1e-5


def test_products_that_were_compared_before_are_not_compared_again(monkeypatch):
    found = []
    monkeypatch.setattr(training_backend, "fill_table", lambda tasks, *_: found.append(tasks) or [])
    x = torch.randn(2, 4, 7, 8, requires_grad=True)
    for _ in range(2):
        torch._dynamo.reset()
        layer = torch.nn.Conv2d(4, 6, 3)
        torch.compile(layer, backend=backend, options={"fallback_backend": "eager"})(x)
        table.compared.update((task.product, task.call) for task in found[-1])
    assert [len(tasks) for tasks in found] == [3, 0]


def test_forward_passes_take_configs_that_were_measured_with_a_bias():
    x, weight = torch.randn(2, 4, 7, 8), torch.randn(6, 4, 3, 3, requires_grad=True)
    with F.record_calls() as calls:
        F.conv2d(x, weight)
    provider = SimpleNamespace(available={}, is_measured=lambda text, _: text.endswith("bias"))
    selector = ProductSelector(provider, "fastest", None, None)
    tasks = collect_tasks(calls)
    text = next(task.workload.text for task in tasks if task.product == FORWARD)
    assert selector._find_siblings(tasks) == {text: f"{text},bias"}
    provider.is_measured = lambda *_: True
    assert selector._find_siblings(tasks) == {}


@pytest.mark.usefixtures("shared_processes")
def test_products_without_time_are_not_compared_by_later_graphs(tmp_path):
    x = torch.randn(2, 4, 7, 8, requires_grad=True)
    tvmconv.torch.optimize(torch.nn.Conv2d(4, 6, 3), x, train=True, seconds=0.001, log=tmp_path / "log.jsonl")
    assert len(table.compared) == 3


def test_a_batch_of_inputs_is_one_larger_convolution():
    x, weight = torch.randn(5, 2, 4, 7, 8), torch.randn(6, 4, 3, 3)
    options = options_of(2)
    wanted = torch.stack([pytorch.conv2d(one, weight, padding=1) for one in x])
    assert torch.allclose(torch.vmap(lambda one: convolution(one, weight, None, *options))(x), wanted, atol=1e-4)
    weights = torch.randn(5, 6, 4, 3, 3)
    found = torch.vmap(lambda one, other: convolution(one, other, None, *options))(x, weights)
    wanted = torch.stack([pytorch.conv2d(*pair, padding=1) for pair in zip(x, weights, strict=True)])
    assert torch.allclose(found, wanted, atol=1e-4)


def test_gradients_of_each_sample_are_those_of_pytorch():
    x, weight, _ = leaves()
    samples = x.detach()[:, None]

    def per_sample(convolve):
        def loss(kernel, sample):
            return convolve(sample, kernel, padding=1).square().sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight.detach(), samples)

    with by_operators(lambda: F.conv2d(samples[0], weight, padding=1)):
        assert torch.allclose(per_sample(F.conv2d), per_sample(pytorch.conv2d), rtol=1e-4, atol=1e-3)


def test_batches_of_gradients_are_those_of_pytorch(counts):
    tensors, dy = leaves(), torch.randn(5, 2, 6, 7, 8)

    def run(convolve):
        y = convolve(*tensors, padding=1)
        batch = torch.autograd.grad(y, tensors, dy, is_grads_batched=True, retain_graph=True)
        return *batch, torch.func.vmap(lambda one: torch.autograd.grad(y, tensors[0], one, retain_graph=True)[0])(dy)

    assert agree(run(F.conv2d), run(pytorch.conv2d))


FALLBACKS = {
    "float64": (torch.randn(2, 4, 7, 8, dtype=torch.double), torch.randn(6, 4, 3, 3, dtype=torch.double)),
    "complex": (torch.randn(2, 4, 7, 8, dtype=torch.cfloat), torch.randn(6, 4, 3, 3, dtype=torch.cfloat)),
    "no batch": (torch.randn(4, 7, 8), torch.randn(6, 4, 3, 3)),
    "empty batch": (torch.randn(0, 4, 7, 8), torch.randn(6, 4, 3, 3)),
    "subclass": (torch.randn(2, 4, 7, 8).as_subclass(type("Own", (torch.Tensor,), {})), torch.randn(6, 4, 3, 3)),
}


@pytest.mark.parametrize("tensors", FALLBACKS.values(), ids=FALLBACKS)
def test_tensors_without_kernels_run_by_pytorch(tensors):
    with F.record_calls() as calls:
        y = F.conv2d(*tensors, padding=1)
    assert calls == []
    assert torch.equal(y, pytorch.conv2d(*tensors, padding=1))


def test_forward_mode_derivatives_are_those_of_pytorch(counts):
    tensors = leaves()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensors[0].detach(), torch.ones_like(tensors[0]))
        found, wanted = (
            forward_ad.unpack_dual(convolve(dual, *tensors[1:], padding=1)).tangent
            for convolve in (F.conv2d, pytorch.conv2d)
        )
    assert torch.allclose(found, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 0},
        {"padding": -1},
        {"padding": "same", "stride": 2},
        {"padding": "half"},
        {"groups": 3},
        {"groups": 0},
        {"dilation": (1, 1, 1)},
        {"dilation": 9},
    ],
)
def test_errors_are_those_of_pytorch(options):
    x, weight, bias = leaves()
    with pytest.raises((RuntimeError, ValueError)) as wanted:
        pytorch.conv2d(x, weight, bias, **options)
    with F.record_calls(), pytest.raises(type(wanted.value)) as found:
        F.conv2d(x, weight, bias, **options)
    assert str(found.value) == str(wanted.value)


def test_autocast_computes_in_its_dtype():
    x, weight, bias = leaves()

    def run(convolve):
        with torch.autocast("cpu", torch.bfloat16):
            y = convolve(x, weight, bias, padding=1)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, weight, bias))]

    with by_operators(lambda: run(F.conv2d)) as calls:
        found, wanted = run(F.conv2d), run(pytorch.conv2d)
    assert calls[0].call.dtype is torch.bfloat16
    assert [one.dtype for one in found] == [other.dtype for other in wanted]
    assert differ(found, [other.double() for other in wanted]) < 2e-2


def test_recordings_are_on_one_device():
    with pytest.raises(ModelError, match="on no device: expected one"):
        tune([])


def test_forward_without_bias_is_another_product(counts):
    x, weight, _ = leaves()
    assert torch.allclose(F.conv2d(x, weight, padding=1), pytorch.conv2d(x, weight, padding=1), atol=1e-4)
    assert counts[FORWARD_BIAS].count == 0
    assert table.find(FORWARD, next(iter(table.calls))) is None
