"""The benchmark and the scripts that tune a suite and compare it, on two small layers without a baseline."""

import json
import math
import runpy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import tvmconv.kernel
from tvmconv import naive_cost, registry
from tvmconv.baselines.base import REGISTRY, Baseline
from tvmconv.benchmarks import build_ahead, prebuild, tune_suite
from tvmconv.devices import Timing, find_device
from tvmconv.experiments.sweep import Sweep
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.measure import timing_rounds
from tvmconv.workloads import Layer, parse, suite

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYERS = tuple(Layer(f"{c}_channels", parse(f"conv2d:1x{c}x6x6,{c}x{c}x1x1"), 1) for c in (2, 4))
HOW = ["--schedule", "tiling", "--tuner", "random", "--trials", "3", "--workers", "1", "--device", "opencl:0"]


@pytest.fixture
def small(monkeypatch):
    """All suites consist of the two layers."""
    monkeypatch.setattr("tvmconv.experiments.sweep.suite", lambda *_, **how: LAYERS)


def records_of(log):
    return list(read_records(log, InvalidLines()))


def trials_of(log):
    """The records that are no last timings."""
    return [record for record in records_of(log) if not record.final]


@pytest.mark.usefixtures("shared_processes")
@pytest.mark.usefixtures("shared_processes")
def test_a_suite_is_tuned_and_compared(bench, small, tmp_path, capsys):
    words = [*HOW, "--baseline", "none", "-o", str(tmp_path)]
    assert bench(words) == 0
    records = trials_of(tmp_path / "d2l.jsonl")
    assert [record.workload for record in records] == [layer.workload for layer in LAYERS for _ in range(3)]
    finals = [record for record in records_of(tmp_path / "d2l.jsonl") if record.final]
    assert {record.workload for record in finals} == {layer.workload for layer in LAYERS}
    assert {record.identity for record in finals} <= {record.identity for record in records}
    for layer in json.loads((tmp_path / "d2l-tuned.json").read_text())["layers"]:
        rows = layer["result"]["rows"]
        assert [row["name"] for row in rows] == ["default", "conflict_free", "tuned"]
        assert all(row["timing"]["median"] > 0 for row in rows)
    assert (tmp_path / "d2l-tuned.md").exists()
    assert (tmp_path / "d2l-tuned.png").exists()
    assert "ms a trial" in capsys.readouterr().out


def test_the_same_command_tunes_nothing_again(bench, small, tmp_path, instant):
    words = [*HOW, "--tune-only", "-o", str(tmp_path)]
    assert bench(words) == 0
    log = tmp_path / "d2l.jsonl"
    before = log.read_bytes()
    assert bench(words) == 0
    assert log.read_bytes() == before


@pytest.fixture
def mine(tmp_path):
    """A suite in a file: a convolution that two layers have, and one that cannot be tiled by `conflict`."""
    layers = [
        {"name": "wide", "text": "conv2d:1x4x6x6,8x4x3x3,s1,p1", "count": 2},
        {"name": "deep", "text": "conv2d:1x8x4x4,4x8x1x1,s1,p0"},
    ]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(layers))
    return str(path)


@pytest.fixture
def slow_library(monkeypatch):
    """A library that is right and takes a second, and says of each layer how it went."""

    def time_slowly(w, inputs, *, device, cold=False, seconds=0.5):
        text = f"Slow 1.0, {w.dtype}, for {w.C} channels"
        return Baseline(Timing((1.0,), "by hand", cold), w.reference(*inputs).astype(w.storage), text)

    monkeypatch.setitem(REGISTRY, "slow", time_slowly)


@pytest.fixture
def tuned_mine(bench, mine, slow_library, tmp_path, instant):
    """Tune and compare the suite in bfloat16, channels last, two images at a time; the exit status."""
    words = ["--suite", mine, "--dtype", "bf16", "--layout", "nhwc", "--batch", "2", "--baseline", "slow"]
    how = ["--tuner", "random", "--trials", "2", "--device", "opencl:0", "-o", str(tmp_path / "out")]
    return lambda *more: bench([*words, *how, *more])


@pytest.mark.slow
def test_a_variant_of_a_suite_from_a_file_is_tuned_and_compared(tuned_mine, tmp_path, capsys):
    assert tuned_mine("--schedule", "tiling", "--schedule", "pointwise") == 2
    assert "no schedule 'pointwise' for conv2d" in capsys.readouterr().err
    assert tuned_mine("--schedule", "tiling", "--schedule", "columns") == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"mine-bf16-nhwc-b2{end}" for end in (".jsonl", "-tuned.json", "-tuned.md", "-tuned.png")
    }
    sweep = Sweep.read(tmp_path / "out/mine-bf16-nhwc-b2-tuned.json")
    assert (sweep.labels, sweep.counts) == (["wide", "deep"], [2, 1])
    assert sweep.results[0].workload.text == "conv2d:2x4x6x6,8x4x3x3,s1,p1,bf16,nhwc"
    assert [row.name for row in sweep.results[0].rows] == ["default", "conflict_free", "tuned", "slow"]
    assert "Slow 1.0, bfloat16" in sweep.provenance
    assert "channels" not in sweep.provenance
    page = (tmp_path / "out/mine-bf16-nhwc-b2-tuned.md").read_text()
    assert "| for 4 channels |" in page
    assert "Slower than slow: none." in page
    assert "Slower than slow: none." in capsys.readouterr().out


@pytest.fixture
def any_times_agree(monkeypatch):
    """However noisy the machine, no time is far from another one."""
    monkeypatch.setattr(timing_rounds, "MAX_DEVIATION", math.inf)
    monkeypatch.setattr(tune_suite, "MAX_DEVIATION", math.inf)


@pytest.mark.slow
@pytest.mark.usefixtures("any_times_agree")
def test_only_layers_with_a_faster_kernel_are_compared_again(tuned_mine, tmp_path, capsys):
    assert tuned_mine("--schedule", "tiling", "--no-ladder") == 0
    file = tmp_path / "out/mine-bf16-nhwc-b2-tuned.json"
    before = Sweep.read(file)
    assert [row.name for row in before.results[0].rows] == ["tuned", "slow"]
    assert tuned_mine("--compare-only", "--no-ladder") == 0
    assert "not compared again" in capsys.readouterr().err
    assert Sweep.read(file) == before
    log = tmp_path / "out/mine-bf16-nhwc-b2.jsonl"
    fastest = min(records_of(log), key=lambda record: record.cost)
    faster = replace(fastest, schedule="columns", times=(1e-12,), final=True)
    log.write_text(log.read_text() + faster.line() + "\n")
    assert tuned_mine("--compare-only", "--no-ladder") == 0
    kept = [result for result in Sweep.read(file).results if result in before.results]
    assert [result.workload for result in kept] == [w.workload for w in before.results if w.workload != faster.workload]


@pytest.mark.sample(1)
@pytest.mark.usefixtures("any_times_agree")
@pytest.mark.parametrize("spoilt", ["far from the log", "unstable"])
def test_a_kept_row_that_cannot_be_right_is_measured_again(tuned_mine, tmp_path, monkeypatch, capsys, spoilt):
    assert tuned_mine("--schedule", "tiling", "--no-ladder") == 0
    file = tmp_path / "out/mine-bf16-nhwc-b2-tuned.json"
    sweep = Sweep.read(file)
    row, other = sweep.results[0].rows
    assert row.name == "tuned"
    if spoilt == "unstable":
        row = replace(row, unstable=True)
    else:
        monkeypatch.setattr(tune_suite, "MAX_DEVIATION", 1e3)  # times as slow as the log says
        row = replace(row, timing=Timing((row.timing.median * 1e6,), "by hand", cold=False))
    results = [replace(sweep.results[0], rows=(row, other)), *sweep.results[1:]]
    file.write_text(replace(sweep, results=results).to_json())
    assert tuned_mine("--compare-only", "--no-ladder") == 0
    assert f"as {file} has them: deep" in capsys.readouterr().err
    assert Sweep.read(file).results[0].rows[0].timing.median < row.timing.median or spoilt == "unstable"


def test_the_naive_schedule_is_left_out_of_what_is_large(bench, tuned_mine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(naive_cost, "FALLBACK_FLOPS", 1.0)
    assert tuned_mine("--schedule", "tiling") == 0
    assert "--all-schedules compares them" in capsys.readouterr().err
    assert "With schedules that are not tuned" not in (tmp_path / "out/mine-bf16-nhwc-b2-tuned.md").read_text()


def test_a_schedule_is_searched_for_the_layers_that_it_computes(bench, tuned_mine, schedule_registry, tmp_path):
    def pointwise(s, w, k):
        """Never built."""

    registry.schedule("conv2d", dtypes=("bfloat16",), condition=lambda w: w.R == 1)(pointwise)
    assert tuned_mine("--schedule", "tiling", "--schedule", "pointwise", "--tune-only") == 0
    records = trials_of(tmp_path / "out/mine-bf16-nhwc-b2.jsonl")
    assert [(record.workload.R, record.schedule) for record in records] == [
        *[(3, "tiling")] * 2, (1, "tiling"), (1, "pointwise")
    ]  # fmt: skip


def test_an_epilogue_s_cost_is_of_the_bare_kernel_s_config(bench, tuned_mine, mine, tmp_path, capsys):
    assert tuned_mine("--schedule", "tiling", "--tune-only") == 0
    log = tmp_path / "out/mine-bf16-nhwc-b2.jsonl"
    variant = ["--suite", mine, "--dtype", "bf16", "--layout", "nhwc", "--batch", "2"]
    how = ["--device", "opencl:0", "--rounds", "1", "--baseline", "slow", "-o", str(tmp_path)]
    assert bench([log, *variant, *how], "epilogue-cost") == 0
    page = (tmp_path / "mine-bf16-nhwc-b2-epilogue.md").read_text().splitlines()
    header, _, wide, deep, total, mean, _, source = [line.split(" | ") for line in page]
    assert header[2:5] == ["bare [µs]", "bias,relu [µs]", "bias,relu: cost"]
    assert [line[0] for line in (wide, deep, total, mean)] == [
        "| wide", "| deep", "| all, times their number", "| geometric mean"
    ]  # fmt: skip
    costs = [place for place, name in enumerate(header) if name.startswith("slow") and name.endswith("cost")]
    assert [wide[place] for place in costs] == ["+0.0%", "+0.0%"]
    assert wide[header.index("slow bare, how")] == "for 4 channels"
    assert total[header.index("slow bare [µs]")] == "3,000,000"
    assert "Slow 1.0, bfloat16" in source[0]


def test_without_a_suite_the_cost_is_of_what_the_logs_have(bench, tuned_mine, tmp_path, capsys):
    assert tuned_mine("--schedule", "tiling", "--tune-only") == 0
    capsys.readouterr()
    how = ["--device", "opencl:0", "--rounds", "1", "--epilogue", "relu"]
    assert bench([tmp_path / "out", "--only", "1x1", *how], "epilogue-cost") == 0
    _, row, _ = capsys.readouterr().out.split("\n", 2)
    assert row.startswith("conv2d:2x8x4x4,4x8x1x1,s1,p0,bf16,nhwc  tiling")
    assert bench([tmp_path / "out", "--only", "9x9", *how], "epilogue-cost") == 2
    assert bench([tmp_path / "out", "--batch", "9", *how], "epilogue-cost") == 2


@pytest.mark.parametrize(
    ("script", "suite", "seconds"),
    [("tune_d2l", "d2l", 60.0), ("tune_resnet50", "resnet50", 30.0), ("tune_suite", "d2l", None)],
)
def test_a_script_of_a_suite_has_its_own_defaults(script, suite, seconds, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(tune_suite, "run", lambda args: seen.update(vars(args)) or 0)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "-o", str(tmp_path)])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert (seen["suite"], seen["seconds"]) == (suite, seconds)
    assert seen["command"] == f"python scripts/{script}.py -o {tmp_path.name}"  # without folders of this machine


def test_a_script_refuses_bad_input_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sweep.py", "--suite", "alexnet"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPTS / "sweep.py"), run_name="__main__")
    assert capsys.readouterr().err.startswith("sweep: ")


def test_a_comparison_counts_the_layers_that_the_model_has_seen(capsys):
    """Without this, a page could show what the model remembers as what it predicts."""
    tell, place = tune_suite.describe_training_layers, find_device("sm_90")
    seen = [layer.workload for layer in suite("resnet50", dtype="float16", layout="nhwc")][:5]
    unseen = [replace(w, C=3 * w.C + 2, O=3 * w.O + 2) for w in seen]
    assert tell([*seen, *unseen, *unseen], place) == "a model that has seen 5 of the 10 layers"
    assert "the model has seen records of 5 of these 10 layers" in capsys.readouterr().err
    assert tell(unseen, place) == "a model that has seen none of the 5 layers"
    assert tell(seen, find_device("sm_80")) == capsys.readouterr().err == ""


@pytest.fixture
def listed(tmp_path, mine, in_this_process, monkeypatch):
    """Configs of both layers in a file, which are built for OpenCL by threads; one of them cannot be built."""

    def build(workload, schedule, *, arch, config):
        return tvmconv.kernel.build(workload, schedule, device="opencl:0", config=config)

    monkeypatch.setattr(build_ahead, "start_builders", lambda num_workers, niceness: ThreadPoolExecutor(1))
    monkeypatch.setattr(prebuild.tc, "build", build)
    path, texts = tmp_path / "configs.jsonl", [layer["text"] for layer in json.loads(Path(mine).read_text())]
    entries = [
        {"workload": parse(text).text, "schedule": name, "config": {}, "arch": "sm_90"}
        for text in [*texts, "conv2d:1x2x6x6,2x2x1x1"]  # the last one is no layer of the suite
        for name in ("tiling", "direct")
    ]
    entries.insert(0, {**entries[0], "config": {"no_knob": 1}})
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def test_listed_configs_are_measured_and_compared_by_lanes(bench, mine, listed, tmp_path, capsys):
    how = ["--no-ladder", "--baseline", "none", "--device", "opencl:0", "-o", tmp_path]
    assert bench(["--suite", mine, "--configs", listed, "--lanes", 2, "--workers", 1, *how]) == 0
    text = capsys.readouterr().err
    assert "no_knob" in text
    assert text.count("turns at the GPU") == 2
    records, sweep = records_of(tmp_path / "mine.jsonl"), Sweep.read(tmp_path / "mine-tuned.json")
    assert len([record for record in records if not record.final]) == 4
    for result in sweep.results:
        fastest = min((r for r in records if r.final and r.workload == result.workload), key=lambda r: r.cost)
        (row,) = result.rows
        assert (row.name, row.schedule, row.config) == ("tuned", fastest.schedule, fastest.config)
        assert row.verified
        assert row.seconds > 0


def test_a_layer_without_configs_fails_alone(bench, mine, listed, tmp_path):
    first = parse(json.loads(Path(mine).read_text())[0]["text"]).text
    kept = [line for line in listed.read_text().splitlines() if json.loads(line)["workload"] != first]
    listed.write_text("\n".join(kept))
    how = ["--no-ladder", "--baseline", "none", "--device", "opencl:0", "-o", tmp_path]
    assert bench(["--suite", mine, "--configs", listed, *how]) == 1
    rows = [row for result in Sweep.read(tmp_path / "mine-tuned.json").results for row in result.rows]
    assert [row.failure is None for row in rows] == [False, True]


@pytest.mark.parametrize("text", ["", "nothing", "[]", "{}"])
def test_what_lists_no_configs_is_refused(bench, mine, tmp_path, text, capsys):
    path = tmp_path / "configs.jsonl"
    if text:
        path.write_text(text)
    how = ["--baseline", "none", "--device", "opencl:0", "-o", tmp_path]
    assert bench(["--suite", mine, "--configs", path, *how]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_library_that_needs_a_gpu_is_refused_before_the_search(bench, mine, tmp_path, capsys):
    assert bench(["--suite", mine, *HOW, "-o", tmp_path / "out"]) == 2
    assert "cuDNN baseline needs an NVIDIA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
