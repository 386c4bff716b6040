"""Sweeps are read from files of any version, and tell how long they will take."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_results import make_result, make_row

from tvmconv.devices import Arch
from tvmconv.experiments.sweep import LayerSelection, Sweep, measure_sweep, select_layers
from tvmconv.reports.sweep import format_markdown
from tvmconv.workloads import Layer, parse
from tvmconv.workloads.suites import SuiteVariant

SHIPPED = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200"


@pytest.mark.parametrize(
    "name", ["d2l/d2l", "d2l/d2l-tuned", "resnet50/resnet50-3x3", "mobilenet-depthwise/mobilenet-depthwise-tuned"]
)
def test_a_shipped_sweep_gives_the_table_beside_it(name):
    assert format_markdown(Sweep.read(SHIPPED / f"{name}.json")) == (SHIPPED / f"{name}.md").read_text()


@pytest.mark.parametrize(
    ("selected", "name"),
    [
        (select_layers("resnet50"), "resnet50"),
        (select_layers("resnet50", SuiteVariant(1, "float32", "nchw", ())), "resnet50"),
        (select_layers("resnet50", SuiteVariant(32, "float16", "nhwc")), "resnet50-f16-nhwc-b32"),
        (select_layers("resnet50", SuiteVariant(epilogue=("bias", "relu")), "3x3"), "resnet50-3x3-bias-relu"),
        (select_layers("mobilenet", SuiteVariant(dtype="tf32"), None, "depthwise"), "mobilenet-no-depthwise-tf32"),
    ],
)
def test_what_is_selected_is_named_after_what_is_not_plain(selected, name):
    assert selected.name == name


def test_a_network_counts_layers_and_filters_are_none():
    conv, filter1d = parse("conv2d:1x4x6x6,4x4x1x1"), parse("filter1d:64,k3")
    both = LayerSelection("mine", {"a": Layer("a", conv, 2), "b": Layer("b", conv, 3)})
    assert (both.counts, both.network) == ({"a": 2, "b": 3}, {conv: 5})
    mixed = LayerSelection("mine", {**both.layers, "c": Layer("c", filter1d, 1)})
    assert (mixed.counts, mixed.network) == (None, {})


def test_labels_are_channels_only_where_nothing_else_differs(tmp_path):
    file = tmp_path / "mine.json"
    layers = [{"name": name, "text": f"conv2d:1x4x6x6,{n}x4x1x1"} for name, n in (("0", 4), ("b", 2))]
    file.write_text(json.dumps(layers))
    assert list(select_layers("d2l").layers) == ["16", "32", "64", "128", "256"]
    assert list(select_layers(str(file)).layers) == ["layer 0", "b"]


def test_the_time_left_is_told_from_the_second_workload_on(monkeypatch):
    sweeps: list[Sweep] = []
    steps, clock = [], iter([0.0, 10.0, 14.0, 20.0])

    def building(workload, *, device, progress, **_):
        progress("building")
        return make_result(workload.text, make_row("basic"))

    monkeypatch.setattr("tvmconv.experiments.sweep.run_schedules", building)
    monkeypatch.setattr("tvmconv.experiments.sweep.time.monotonic", lambda: next(clock))
    workloads = {n: parse(f"filter1d:{n},k1") for n in ("4", "5")}
    measure_sweep(
        "small",
        workloads,
        Arch("sm_90"),
        "command",
        progress=lambda prefix: nullcontext(lambda step: steps.append(f"{prefix}{step}")),
        on_result=sweeps.append,
        extra_provenance="by candlelight",
    )
    assert ", by candlelight; " in sweeps[-1].provenance
    assert steps == ["sm_90: 1 of 2, 4, building", "sm_90: 2 of 2, 5, building, 6 s left"]


@pytest.mark.parametrize("kind", ["cuda", "opencl"])
def test_a_thread_prepares_what_a_gpu_measures_next(monkeypatch, kind):
    one, two = parse("conv2d:1x4x6x6,4x4x1x1"), parse("conv2d:1x4x6x6,8x4x1x1")
    measured = []

    def measure(workload, *, device, prepared=None, **_):
        built = [*prepared._results] if prepared else []
        measured.append((workload, prepared and prepared.problem.workload, built))
        return make_result(workload.text, make_row("default", 1))

    monkeypatch.setattr("tvmconv.experiments.sweep.run_schedules", measure)
    device = Arch("sm_90") if kind == "cuda" else SimpleNamespace(kind="opencl", text="opencl:0", name="CPU")
    sweep = measure_sweep(
        "small",
        {"one": one, "again": one, "two": two},
        device,
        "command",
        progress=lambda prefix: nullcontext(lambda step: None),
        on_result=lambda sweep: None,
        schedules=["default"],
    )
    prepared = (two, ["default"]) if kind == "cuda" else (None, [])
    assert measured == [(one, None, []), (two, *prepared)]  # each workload once
    assert [result.workload for result in sweep.results] == [one, one, two]
