"""Layouts inside a model are the cheapest ones, and its results are as PyTorch returns them."""

import pytest
import torch
from small_models import Model, X, differ, optimized
from torch import nn

from tvmconv import devices
from tvmconv.logs.ranking import RecordIndex
from tvmconv.logs.record import Record
from tvmconv.torch.fusion import match_convolutions
from tvmconv.torch.layout_plan import LayoutCosts, LayoutPlanner
from tvmconv.torch.layout_recorder import LayoutRecorder
from tvmconv.torch.partition import partition_model, record_calls
from tvmconv.workloads import parse

MIXED = {"nchw": 10e-6, "nchw-nhwc": 5e-6, "nhwc-nchw": 5e-6, "nhwc": 1e-6}
CONVERTED = {**MIXED, "nchw-nhwc": 30e-6, "nhwc-nchw": 30e-6}


def conv(channels=4, outputs=4, size=3):
    return nn.Conv2d(channels, outputs, size, padding=size // 2)


@pytest.fixture
def costs(monkeypatch):
    """Lets kernels take these seconds by layout, and conversions 6 µs."""

    def set_costs(seconds):
        class FixedCosts(LayoutCosts):
            def kernel_seconds(self, text):
                return seconds

            def conversion_seconds(self, nbytes):
                return 6e-6

        monkeypatch.setattr("tvmconv.torch.inference.LayoutCosts", FixedCosts)

    return set_costs


def layouts(model):
    return [parse(line.workload).layout for line in model.report().lines]


def check(ours, model, x=X):
    assert differ(ours, model, x) < 1e-5
    with torch.no_grad():
        for given in (x, x[:1]):
            assert ours(given).stride() == model(given).stride()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("seconds", "expected", "note"),
    [
        (MIXED, ["nchw-nhwc", "nhwc", "nhwc", "nhwc-nchw"], "layouts change in 2 kernels."),
        (CONVERTED, ["nhwc"] * 4, "layouts change in 2 conversions."),
    ],
)
def test_a_chain_is_channels_last_between_its_ends(costs, seconds, expected, note):
    costs(seconds)
    model = nn.Sequential(conv(), nn.SELU(), conv(), nn.MaxPool2d(2), nn.BatchNorm2d(4), conv(), nn.ReLU(), conv(4, 6))
    ours = optimized(model)
    assert layouts(ours) == expected
    assert ours.report().notes[0].endswith(note)
    check(ours, model)


def test_a_short_chain_stays_as_it_is(costs):
    costs(CONVERTED)
    model = nn.Sequential(conv(), nn.ReLU())
    ours = optimized(model)
    assert layouts(ours) == ["nchw"]
    assert "restore_strides" not in ours.graph.code
    check(ours, model)


def test_a_residual_and_its_sum_have_one_layout(costs):
    costs(MIXED)
    model = Model(
        lambda m, x: m.last(torch.relu(m.second(m.first(x)) + m.shortcut(x))),
        **{name: conv() for name in ("first", "second", "shortcut", "last")},
    )
    ours = optimized(model)
    assert set(layouts(ours)) == {"nhwc", "nhwc-nchw"}
    assert ours.graph.code.count("convert_images(") == 1  # of the input, which two kernels read
    check(ours, model)


def test_a_view_between_two_chains_keeps_its_layout(costs):
    costs(MIXED)

    def call(model, x):
        y = model.first(x)
        return model.last(y.view(-1, 2, 2, 9, 11).transpose(1, 2).reshape(-1, 4, 9, 11))

    model = Model(call, first=nn.Sequential(conv(), conv(), conv()), last=nn.Sequential(conv(), conv(), conv()))
    ours = optimized(model)
    assert layouts(ours) == ["nchw-nhwc", "nhwc", "nhwc-nchw"] * 2
    check(ours, model)


def test_a_write_to_a_part_of_an_image_reaches_the_image(costs):
    costs(MIXED)

    def call(model, x):
        y = model.first(x)
        first, _ = y.chunk(2, 1)
        first.mul_(3).add_(1)
        return model.last(torch.cat([y, x], 1))

    model = Model(call, first=nn.Sequential(conv(), conv()), last=nn.Sequential(conv(8), conv()))
    check(optimized(model), model)


def test_signals_are_channels_last_inside_too(costs):
    costs(MIXED)
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.SELU(), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 4, 1))
    ours = optimized(model, X[:, :, 0])
    assert layouts(ours) == ["nchw-nhwc", "nhwc", "nhwc-nchw"]
    check(ours, model, X[:, :, 0])


def test_a_result_of_one_pixel_has_the_strides_of_pytorch(costs):
    costs(MIXED)
    model = nn.Sequential(conv(), conv(), nn.AdaptiveAvgPool2d(1), conv(4, 6, 1))
    ours = optimized(model)
    assert layouts(ours)[0] == "nchw-nhwc"
    check(ours, model)


@pytest.mark.parametrize(("dtype", "inside"), [(torch.bfloat16, "nhwc"), (torch.float32, "nchw")])
def test_estimates_for_a_gpu_choose_channels_last_for_tensor_cores(dtype, inside):
    """The stem reads images as they are; the classifier reads one pixel, which has both layouts."""
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), conv(64, 64), conv(64, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).to(dtype).eval()  # fmt: skip
    x = torch.randn(1, 3, 64, 64, dtype=dtype)
    with torch.no_grad():
        with record_calls(model) as calls:
            model(x)
        traced, partitions = partition_model(model, calls, (x,))
        planner = LayoutPlanner(LayoutCosts(devices.find_device("sm_90")))
        sites = match_convolutions(traced, partitions, (x,), planner)
    first, *others = [parse(site.workload_text).layout for site in sites]
    assert others == [inside] * 2
    assert first == ("nchw-nhwc" if inside == "nhwc" else "nchw")


def test_a_measured_time_replaces_an_estimate(tmp_path):
    device, text = devices.find_device("sm_90"), "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16"
    estimates = LayoutCosts(device).kernel_seconds(text)
    assert estimates["nhwc"] < estimates["nhwc-nchw"] < estimates["nchw"]
    record = Record(parse(text), "tensor_core", {}, device.name, "cuda -arch=sm_90", times=(1e-6,))
    (tmp_path / "log.jsonl").write_text(record.line() + "\n")
    costs = LayoutCosts(device, RecordIndex([tmp_path / "log.jsonl"]))
    assert costs.kernel_seconds(f"{text},nhwc-nchw")["nchw"] == 1e-6


def test_a_conversion_serves_all_readers(costs):
    """A copy is channels first whatever it copies; three residual branches read it."""
    costs(CONVERTED)

    def call(model, x):
        y = x.clone(memory_format=torch.contiguous_format)
        y = sum(branch(nn.functional.silu(y)) + y for branch in model.branches)
        return y.clone(memory_format=torch.contiguous_format)

    branches = nn.ModuleList(nn.Sequential(*(nn.Conv1d(4, 4, 3, padding=1) for _ in range(4))) for _ in range(3))
    model = Model(call, branches=branches)
    ours = optimized(model, X[:, :, 0])
    assert set(layouts(ours)) == {"nhwc"}
    assert ours.graph.code.count("convert_images(") == 2
    check(ours, model, X[:, :, 0])


def test_views_are_not_timed():
    def call(model, x):
        first, second = model.first(x).chunk(2, 1)
        return model.last(torch.cat([first.relu(), second.mul_(2)], 1))

    graph = torch.fx.symbolic_trace(Model(call, first=conv(), last=conv()))
    recorder = LayoutRecorder(graph, {4})
    with torch.no_grad():
        recorder.run(X)
    names = []
    recorder.time_nodes(graph.graph.nodes, lambda name, call: names.append(name) or 1e-6, lambda: True)
    functions = {name.partition(": ")[2].split()[0] for name in names}
    assert functions == {"relu", "mul_", "cat"}
