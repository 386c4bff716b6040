"""The same on an NVIDIA GPU: streams, captured graphs, `torch.compile`, dtypes and layouts."""

import copy
import threading

import pytest
import torch
from small_models import Block, undecided, with_statistics

import tvmconv as tc
import tvmconv.torch
from tvmconv.torch import operator
from tvmconv.torch.backend import backend
from tvmconv.torch.launch import make_launcher
from tvmconv.torch.operator import conv
from tvmconv.torch.signature import parse_signature

pytestmark = pytest.mark.gpu

CASES = {
    "f32": (torch.float32, torch.contiguous_format, 1e-5),
    "tf32": (torch.float32, torch.channels_last, 5e-3),
    "f16": (torch.float16, torch.channels_last, 5e-3),
    "bf16": (torch.bfloat16, torch.channels_last, 4e-2),
}


@pytest.fixture(params=CASES)
def case(request):
    """A block of 16 bits or 32 on the GPU, its input, our block, and what outputs may differ by."""
    dtype, layout, tolerance = CASES[request.param]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = request.param == "tf32"
    block = with_statistics(Block()).to("cuda:0", dtype).to(memory_format=layout)
    x = torch.randn(2, 4, 30, 34, device="cuda:0", dtype=dtype).contiguous(memory_format=layout)
    yield block, x, tvmconv.torch.optimize(block, x, choose="tuned"), tolerance
    torch.backends.cudnn.allow_tf32 = before


def differ(y, wanted):
    assert y.shape == wanted.shape
    assert y.dtype == wanted.dtype
    return float((y.double() - wanted.double()).norm() / wanted.double().norm())


@torch.inference_mode()
def test_outputs_are_those_of_pytorch(case):
    block, x, faster, tolerance = case
    assert {line.implementation for line in faster.report().lines} != {"PyTorch"}
    for given in (x, torch.randn_like(x), x.contiguous(), x[:1]):
        assert differ(faster(given), block(given)) < tolerance


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "given"), [(torch.float32, torch.channels_last), (torch.half, torch.preserve_format)]
)
def test_a_model_in_the_slower_memory_format_is_laid_out_anew(dtype, given):
    """And gives what it gave, as it gave it."""
    block = with_statistics(Block()).to("cuda:0", dtype).to(memory_format=given)
    x = torch.randn(2, 4, 30, 34, device="cuda:0", dtype=dtype).contiguous(memory_format=torch.contiguous_format)
    x = x.contiguous(memory_format=given) if given is torch.channels_last else x
    tf32, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    faster = tvmconv.torch.optimize(block, x, choose="tuned")
    torch.backends.cudnn.allow_tf32 = tf32
    own_layout = "nchw" if dtype is torch.half else "nhwc"
    assert any("Inside the model, images are" in note for note in faster.report().notes)
    assert {tc.parse(line.workload).layout for line in faster.report().lines} != {own_layout}
    assert differ(faster(x), block(x)) < 5e-3
    assert faster(x).stride() == block(x).stride()


@torch.inference_mode()
def test_a_model_that_waits_for_the_gpu_runs_too():
    model = with_statistics(undecided()).cuda().half().to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 30, 34, device="cuda:0", dtype=torch.half).contiguous(memory_format=torch.channels_last)
    assert differ(tvmconv.torch.optimize(model, x, choose="tuned")(x), model(x)) < 5e-3


class Waiting(torch.nn.Conv2d):
    """Waits for the GPU in a way that PyTorch does not see, which ends a capture."""

    def forward(self, x):
        y = super().forward(x)
        torch.cuda.synchronize()
        return y


@torch.inference_mode()
def test_a_capture_that_fails_leaves_nothing_behind():
    model = torch.nn.Sequential(Waiting(4, 8, 3), torch.nn.Conv2d(8, 8, 3)).cuda().eval()
    x = torch.randn(2, 4, 30, 34, device="cuda:0")
    assert differ(tvmconv.torch.optimize(model, x, choose="tuned")(x), model(x)) < 5e-3
    assert torch.randn(8, device="cuda:0").isfinite().all()
    assert differ(tvmconv.torch.optimize(model, x, choose="tuned")(x), model(x)) < 5e-3


@torch.inference_mode()
def test_autocast_runs_by_kernels_of_its_dtype():
    block = with_statistics(Block()).cuda()
    x = torch.randn(2, 4, 30, 34, device="cuda:0")
    with torch.autocast("cuda", torch.float16):
        faster = tvmconv.torch.optimize(block, x, choose="tuned")
        assert all(",f16" in line.workload and line.implementation != "PyTorch" for line in faster.report().lines)
        assert differ(faster(x), block(x)) < 5e-3
    assert differ(faster(x), block(x)) < 5e-3  # by PyTorch, in float32


@torch.inference_mode()
def test_several_streams_at_once():
    block = with_statistics(Block()).cuda().half().to(memory_format=torch.channels_last)
    xs = [torch.randn(2, 4, 30, 34, device="cuda:0", dtype=torch.half).contiguous(memory_format=torch.channels_last)]
    xs += [torch.randn_like(xs[0]) for _ in range(3)]
    faster, wanted = tvmconv.torch.optimize(block, xs[0], choose="tuned"), [block(x) for x in xs]
    streams, found = [torch.cuda.Stream() for _ in xs], [[] for _ in xs]

    def work(number):
        with torch.inference_mode(), torch.cuda.stream(streams[number]):
            streams[number].wait_stream(torch.cuda.default_stream())
            for _ in range(50):
                found[number].append(faster(xs[number]))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert all(differ(y, one) < 5e-3 for several, one in zip(found, wanted, strict=True) for y in several)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
@torch.inference_mode()
def test_another_gpu_than_the_current_one():
    block = with_statistics(Block()).to("cuda:1", torch.half).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 30, 34, device="cuda:1", dtype=torch.half).contiguous(memory_format=torch.channels_last)
    faster = tvmconv.torch.optimize(block, x, choose="tuned")
    assert torch.cuda.current_device() == 0
    assert differ(faster(x), block(x)) < 5e-3
    elsewhere = copy.deepcopy(faster).to("cuda:0")  # whose kernels are not there: by PyTorch
    assert differ(elsewhere(x.to("cuda:0")), block(x).to("cuda:0")) < 5e-3


@torch.inference_mode()
def test_it_works_on_the_current_stream_and_in_a_captured_graph(case):
    block, x, faster, tolerance = case
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = faster(x)
    stream.synchronize()
    assert differ(y, block(x)) < tolerance
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = faster(x)
    x.normal_()
    y.zero_()
    graph.replay()
    assert differ(y, block(x)) < tolerance


@torch.no_grad()
@pytest.mark.parametrize("by_backend", [False, True])
def test_it_compiles_and_sees_weights_that_change(case, by_backend):
    block, x, faster, tolerance = case
    torch._dynamo.reset()
    other = copy.deepcopy(block)
    model = block if by_backend else faster
    options = {"backend": backend, "options": {"choose": "tuned"}} if by_backend else {"fullgraph": True}
    compiled = torch.compile(model, **options)
    assert differ(compiled(x), other(x)) < tolerance
    for each in (model, other):
        each.conv1.weight.mul_(2)
        each.bn2.running_mean.add_(1)
    assert differ(compiled(x), other(x)) < tolerance


def test_a_model_is_saved_and_loaded(case, tmp_path):
    block, x, faster, tolerance = case
    faster.save(tmp_path / "block.tvmconv")
    with torch.no_grad():
        assert differ(tvmconv.torch.load(tmp_path / "block.tvmconv")(x), block(x)) < tolerance


def test_it_is_an_operator_as_pytorch_wants_it(case):
    _, x, faster, _ = case
    module = next(module for module in faster.graph.modules() if getattr(module, "kernels", None))
    (text,) = set(module.kernels.values())
    given = x if module.conv.in_channels == 4 else torch.randn(2, 8, 30, 34, device=x.device, dtype=x.dtype)
    add = torch.randn(2, 8, 30, 34, device=x.device, dtype=x.dtype) if "add" in module.epilogue_names else None
    results = torch.library.opcheck(conv, (given, module.weight0, module.bias0, add, text))
    assert set(results.values()) == {"SUCCESS"}


@torch.inference_mode(False)
@torch.no_grad()
def test_a_packed_weight_is_made_again_after_a_write(monkeypatch):
    """Of a weight that nobody keeps, with every call."""
    workload = tc.parse("conv2d:2x24x13x17,20x24x3x3,s1,p1")
    kernel = tc.build(workload, "winograd", device="cuda:0")
    launch = make_launcher(parse_signature(workload.text), kernel.executable, kernel.device, torch.device("cuda:0"))
    launched = []
    queue = launch._enqueue
    monkeypatch.setattr(
        launch, "_enqueue", lambda steps, pointers: (launched.append(len(steps)), queue(steps, pointers))
    )
    x, weight = torch.randn(2, 24, 13, 17, device="cuda:0"), torch.randn(20, 24, 3, 3, device="cuda:0")

    def wanted():
        return torch.nn.functional.conv2d(x.double(), weight.double(), padding=1).float()

    def check():
        assert differ(launch(x, weight, None, None), wanted()) < 1e-5

    check()
    assert launched == [4]
    operator.register_weight_refresh(weight, lambda: None)
    check()
    check()
    weight.mul_(-2)
    check()
    assert launched == [4, 1, 3, 3, 1, 3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(x, weight, None, None)
    assert launched[6:] == [3]
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert differ(y, wanted()) < 1e-5
