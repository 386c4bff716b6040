"""PyTorch modules: imported from files that are written here, and run."""

import sys

import pytest

from tvmconv.errors import ModelError
from tvmconv.models.input_spec import InputSpec
from tvmconv.models.model_layers import derive_layers
from tvmconv.workloads import suite
from tvmconv.workloads.suites import SuiteVariant, apply_variant, merge_equal_layers

torch = pytest.importorskip("torch")

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
"""


@pytest.fixture
def derived(tmp_path, monkeypatch):
    """What is derived from `model` in a module of this source."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def of(source, *inputs, name="model", training=False):
        (tmp_path / "mine.py").write_text(HEAD + source)
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        return derive_layers(f"mine:{name}", [InputSpec.parse(each) for each in inputs], training=training)

    yield of
    sys.modules.pop("mine", None)


@pytest.fixture
def layers(derived):
    """Name and text of each convolution, none of which is left out."""

    def of(source, *inputs):
        found = derived(source, *(inputs or ("1x3x8x8",)))
        assert found.skipped_layers == ()
        return [(layer.name, layer.workload.text) for layer in found.layers]

    return of


def forward(*lines, parts="c=nn.Conv2d(3, 4, 3)"):
    """The source of a module whose forward pass has these lines."""
    body = "".join(f"\n        {line}" for line in lines)
    return f"""
class model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, part in dict({parts}).items():
            setattr(self, name, part)

    def forward(self, x):{body}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("nn.Conv2d(3, 4, 3, 2, 1, bias=False)", "conv2d:1x3x8x8,4x3x3x3,s2,p1"),
        ("nn.Conv2d(3, 6, (3, 1), padding=(2, 0), dilation=2, groups=3)", "conv2d:1x3x8x8,6x1x3x1,s1,p2x0,d2,g3,bias"),
        ("nn.Conv2d(3, 4, 3, padding='same')", "conv2d:1x3x8x8,4x3x3x3,s1,p1,bias"),
        ("nn.Conv2d(3, 4, 2, padding='same')", "conv2d:1x3x9x9,4x3x2x2,s1,p0,bias"),  # PyTorch pads one side itself
        ("nn.Conv2d(3, 4, 3, padding=1, padding_mode='reflect')", "conv2d:1x3x10x10,4x3x3x3,s1,p0,bias"),
        ("nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 4, 5))", "conv1d:1x3x64,4x3x5,s1,p0,bias"),
        ("nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, 3))", "conv3d:1x1x3x8x8,4x1x3x3x3,s1,p0,bias"),
        ("nn.ConvTranspose2d(3, 4, 3, 2, 1)", "conv2d_transpose:1x3x8x8,3x4x3x3,s2,p1,bias"),
        ("nn.ConvTranspose2d(3, 6, 4, 2, 1, 1, 3)", "conv2d_transpose:1x3x8x8,3x2x4x4,s2,p1,g3,op1,bias"),
        ("nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)", "conv2d:1x3x8x8,4x3x3x3,s1,p0,bias"),
    ],
)
def test_convolutions_are_as_they_are_executed(layers, source, text):
    assert [found for _, found in layers(f"model = {source}")] == [text]


EPILOGUES = {
    "relu in place": (["y = self.c(x)", "return F.relu(y, inplace=True)"], "bias,relu"),
    "clamp from 0": (["return self.c(x).clamp(min=0)"], "bias,relu"),
    "hardtanh, 0 to 1": (["return F.hardtanh(self.c(x), 0)"], "bias,clamp"),
    "relu6": (["return F.relu6(self.c(x))"], "bias,relu6"),
    "hardswish": (["return F.hardswish(self.c(x))"], "bias,hardswish"),
    "hardsigmoid": (["return F.hardsigmoid(self.c(x))"], "bias,hardsigmoid"),
    "silu": (["return F.silu(self.c(x))"], "bias,silu"),
    "silu, written out": (["y = self.c(x)", "return y * torch.sigmoid(y)"], "bias,silu"),
    "gelu": (["return F.gelu(self.c(x))"], "bias,gelu"),
    "gelu by tanh": (["return F.gelu(self.c(x), approximate='tanh')"], "bias,gelu_tanh"),
    "leaky relu": (["return F.leaky_relu(self.c(x))"], "bias,leaky_relu"),
    "leaky relu of YOLO": (["return F.leaky_relu(self.c(x), 0.1)"], "bias,leaky_relu0.1"),
    "leaky relu of another slope": (["return F.leaky_relu(self.c(x), 0.3)"], "bias"),
    "elu": (["return F.elu(self.c(x))"], "bias,elu"),
    "softplus": (["return F.softplus(self.c(x))"], "bias,softplus"),
    "mish": (["return F.mish(self.c(x))"], "bias,mish"),
    "tanh": (["return torch.tanh(self.c(x))"], "bias,tanh"),
    "gelu, written out": (["y = self.c(x)", "return 0.5 * y * (1 + torch.erf(y / 2**0.5))"], "bias,gelu"),
    "one minus": (["return F.relu(1 - self.c(x))"], "bias"),
    "normalised": (["return F.relu(self.n(self.c(x)))"], "bias,relu"),
    "normalised by its images": (["self.n.train()", "return F.relu(self.n(self.c(x)))"], "bias"),
    "residual": (["r = F.avg_pool2d(self.d(x), 1)", "return F.relu(self.c(x) + r)"], "bias,add,relu"),
    "residual in place": (["r = F.avg_pool2d(self.d(x), 1)", "r += self.c(x)", "return r"], "bias,add"),
    "residual of two": (["r = F.avg_pool2d(self.d(x), 1)", "return torch.add(self.c(x), r, alpha=2)"], "bias"),
    "dropout": (["return F.relu(F.dropout(self.c(x), 0.5, self.training))"], "bias,relu"),
    "channels last": (["return F.relu(self.c(x).contiguous(memory_format=torch.channels_last))"], "bias,relu"),
    "another dtype": (["return F.relu(self.c(x).double())"], "bias"),
    "given as well": (["y = self.c(x)", "return y, F.relu(y)"], "bias"),
    "kept": (["self.kept = self.c(x)", "return F.relu(self.kept)"], "bias"),
    "its elements are asked for": (["y = self.c(x)", "return F.relu(y) if y.sum() < 1 else y"], "bias"),
    "in inference mode": (["with torch.inference_mode():", "    return F.relu(self.n(self.c(x)))"], "bias,relu"),
    "a part of it in place": (["y = self.c(x)", "y[:, 0].relu_()", "return F.relu(y)"], "bias"),
}


@pytest.mark.parametrize(("lines", "epilogue"), EPILOGUES.values(), ids=EPILOGUES)
def test_what_follows_is_the_epilogue(layers, lines, epilogue):
    parts = "c=nn.Conv2d(3, 4, 3), d=nn.Conv2d(3, 4, 3), n=nn.BatchNorm2d(4)"
    assert dict(layers(forward(*lines, parts=parts)))["c"] == f"conv2d:1x3x8x8,4x3x3x3,s1,p0,{epilogue}"


def test_names_are_the_modules_and_each_is_there_once(layers):
    source = forward(
        "y = self.s(self.s(x))", "return F.conv2d(y, self.s[0].weight)", parts="s=nn.Sequential(nn.Conv2d(3, 3, 1))"
    )
    assert [name for name, _ in layers(source)] == ["s.0", "s.0#2", "conv"]


def test_a_function_a_class_and_a_module_give_modules(layers):
    sources = ["model = nn.Conv2d(3, 4, 3)", "def model():\n    return nn.Conv2d(3, 4, 3)", forward("return self.c(x)")]
    assert len({tuple(text for _, text in layers(source)) for source in sources}) == 1


def test_inputs_are_given_in_order_and_by_name(layers):
    source = """
class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.c = nn.Embedding(10, 4), nn.Conv2d(3, 4, 3)

    def forward(self, x, *, tokens):
        return self.c(x) + self.e(tokens).sum()
"""
    assert layers(source, "tokens=2x5,i64", "2x3x8x8") == [("c", "conv2d:2x3x8x8,4x3x3x3,s1,p0,bias")]


def test_a_large_model_costs_nothing(layers):
    source = "def model():\n    return nn.Sequential(*(nn.Conv2d(1 << 14, 1 << 14, 1) for _ in range(100)))"  # 100 GiB
    assert len(layers(source, "8x16384x64x32")) == 100


def test_a_module_of_torchscript_is_run_as_a_whole(layers):
    source = "model = nn.Sequential(nn.Identity(), torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())))"
    assert layers(source) == [("conv", "conv2d:1x3x8x8,4x3x3x3,s1,p0,bias,relu")]


def test_what_is_no_workload_is_left_out_and_why(derived):
    parts = "c=nn.Conv2d(3, 4, 3), d=nn.Conv2d(4, 4, 1).double()"
    found = derived(forward("return self.d(self.c(x).double())", parts=parts), "1x3x8x8")
    assert [layer.name for layer in found.layers] == ["c"]
    (double,) = found.skipped_layers
    assert double.startswith("d: dtype='float64': expected one of")


@pytest.mark.parametrize(
    ("source", "inputs", "said"),
    [
        ("model = nn.Conv2d(3, 4, 3)", [], "mine:model: a PyTorch module needs --input, such as --input 1x3x224x224"),
        ("1 / 0", ["1x3x8x8"], "mine:model: ZeroDivisionError: division by zero"),
        ("import nowhere", ["1x3x8x8"], "mine:model: ModuleNotFoundError: No module named 'nowhere'"),
        ("", ["1x3x8x8"], "mine:model: AttributeError: module 'mine' has no attribute 'model'"),
        ("def model():\n    raise KeyError", ["1x3x8x8"], "mine:model: KeyError"),
        ("def model():\n    raise SystemExit(3)", ["1x3x8x8"], "mine:model: SystemExit: 3"),
        ("def model():\n    return 7", ["1x3x8x8"], "mine:model returned int, expected a torch.nn.Module"),
        ("model = 7", ["1x3x8x8"], "mine:model: TypeError: 'int' object is not callable"),
        ("model = nn.Conv2d(3, 4, 3)", ["1x4x8x8"], "mine:model on 1x4x8x8: RuntimeError: Given groups=1"),
        ("model = nn.Conv2d(3, 4, 3)", ["y=1x3x8x8"], "mine:model on y=1x3x8x8: TypeError: "),
    ],
)
def test_what_does_not_run_is_refused_with_what_python_says(derived, source, inputs, said):
    with pytest.raises(ModelError) as caught:
        derived(source, *inputs)
    assert str(caught.value).startswith(said)


BOTTLENECKS = """
class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Identity()
        if channels != 4 * width:
            shortcut = nn.Conv2d(channels, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y)

def model():
    blocks, channels = [], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for block in range(count):
            blocks.append(Bottleneck(channels, 64 << stage, 2 if stage and not block else 1))
            channels = 256 << stage
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
"""


def test_resnet50_is_the_suite_that_is_built_in(derived):
    found = derived(BOTTLENECKS, "1x3x224x224")
    bare = merge_equal_layers(apply_variant(found.layers, SuiteVariant(epilogue=())))
    assert {layer.workload: layer.count for layer in bare} == {each.workload: each.count for each in suite("resnet50")}
    counted = [layer.workload.epilogue for layer in found.layers]
    names = {("bias", "relu"): 33, ("bias", "add", "relu"): 16, ("bias",): 4}
    assert {each: counted.count(each) for each in counted} == names


def test_a_training_step_has_the_gradients_that_parameters_need(derived):
    parts = (
        "a=nn.Conv2d(3, 8, 3), n=nn.BatchNorm2d(8), t=nn.ConvTranspose2d(8, 4, 2, 2), f=nn.Conv2d(4, 4, 1), "
        "w=nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), mean=nn.Parameter(torch.zeros(3, 1, 1), False)"
    )
    lines = ["self.f.requires_grad_(False)", "x = x - self.mean"]
    lines += ["return self.f(self.t(F.relu(self.n(self.a(x))))), self.w(x)"]
    found = derived(forward(*lines, parts=parts), "2x3x8x8", training=True)
    assert [(layer.name, layer.workload.text) for layer in found.layers] == [
        ("a", "conv2d:2x3x8x8,8x3x3x3,s1,p0,bias"),
        ("a wgrad", "conv2d_wgrad:2x3x8x8,8x3x3x3,s1,p0"),
        ("t", "conv2d_transpose:2x8x6x6,8x4x2x2,s2,p0,bias"),
        ("t dgrad", "conv2d:2x4x12x12,8x4x2x2,s2,p0"),
        ("t wgrad", "conv2d_wgrad:2x4x12x12,8x4x2x2,s2,p0"),
        ("f", "conv2d:2x4x12x12,4x4x1x1,s1,p0,bias"),
        ("f dgrad", "conv2d_dgrad:2x4x12x12,4x4x1x1,s1,p0"),
        ("w", "conv2d:2x3x8x8,4x3x1x1,s1,p0,bias"),
        ("w wgrad", "conv2d_wgrad:2x3x8x8,4x3x1x1,s1,p0"),
    ]
