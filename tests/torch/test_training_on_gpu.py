"""Training on an NVIDIA GPU: gradients of kernels, autocast, captured steps, several processes, curves of losses."""

import copy
import functools
import itertools
import math
import threading
import time

import convnext
import distributed_training
import pytest
import torch
from training import by_operators, differ, draw_module, in_double, lay_out, run_with_gradients

import tvmconv.torch
from tvmconv.torch import get_training_report, training, training_backend
from tvmconv.torch.backend import backend
from tvmconv.torch.conv_call import FORWARD_STATS
from tvmconv.torch.kernel_table import table
from tvmconv.torch.trainable import make_trainable

pytestmark = pytest.mark.gpu

# Dtypes with the largest relative error of an output or a gradient.
DTYPES = {
    "f32": (torch.float32, 1e-5),
    "tf32": (torch.float32, 3e-3),
    "f16": (torch.float16, 5e-3),
    "bf16": (torch.bfloat16, 3e-2),
}


FLOOR = 1e-3  # of the gradients of whole networks, see `differ`


@pytest.fixture(autouse=True)
def settings():
    tf32 = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cudnn.allow_tf32 = tf32
    table.clear()


@pytest.mark.parametrize("seed", range(60))
def test_kernels_of_random_modules_have_the_gradients_of_float64(seed):
    """All products run by the most promising kernel of each, where there is one."""
    layer, shape = draw_module(seed)
    (name, (dtype, tolerance)), is_last = tuple(itertools.product(DTYPES.items(), (False, True)))[seed % 8]
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    layer = layer.cuda().to(dtype)
    layer.weight.data = lay_out(layer.weight.data, is_last)
    x = lay_out(torch.randn(shape, device="cuda:0", dtype=dtype), is_last)
    wanted = run_with_gradients(in_double(layer), x.double())
    trainable = tvmconv.torch.optimize(layer, x.requires_grad_(), train=True, choose="tuned")
    report = get_training_report(trainable)
    results = run_with_gradients(trainable, x)
    assert [(one.shape, one.dtype) for one in results] == [(other.shape, dtype) for other in wanted]
    assert differ(results, wanted) < tolerance, str(report)
    assert any(line.implementation != "PyTorch" for line in report.lines), str(report)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_operators_with_pytorchs_kernels_have_the_gradients_of_float64(name, seed):
    dtype, tolerance = DTYPES[name]
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    layer, shape = draw_module(seed)
    trainable = make_trainable(layer.cuda().to(dtype))
    trainable.uses_kernels = True
    x = torch.randn(shape, device="cuda:0", dtype=dtype)
    with by_operators(lambda: trainable(x)):
        assert differ(run_with_gradients(trainable, x), run_with_gradients(in_double(layer), x.double())) < tolerance


def test_a_thread_without_a_context_launches_kernels():
    """The first CUDA call of an autograd thread may be a launch of ours."""
    x = torch.randn(2, 16, 8, 8, device="cuda:0", dtype=torch.half)
    layer = torch.nn.Conv2d(16, 16, 3, padding=1).cuda().half()
    trainable = tvmconv.torch.optimize(layer, x, train=True, choose="tuned")
    (_, call), entry = next((key, entry) for key, entry in table._entries.items() if key[0] == "wgrad")
    dy, found = torch.randn(call.output_shape, device="cuda:0", dtype=torch.half), []
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(entry.launcher(dy, x, None, None)))
    thread.start()
    thread.join()
    assert found[0].shape == trainable.weight.shape


class Network(torch.nn.Module):
    """Convolutions with and without strides, depthwise and transposed, with normalisations and a classifier."""

    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for filters, stride, groups in ((32, 2, 1), (64, 1, 1), (64, 1, 64), (64, 2, 1), (128, 1, 4)):
            layers.append(torch.nn.Conv2d(channels, filters, 3, stride, 1, groups=groups, bias=False))
            layers += [torch.nn.BatchNorm2d(filters), torch.nn.ReLU(inplace=True)]
            channels = filters
        layers += [torch.nn.ConvTranspose2d(128, 32, 2, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4)]
        self.features, self.classifier = torch.nn.Sequential(*layers), torch.nn.Linear(512, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def make_data(num_batches=10, batch=32, seed=0):
    """Images whose class is that of a fixed pattern in them, which can be learnt."""
    generator = torch.Generator("cuda").manual_seed(seed)
    patterns = torch.randn(10, 3, 32, 32, device="cuda", generator=generator)
    labels = torch.randint(10, (num_batches, batch), device="cuda", generator=generator)
    noise = torch.randn(num_batches, batch, 3, 32, 32, device="cuda", generator=generator)
    images = patterns[labels] * 0.3 + noise
    return [(x.contiguous(memory_format=torch.channels_last), y) for x, y in zip(images, labels, strict=True)]


def make_network():
    torch.manual_seed(0)
    return Network().cuda().to(memory_format=torch.channels_last)


def optimize(model, x, dtype=torch.float16, **options):
    with torch.autocast("cuda", dtype):
        return tvmconv.torch.optimize(model, x, train=True, **options)


SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
# With PyTorch's default, 2^16, its gradients of biases overflow in float16, where operators have them in float32.
# PyTorch then skips the first steps, and no later loss is the same.
SCALE = 2.0**10
NUM_WARM_UP_STEPS = 20


def train(model, data, num_steps, dtype=torch.float16, make_optimizer=SGD, get_factor=lambda _: 1.0):
    """The losses of the steps, with autocast and scaled gradients; `get_factor`: the factor of the rate in a step."""
    optimizer = make_optimizer(model.parameters())
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, get_factor)
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE, enabled=dtype is torch.float16)
    losses = []
    for number in range(num_steps):
        x, y = data[number % len(data)]
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def decay(number):
    """The factor of the rate in a step of 300: it rises for some steps, and falls to 0 along a cosine."""
    return min(1.0, (number + 1) / NUM_WARM_UP_STEPS) * (1 + math.cos(math.pi * number / 300)) / 2


def check_final_losses(name, found, wanted):
    """Compare the mean losses of the last 30 steps, within 1 %."""
    assert found[0] == pytest.approx(wanted[0], rel=1e-2)
    assert wanted[-1] < wanted[0] / 3  # the network learns
    means = [sum(losses[-30:]) / 30 for losses in (found, wanted)]
    print(f"{name}: {means[1]:.4g} by PyTorch, {means[0]:.4g}, {means[0] / means[1] - 1:+.2%}", flush=True)
    assert means[0] == pytest.approx(means[1], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_curves_of_losses_are_those_of_pytorch(dtype, monkeypatch):
    """300 steps of the same seeds."""
    monkeypatch.setattr("tvmconv.torch.kernels.MAX_CANDIDATES", 1)  # others take time to build
    data = make_data()
    model = make_network()
    ours = optimize(copy.deepcopy(model), data[0][0], dtype, choose="tuned")
    check_final_losses(f"kernels, {dtype}", train(ours, data, 300, dtype), train(model, data, 300, dtype))


def fuse(model, x, dtype, monkeypatch):
    """A model as a fused graph, whose convolutions PyTorch computes."""
    for module in (training, training_backend):
        monkeypatch.setattr(module, "fill_table", lambda *_: [])
    torch._dynamo.reset()
    return optimize(model, x, dtype, fused=True, choose="tuned")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_curves_of_losses_of_fused_graphs_are_those_of_pytorch(dtype, monkeypatch):
    """The same where operators compute batch normalizations, and PyTorch the convolutions."""
    data, model = make_data(), make_network()
    ours = fuse(copy.deepcopy(model), data[0][0], dtype, monkeypatch)
    assert any("batch norm" in note for note in get_training_report(ours).notes)
    check_final_losses(f"fused, {dtype}", train(ours, data, 300, dtype), train(model, data, 300, dtype))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_curves_of_losses_of_convnext_are_those_of_pytorch(dtype, seed, monkeypatch):
    """The same of ConvNeXt's blocks, also beside float32.

    The rate falls to 0. At a constant rate, the loss falls by 2 % in a step, and single steps decide about the last.
    """
    data = make_data(seed=seed)
    model = convnext.make_network(0.0, (32, 64), 10).cuda().to(memory_format=torch.channels_last)
    ours = fuse(copy.deepcopy(model), data[0][0], dtype, monkeypatch)
    assert any("layer norm" in note for note in get_training_report(ours).notes)
    networks = (ours, dtype), (copy.deepcopy(model), dtype), (model, torch.float32)
    found, wanted, exact = (train(network, data, 300, each, ADAMW, decay) for network, each in networks)
    check_final_losses(f"ConvNeXt, seed {seed}, {dtype}", found, wanted)
    check_final_losses(f"ConvNeXt, seed {seed}, {dtype} beside float32", found, exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_fused_graphs_are_those_of_float64_while_a_network_trains(dtype, monkeypatch):
    """The gradients of ConvNeXt's blocks at the start and after 40 steps: no error is larger than PyTorch's by much."""
    data = make_data()
    model = convnext.make_network(0.0, (32, 64), 10).cuda().to(memory_format=torch.channels_last)
    fused = fuse(model, data[0][0], dtype, monkeypatch)  # shares the parameters
    for x, _ in (data[0], data[1]):
        wanted = run_with_gradients(in_double(model), x.double())
        with torch.autocast("cuda", dtype):
            found, plain = run_with_gradients(fused, x), run_with_gradients(model, x)
        for number in range(len(wanted)):
            errors = [differ(each[number : number + 1], wanted[number : number + 1]) for each in (found, plain)]
            assert errors[0] < 2 * errors[1] + 2e-2, number
        train(model, data, 40, dtype, ADAMW)


def test_kernels_with_statistics_train_batch_norms_as_pytorch_does():
    """The kernels of all convolutions before batch normalizations return statistics, whatever the times are."""
    data = make_data(1)
    x = data[0][0]
    model = make_network()
    ours = optimize(copy.deepcopy(model), x, choose="tuned")
    report = get_training_report(ours)
    products = [line for line in report.lines if line.product == FORWARD_STATS]
    assert sum(line.implementation != "PyTorch" for line in products) >= 2, str(report)
    wanted = run_with_gradients(in_double(model), x.double())
    with torch.autocast("cuda", torch.float16):
        found = run_with_gradients(ours, x)
        run_with_gradients(model, x)
    assert differ(found, wanted, FLOOR) < 0.1
    for (name, one), other in zip(ours.named_buffers(), model.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=2e-3, atol=1e-3), name
    with torch.autocast("cuda", torch.float16):
        compiled = run_with_gradients(ours, x, torch.compile(ours, fullgraph=True))
    assert differ(compiled, wanted, FLOOR) < 0.1


@pytest.mark.parametrize("fused", [False, True])
def test_a_whole_step_is_captured_in_a_graph(fused, monkeypatch):
    monkeypatch.setattr("tvmconv.torch.kernels.MAX_CANDIDATES", 1)
    torch._dynamo.reset()
    data = make_data(1)
    x, y = data[0]
    model = make_network()
    ours = optimize(copy.deepcopy(model), x, choose="tuned", fused=fused)
    assert fused == any("5 batch normalizations" in note for note in get_training_report(ours).notes)
    wanted = train(copy.deepcopy(model), data, 8)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.02, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(ours(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        losses = [step().item() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(5):
        graph.replay()
        losses.append(loss.item())
    assert losses == pytest.approx(wanted, rel=3e-2)


def test_other_batches_deterministic_algorithms_and_channels_first_run():
    x = make_data(1)[0][0]
    model = make_network()
    ours = optimize(copy.deepcopy(model), x, choose="tuned")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for given in (x, x[:5], x.contiguous()):
            with torch.autocast("cuda", torch.float16):
                results = [run_with_gradients(ours, given) for _ in range(2)]
            assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
            assert differ(results[0], run_with_gradients(in_double(model), given.double()), FLOOR) < 0.1
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_models_have_the_gradients_of_pytorch():
    x = make_data(1)[0][0]
    model = make_network().eval()
    wanted = run_with_gradients(in_double(model), x.double())
    ours = optimize(copy.deepcopy(model), x, choose="tuned")
    by_backend = torch.compile(copy.deepcopy(model), backend=backend, options={"choose": "tuned"})
    with torch.autocast("cuda", torch.float16):
        assert differ(run_with_gradients(ours, x, torch.compile(ours, fullgraph=True)), wanted, FLOOR) < 0.1
        assert differ(run_with_gradients(by_backend._orig_mod, x, by_backend), wanted, FLOOR) < 0.1


def test_the_time_limit_is_obeyed_and_a_second_call_takes_the_log(tmp_path):
    x, log = make_data(1)[0][0], tmp_path / "train.jsonl"
    for limit in (20, None):
        started_at = time.monotonic()
        model = optimize(make_network(), x, seconds=limit, log=log)
        assert time.monotonic() - started_at < 20 * 1.15 + 5
    assert log.stat().st_size
    assert "tuned" in str(get_training_report(model))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the next test has more than one GPU")
def test_two_processes_on_one_gpu_have_the_losses_of_one(tmp_path):
    check_comparisons(distributed_training.compare(2, tmp_path, "cuda", distributed_training.CASES[:2]), 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_the_losses_of_one(tmp_path):
    """Fifty steps with NCCL."""
    check_comparisons(distributed_training.compare(2, tmp_path, "cuda"), 3)


def check_comparisons(comparisons, count):
    assert len(comparisons) == count
    for each in comparisons:
        assert each.num_kernels == each.num_kernels_of_several == 8, each.wrapper  # the first layer needs no dgrad
        assert each.learns
        assert each.is_equal, each.largest_difference
