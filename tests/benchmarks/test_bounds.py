"""`tvmconv bench bounds`, `torch-table` and `layer-table`: tables of measured records and runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tvmconv.benchmarks.layer_table import (
    compute_possible_speedup,
    keep_newest,
    list_slow_layers,
    make_layer_table,
    make_networks_table,
    make_summary_table,
    merge_provenances,
)
from tvmconv.benchmarks.torch_table import make_layout_table, make_quantized_table, make_torch_models_table
from tvmconv.benchmarks.torch_training_table import make_training_table
from tvmconv.experiments.sweep import Sweep
from tvmconv.workloads import Layer, parse

ROOT = Path(__file__).parents[2]
W = "conv2d:1x64x56x56,192x64x3x3,s1,p1"


@pytest.mark.slow
def test_bounds_are_set_beside_what_was_measured(bench, tmp_path, capsys):
    log = ROOT / "tuning_logs/sampled/layers.jsonl.xz"
    assert bench([str(log), "--workload", W, "--configs", "2", "-o", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "bounds-direct.json").read_text())["points"][W]
    assert len(points) == 2
    assert all(0 < each["least"] == max(each["units"].values()) for each in points)
    assert all(each["predicted"] > 0 for each in points)
    assert "the best fit of the overlap exponent" in capsys.readouterr().out
    assert (tmp_path / "bounds-direct.png").stat().st_size < 200_000


@pytest.mark.slow
def test_what_was_counted_once_need_not_be_built_again(bench, tmp_path, capsys):
    recorded = ROOT / "tuning_logs/nvidia-h200/experiments/bounds-direct"
    assert bench(["--again", f"{recorded}.json.gz", "-o", str(tmp_path)]) == 0
    assert (tmp_path / "bounds-direct.md").read_text() == Path(f"{recorded}.md").read_text()


def test_what_counts_nothing_is_one_line(bench, tmp_path, capsys):
    (tmp_path / "bounds.json").write_text("[1]")
    assert bench(["--again", str(tmp_path / "bounds.json"), "-o", str(tmp_path)]) == 2
    assert "was not written by tvmconv bench bounds" in capsys.readouterr().err


def test_a_workload_that_no_log_has_is_one_line(bench, tmp_path, capsys):
    log = ROOT / "tuning_logs/sampled/layers.jsonl.xz"
    assert bench([str(log), "--workload", "conv2d:1x1x1x1,1x1x1x1", "-o", str(tmp_path)]) == 2
    assert "the logs have no records of direct for conv2d:1x1x1x1" in capsys.readouterr().err


def test_what_is_no_result_is_one_line(bench, tmp_path, capsys):
    (tmp_path / "torch.json").write_text('{"network": "x"}')
    for name, writer in (("torch-table", "torch-models"), ("torch-training-table", "torch-training")):
        assert bench([tmp_path / "torch.json"], name) == 2
        assert capsys.readouterr().err.startswith(f"tvmconv: the files were not written by tvmconv bench {writer}")


def test_memory_formats_of_a_network_share_a_line():
    times = {"contiguous": (4.0, 2.0, 1.0), "channels_last": (2.0, 4.0, 0.5)}  # PyTorch, in the other format, tvmconv
    results = []
    for layout, graphs in times.items():
        names = ("PyTorch", f"PyTorch, {({*times} - {layout}).pop()}", "tvmconv")
        timed = [{"name": name, "graph": graph} for name, graph in zip(names, graphs, strict=True)]
        results.append({"network": "x", "dtype": "f16", "batch": 1, "timed": timed})
    (line,) = make_layout_table(results).rows
    assert line[-2:] == ("2.00", "0.500")
    assert make_layout_table(results[:1]).rows[0][-2:] == ("2.00", "—")


def test_quantized_networks_are_compared_with_those_in_their_own_precision():
    graphs = {"PyTorch": 4.0, "PyTorch, contiguous": 3.0, "tvmconv": 2.0, "tvmconv, i8": 1.0}
    timed = [{"name": name, "graph": each, "error": 0.1, "made": 9.0} for name, each in graphs.items()]
    result = {"network": "x", "dtype": "f16", "batch": 1, "timed": timed}
    result["layers in i8"] = [{"workload": "w,f16,nhwc"}, {"workload": "w,i8,nhwc"}]
    rows = make_quantized_table([result]).rows
    assert [row[1] for row in rows] == ["f16, PyTorch", "f16", "i8"]
    assert [row[4:7] for row in rows[1:]] == [("1.50", "1.00", "—"), ("3.00", "2.00", "1 of 2")]
    assert make_torch_models_table([result]).rows[0][7] == "1.50"  # without quantized networks


def test_a_training_step_may_be_timed_as_a_fused_graph_alone():
    graphs = {"PyTorch": 4.0, "PyTorch, compiled (default)": 3.0, "tvmconv, fused": 2.0}
    timed = [{"name": name, "graph": graph, "made": 9.0} for name, graph in graphs.items()]
    result = {"network": "x", "dtype": "f16", "batch": 8, "timed": timed, "provenance": "A; tvmconv 0"}
    row, *means = make_training_table([result, {**result, "provenance": "B; tvmconv 0"}]).rows[1:]
    assert [(mean[0], mean[1], mean[8]) for mean in means] == [("geometric mean", gpu, "1.50") for gpu in "AB"]
    assert row[:4] == ("x", "B", "f16", "8")
    assert row[4:] == ("4,000,000", "3,000,000", "—", "2,000,000", "1.50", "—", "9.00", "9.00")


def test_a_layer_table_needs_tuned_kernels(bench, capsys):
    untuned = next((ROOT / "tuning_logs").glob("**/filter1d-k5.json"))
    assert bench([untuned], "layer-table") == 2
    assert "has no tuned kernels: expected a file NAME-tuned.json" in capsys.readouterr().err


@pytest.fixture
def gradients():
    """Results of a run with several depthwise gradients on one GPU."""
    files = (ROOT / "tuning_logs/nvidia-h200/gradients").glob("gradients-dgrad-depthwise*.json.gz")
    return max(map(Sweep.read, sorted(files)), key=lambda sweep: len(sweep.results))


def test_a_layer_table_of_several_devices_names_them(gradients):
    first, *others = gradients.results
    elsewhere = replace(first, device_name="another GPU")
    several = make_layer_table([replace(gradients, results=[elsewhere, *others])])
    assert [row[-1] for row in several.rows] == ["another GPU", *["NVIDIA H200"] * len(others), "—"]
    assert "device" not in make_layer_table([gradients]).headers


def test_a_layer_table_has_the_newest_run_of_each_layer(gradients):
    newer = replace(gradients, counts=[])
    first, *others = newer.results
    slow = replace(first, rows=tuple(replace(row, timing=None) for row in first.rows))
    older = Sweep("older", ["a"], [slow], re.sub(r"\d{4}-\d\d-\d\d", "2026-01-01", newer.provenance))
    part = Sweep("part", newer.labels[1:], others, newer.provenance)
    files = (Path(f"gradients-some{end}.json.gz") for end in ("", "-2", "-3"))
    sweeps = dict(zip(files, (older, newer, part), strict=True))
    kept = keep_newest(sweeps)  # of one date, the file with the larger number is newer
    assert [[result.workload for result in sweep.results] for sweep in kept] == [
        [first.workload],
        [result.workload for result in others],
    ]
    assert kept[0].results == [first]
    (row,) = make_summary_table(sweeps).rows
    assert [*row[:2]] == ["some", str(len(newer.results))]


def test_the_slowest_layers_come_first(bench, capsys):
    files = sorted((ROOT / "tuning_logs").glob("*/gradients/gradients-*.json.gz"))
    assert bench([*files, "--below", "1.1"], "layer-table") == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if line.startswith("`conv")]
    slow = list_slow_layers(keep_newest({file: Sweep.read(file) for file in files}), 1.1)
    assert [row[0].strip("`") for row in rows] == [sweep.results[0].workload.text for sweep in slow]
    assert 1.0 < slow[-1].results[0].compute_speedup("tuned", "cudnn") < 1.1
    assert bench([*files, "--below", "0.01"], "layer-table") == 2
    assert "no layer has a speed-up below 0.01" in capsys.readouterr().err


def test_a_table_of_networks_adds_the_measured_layers_as_often_as_they_occur():
    (sweep,) = [Sweep.read(ROOT / "tuning_logs/nvidia-h200/gradients/gradients-large.json.gz")]
    (result,) = sweep.results
    missing = parse("conv2d_wgrad:16x128x28x28,128x1x31x31,s1,p15,g128,f16,nhwc")
    layers = [
        Layer("net-1.5.0.dgrad", result.workload, 3),
        Layer("net-1.5.0.wgrad", missing, 1),
        Layer("b.0", missing, 1),
    ]
    table = make_networks_table({result.workload: result}, layers)
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert [row["network"] for row in rows] == ["net-1.5", "b"]
    assert [row["layers"] for row in rows] == ["2", "1"]
    assert [row["measured"] for row in rows] == ["1", "0"]
    tuned, cudnn = (result.seconds[name] * 1e6 for name in ("tuned", "cudnn"))
    assert float(rows[0]["tuned [µs]"]) == pytest.approx(3 * tuned, rel=0.01)
    assert float(rows[0]["cudnn / tuned"]) == pytest.approx(cudnn / tuned, rel=0.01)
    assert float(rows[0]["of the limits"].rstrip("%")) == pytest.approx(75, abs=1)  # both have the same limit
    assert rows[1]["tuned [µs]"] == "—"


def test_a_possible_speedup_is_that_of_a_kernel_at_the_limit():
    (sweep,) = [Sweep.read(ROOT / "tuning_logs/nvidia-h200/gradients/gradients-large.json.gz")]
    (result,) = sweep.results
    share, seconds = result.compute_limit_share("cudnn"), result.seconds["cudnn"]
    assert compute_possible_speedup(result, "cudnn", 0.0) == pytest.approx(1 / share)
    assert compute_possible_speedup(result, "cudnn", seconds) == result.compute_speedup("tuned", "cudnn")  # as a launch
    layers = [Layer("net.1", result.workload, 3)]
    table = make_networks_table({result.workload: result}, layers, shows_possible=True)
    (row,) = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    assert float(row["possible"]) == pytest.approx(seconds / min(result.seconds.values()), rel=0.01)


def test_runs_on_a_device_share_a_legend():
    runs = ["A; v 1, c 2, best; 2026-01-02; `two`", "A; v 1, c 2; 2026-01-01; `one`", "B; v 1; 2026-01-01; `one`"]
    merged = ["A; v 1, c 2; 2026-01-01: `one`; 2026-01-02: `two`", "B; v 1; 2026-01-01: `one`"]
    assert merge_provenances(runs) == merged


def test_a_layer_table_has_the_slower_layers_alone(bench, capsys):
    file = str(Path(__file__).parents[2] / "tuning_logs/nvidia-h200/batches/batch-layers-tuned-10.json.gz")
    assert bench([file, "--below", "1"], "layer-table") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("`conv2d")]
    assert 0 < len(rows) < 20
    assert all(float(row[5]) < 1 for row in rows)
