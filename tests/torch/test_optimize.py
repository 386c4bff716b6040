"""A model's convolutions by our kernels, on the CPU through OpenCL: the same outputs, whatever is done to the model."""

import copy
import itertools
import json

import pytest
import small_models
import torch
from small_models import Model, NormAct, X, differ, optimized, runs, with_statistics
from torch.nn import Conv2d

import tvmconv.torch
from tvmconv.checksummed_file import read_checked, write_checked
from tvmconv.errors import Error, ModelError
from tvmconv.torch import operator
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.report import PYTORCH_NAME


def test_a_block_is_three_kernels_with_the_same_output(faster, block):
    assert differ(faster, block) < 1e-5
    assert [line.workload.partition("s1,")[2] for line in faster.report().lines] == [
        "p1,bias,relu",
        "p1,bias,add,relu",
        "p0,bias",
    ]
    assert all(runs(faster).values())
    assert "the whole model" in str(faster.report())
    assert faster.report().difference < 1e-5


def test_a_weight_that_two_convolutions_share_is_replaced_in_one():
    model = with_statistics(small_models.shared())
    ours, new = optimized(model), torch.nn.Parameter(torch.randn(4, 4, 3, 3), requires_grad=False)
    for each in (ours, model):
        each.first.weight = new
    kept = ours.second.weight.clone()
    assert differ(ours, model) < 1e-5
    assert torch.equal(ours.second.weight, kept)


def test_what_is_not_like_the_example_is_pytorch_s(faster, block):
    for x in (X[:1], X[..., :8], X.double()):
        model = block if x.dtype == torch.float32 else copy.deepcopy(block).double()
        ours = faster if x.dtype == torch.float32 else copy.deepcopy(faster).double()
        assert differ(ours, model, x) < 1e-6


def test_tensors_that_lie_otherwise_are_brought_to_the_layout(faster, block):
    for x in (X.contiguous(memory_format=torch.channels_last), X.transpose(2, 3).contiguous().transpose(2, 3)):
        assert differ(faster, block, x) < 1e-5


def test_an_input_that_is_expanded_is_taken():
    model = Model(
        lambda m, x: m.conv(x.expand(-1, 4, -1, -1)) + x[..., :1].expand(-1, 4, -1, 11), conv=Conv2d(4, 4, 3, padding=1)
    )
    ours = optimized(model, X[:, :1])
    assert ours.report().lines[0].workload.endswith("bias,add")
    assert all(runs(ours).values())
    assert differ(ours, model, X[:, :1]) < 1e-5


def test_a_sum_lies_as_in_the_model():
    def call(model, x):
        y = x + model.conv(x.contiguous(memory_format=torch.channels_last))
        return y.view(y.size(0), -1)

    model = Model(call, conv=Conv2d(4, 4, 1))
    ours = optimized(model)
    assert ours.report().lines[0].workload.endswith("nhwc,bias")
    assert differ(ours, model) < 1e-5


def test_a_residual_of_another_dtype_is_added_behind_the_kernel():
    def mixed(dtype):
        return Model(lambda m, x: m.conv(x) + x.to(dtype), conv=Conv2d(4, 4, 1))

    model = mixed(torch.half)
    ours = optimized(model)
    assert ours.report().lines[0].workload.endswith("p0,bias")
    assert differ(ours, model) > 0  # for it is our kernel
    with torch.autocast("cpu", torch.bfloat16):
        assert runs(optimized(mixed(torch.float32))) == {"conv": True}


def test_an_example_that_the_model_writes_to_stays_as_it_is():
    x = X.clone()
    ours = optimized(Model(lambda m, x: m.conv(x.sub_(0.5).mul_(2)), conv=Conv2d(4, 4, 1)), x)
    assert torch.equal(x, X)
    assert ours.report().difference < 1e-5


def test_channels_last_stays_so(block):
    last, x = (
        copy.deepcopy(block).to(memory_format=torch.channels_last),
        X.contiguous(memory_format=torch.channels_last),
    )
    model = optimized(last, x)
    assert all("nhwc" in line.workload for line in model.report().lines)
    assert differ(model, block, x) < 1e-5
    with torch.no_grad():
        assert model(x).stride() == block(x).stride()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rows", "note"),
    [
        (lambda y: y.flatten(1), "Inside the model, images are"),
        (lambda y: y.view(y.size(0), -1), "Images keep their memory format"),
    ],
)
def test_a_model_is_laid_out_anew_where_it_can_be(rows, note, monkeypatch):
    """A model that is no single graph; an image becomes rows, a parameter is of no convolution."""

    def call(model, x):
        y = model.conv(x) + model.place.view(-1).view(4, 9, 11)
        if y.sum() > 1e9:
            return x
        return rows(y) + model.other(y[:, :, None]).flatten(1)

    monkeypatch.setattr("tvmconv.torch.inference.choose_memory_format", lambda *_: "channels last")
    place = torch.nn.Parameter(torch.randn(1, 4, 9, 11))
    model = Model(call, conv=Conv2d(4, 4, 1), other=torch.nn.Conv3d(4, 4, 1), place=place)
    ours = optimized(model)
    assert ours.report().notes[0].startswith(note)
    assert ("nhwc" in ours.report().lines[0].workload) == note.startswith("Inside")
    assert differ(ours, model) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["undecided", "between", "shared", "scaled", "normalised"])
def test_models_of_all_kinds(name):
    model = with_statistics(getattr(small_models, name)())
    ours = optimized(model)
    assert all(runs(ours).values())
    assert differ(ours, model, X[:, :4]) < 1e-5
    assert list(ours.state_dict()) == list(model.state_dict())
    for each in (ours, model):
        each.load_state_dict({name: value * 1.5 for name, value in each.state_dict().items()})
    assert differ(ours, model) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: torch.nn.Conv1d(4, 6, 5, stride=2, padding=2), X[:, :, 0]),
        (lambda: Conv2d(4, 8, (3, 2), padding="same", groups=2), X),
        (lambda: torch.nn.Conv3d(4, 3, 2, dilation=(1, 2, 1), bias=False), X[:, :, None].repeat(1, 1, 3, 1, 1)),
    ],
)
def test_a_model_that_is_a_convolution(make, x):
    model = make().eval()
    ours = optimized(model, x)
    assert runs(ours) == {"(itself)": True}
    assert differ(ours, model, x) < 1e-5
    assert list(ours.state_dict()) == list(model.state_dict())


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [torch.jit.script, lambda part: torch.compile(part, backend="eager", fullgraph=True)])
def test_a_part_that_is_compiled_runs_as_it_is(how):
    part = torch.nn.Sequential(Conv2d(4, 4, 1), torch.nn.ReLU()).eval()
    model = torch.nn.Sequential(how(part), Conv2d(4, 4, 1)).eval()
    ours = optimized(model)
    assert runs(ours)["1"]
    assert differ(ours, model) < 1e-5


def computed():
    model = torch.nn.Sequential(Conv2d(4, 4, 1))
    torch.nn.utils.parametrizations.spectral_norm(model[0])
    return model


def hooked(where):
    model = torch.nn.Sequential(torch.nn.Sequential(Conv2d(4, 4, 1)), torch.nn.ReLU())
    module = model[0] if where == "around" else model[0][0]
    module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("make", "x", "why"),
    [
        (lambda: torch.nn.Sequential(Conv2d(4, 4, 1).double()), X.double(), "float64"),
        (lambda: hooked("it"), X, "hooks"),
        (lambda: hooked("around"), X, "hooks"),
        (computed, X, "its weight is computed by SpectralNorm"),
        (lambda: torch.nn.Sequential(Conv2d(4, 4, 1)), X[0], "no batch axis"),
    ],
)
def test_what_our_kernels_cannot_do_is_pytorch_s_with_the_reason(make, x, why):
    model = make().eval()
    ours = optimized(model, x)
    (line,) = ours.report().lines
    assert why in line.reason
    assert line.implementation == PYTORCH_NAME
    assert differ(ours, model, x) == 0


def keeping_a_result():
    model = Conv2d(4, 4, 1)
    model.kept = model(X)
    return model


@pytest.mark.parametrize(
    ("model", "example", "error"),
    [
        (lambda x: x, X, "expected a torch.nn.Module"),
        (Conv2d(4, 4, 1, device="meta"), X, "are on cpu, meta"),
        (Conv2d(4, 4, 1, device="meta"), X.to("meta"), "is on meta"),
        (Conv2d(3, 4, 1), X, "does not run on the example"),
        (torch.jit.script(Conv2d(4, 4, 1)), X, "cannot be optimized"),
        (keeping_a_result(), X, "cannot be copied: RuntimeError: Only Tensors created explicitly"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(model, example, error):
    with pytest.raises(ModelError, match=error) as raised:
        tvmconv.torch.optimize(model, example)
    assert "\n" not in str(raised.value)


def test_a_log_that_cannot_be_used_is_an_error(tmp_path):
    model = Conv2d(4, 4, 1)
    with pytest.raises(Error, match="typo"):
        optimized(model, log=tmp_path / "typo.jsonl")
    with pytest.raises(Error, match="folder"):
        optimized(model, log=tmp_path / "folder" / "log.jsonl", seconds=1)


@pytest.fixture
def few_trials(shared_processes, monkeypatch):
    """Searches end after a few trials, and not by the time, which a busy machine may need to start."""
    monkeypatch.setattr("tvmconv.torch.product_search.PATIENCE", 3)
    monkeypatch.setattr("tvmconv.torch.layer_search.NUM_FIRST_TRIALS", 3)


def test_the_next_run_takes_kernels_from_the_log_without_builds(tmp_path, monkeypatch, few_trials):
    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path / "kept"))
    model, log, lines = Conv2d(4, 8, 3), tmp_path / "log.jsonl", []
    optimized(model, seconds=300, log=log, progress=lines.append)
    records = log.read_text()
    assert records.count("\n") > 2
    assert any("configs" in line for line in lines)
    monkeypatch.setattr("tvmconv.torch.kernels.build_all", lambda choices, *_, **__: [] if not choices else 1 / 0)
    monkeypatch.setattr("tvmconv.torch.timing.time_call", lambda *_: 1 / 0)
    again = optimized(model, seconds=300, log=log)
    assert log.read_text() == records
    assert [line.config_source for line in again.report().lines] == ["tuned"]
    assert differ(again, model) < 1e-5


def test_kept_times_are_of_one_model_alone(tmp_path, monkeypatch):
    def repeating(count):
        def call(model, x):
            for _ in range(count):
                x = torch.tanh(x)
            return model.conv(x)

        return Model(call, conv=Conv2d(4, 4, 1))

    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path))
    count = itertools.count(1)
    monkeypatch.setattr("tvmconv.torch.timing.time_call", lambda *_: float(next(count)))
    befores = [optimized(repeating(times)).report().pytorch_seconds for times in (1, 2, 1)]
    assert befores[0] == befores[2] != befores[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("time", ["null", "NaN", "-1", '"1"', "0"])
def test_kept_times_that_are_none_are_taken_again(time, tmp_path, monkeypatch):
    monkeypatch.setenv("TVMCONV_CACHE", str(tmp_path))
    monkeypatch.setattr("tvmconv.torch.timing.time_call", lambda *_: 0.25)
    model = Conv2d(4, 4, 1).eval()
    optimized(model)
    (file,) = tmp_path.glob("times-*.json")
    names = json.loads(read_checked(file))
    write_checked(file, ("{" + ", ".join(f"{json.dumps(name)}: {time}" for name in names) + "}").encode())
    assert optimized(model).report().pytorch_seconds == 0.25


def test_by_default_what_is_faster_runs(block):
    model = tvmconv.torch.optimize(block, X)
    report = model.report()
    left = any("PyTorch runs all layers" in note for note in report.notes)  # for the whole took longer after all
    for line in report.lines:
        assert (line.implementation != PYTORCH_NAME) == (line.tvmconv_seconds < line.pytorch_seconds and not left)
    assert report.tvmconv_seconds <= report.pytorch_seconds


def test_models_of_one_workload_have_kernels_of_their_own(monkeypatch):
    model, other = Conv2d(4, 4, 3).eval(), Conv2d(4, 4, 3).eval()
    first = optimized(model)
    launcher_of = AvailableKernel.launcher.func
    wrong = property(lambda kernel: lambda *tensors: launcher_of(kernel)(*tensors) * 2)
    monkeypatch.setattr(AvailableKernel, "launcher", wrong)
    monkeypatch.setattr(AvailableKernel, "digest", "another")
    assert runs(optimized(other)) == {"(itself)": False}
    assert differ(first, model) < 1e-5
    with pytest.raises(Error, match=r"no kernel for .*#another"):
        operator.find_launcher(f"{first.report().lines[0].workload}#another", X.device)


def test_functional_norm_and_leaky_relu_run_in_the_kernel():
    model = with_statistics(torch.nn.Sequential(Conv2d(4, 4, 3, padding=1), NormAct(4, torch.nn.LeakyReLU(0.1))))
    ours = optimized(model)
    (line,) = ours.report().lines
    assert line.workload.endswith(",bias,leaky_relu0.1")
    assert all(runs(ours).values())
    assert differ(ours, model) < 1e-5
    for each in (ours, model):
        getattr(each, "1").running_mean.add_(1.0)
    assert differ(copy.deepcopy(ours), model) < 1e-5  # the weight is packed anew, in a copy too


def test_the_report_names_what_no_kernel_does():
    ours = optimized(torch.nn.Sequential(Conv2d(4, 4, 3, padding=1), torch.nn.Softplus(2)).eval())
    assert "followed by Softplus, which no kernel does" in str(ours.report())
