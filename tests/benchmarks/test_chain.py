"""A network's convolutions in one graph: whose kernels they are, and the tables."""

import json

import pytest

import tvmconv as tc
from tvmconv.benchmarks import chain, prebuild
from tvmconv.compiler import nvrtc
from tvmconv.devices import Timing
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.errors import DeviceError
from tvmconv.experiments.chain import ChainLayer
from tvmconv.logs.record import Record

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
SMALL, LARGE = "conv2d:1x16x8x8,16x16x3x3,s1,p1,f16,nhwc", "conv2d:1x16x8x8,32x16x1x1,s1,p0,f16,nhwc"


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "net.json"
    path.write_text(json.dumps([{"name": "a", "text": SMALL, "count": 2}, {"name": "b", "text": LARGE}]))
    return str(path)


@pytest.fixture
def measured(monkeypatch):
    """What would be measured, on a GPU that is none: a kernel for each workload, by its text."""
    seen = {}

    def measure(layers, built, device, tell, *, picks):
        seen.update({w.text: kernel for w, kernel in built.items()}, layers=[name for name, _ in layers], picks=picks)
        links = [
            ChainLayer(name, w.text, built[w].schedule, built[w].config_source, False, False, 1e-6)
            for name, w in layers
        ]
        return links, {"graph": Timing((4e-6,), "", False)}

    gpu = CudaDevice(
        "cuda:0",
        "NVIDIA H200",
        "sm_90",
        1 << 40,
        132,
        1024,
        49152,
        None,
        None,
        None,
        0,
        opt_in_shared_bytes_per_block=232448,
    )
    monkeypatch.setattr(chain, "find_device", lambda *_: gpu)
    monkeypatch.setattr(chain, "measure_chain", measure)
    monkeypatch.setattr(
        chain, "describe_provenance", lambda device, command, library, builder_versions: f"here, {builder_versions}"
    )
    return seen


def record(seconds, kernel, workload=SMALL):
    w = tc.parse(workload)
    return Record(w, kernel["schedule"], kernel["config"], "NVIDIA H200", "cuda -arch=sm_90", times=(seconds,))


def entries(archive):
    found = [entry for entry, _, _ in prebuild.read_entries(archive)]
    for entry in found:
        entry["config"] = {n: tuple(v) if isinstance(v, list) else v for n, v in entry["config"].items()}
    return found


@pytest.fixture
def build(bench, suite, tmp_path, prebuild_in_threads):
    """Build an archive of the suite with these options."""

    def run(*options):
        archive = tmp_path / "kernels.zip"
        words = ["build", "--suite", suite, "--workers", "1", "-o", str(archive), *options]
        assert bench(words, "prebuild") == 0
        return archive

    return run


@needs_nvrtc
def test_the_fastest_archived_kernel_by_the_log_is_taken(bench, build, suite, measured, tmp_path, capsys):
    archive = build("--configs", "2", "--schedule", "mma_sync")
    log = tmp_path / "log.jsonl"
    of_small = [entry for entry in entries(archive) if entry["workload"] == SMALL]
    for seconds, entry in zip((2e-6, 1e-6), of_small, strict=False):
        tc.Log(log).append(record(seconds, entry))
    words = [
        "--suite",
        suite,
        "--kernel-archive",
        str(archive),
        "--log",
        str(log),
        "--baseline",
        "none",
        "-o",
        str(tmp_path),
    ]
    assert bench(words) == 0
    assert measured["layers"] == ["a", "a", "b"]
    assert measured["picks"] == 0
    assert measured[SMALL].config_source == "tuned"
    assert measured[SMALL].program.kernels[0].launch.num_blocks == of_small[1]["resources"]["blocks"]
    assert measured[LARGE].config_source == "the first of the archive"
    told = capsys.readouterr()
    assert f"no record of {LARGE} applies" in told.err
    page = (tmp_path / "net-chain.md").read_text()
    assert "| one graph | 4.00 ± 0.0% | +0.33 |" in page
    assert "here, [{'tvmconv': " in page


@needs_nvrtc
def test_best_configs_are_archived_with_the_epilogue(bench, build, suite, measured, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    kernel = {"schedule": "tensor_core", "config": tc.build(tc.parse(SMALL), "tensor_core", arch="sm_90").config}
    tc.Log(log).append(record(1e-6, kernel))
    archive = build("--best", str(log), "--epilogue", "bias,relu")
    assert "2 kernels" in capsys.readouterr().out
    assert {entry["workload"] for entry in entries(archive)} == {f"{SMALL},bias,relu", f"{LARGE},bias,relu"}
    words = ["--suite", suite, "--epilogue", "bias,relu", "--kernel-archive", str(archive), "--baseline", "none"]
    assert bench(words) == 0
    small, large = (measured[f"{text},bias,relu"] for text in (SMALL, LARGE))
    assert (small.schedule, small.config_source) == ("tensor_core", "tuned without the epilogue on NVIDIA H200")
    assert large.config_source == "predicted"


@needs_nvrtc
def test_kernels_of_logs_are_built_here(bench, suite, measured, tmp_path):
    log = tmp_path / "log.jsonl"
    kernel = {"schedule": "tensor_core", "config": tc.build(tc.parse(SMALL), "tensor_core", arch="sm_90").config}
    tc.Log(log).append(record(1e-6, {**kernel, "config": {**kernel["config"], "no_such_knob": 1}}))
    tc.Log(log).append(record(2e-6, kernel))
    assert bench(["--suite", suite, "--only", "a", "--log", str(log), "--baseline", "none"]) == 0
    assert (measured[SMALL].schedule, measured[SMALL].config_source) == ("tensor_core", "tuned")
    assert measured["layers"] == ["a", "a"]


def link(**what):
    told = {"layer": "a", "workload": SMALL, "schedule": "hopper", "origin": "tuned", "linked": True}
    return told | {"overlaps": True, "seconds": 2e-6, "cudnn": 3e-6, "how": "bias+relu fused"} | what


def test_readings_are_written_again(bench, tmp_path, capsys):
    file = tmp_path / "some-chain.json"
    totals = {"graph": [5e-6, 0.01], "overlapping": [3e-6, 0.02], "cudnn graph": [9e-6, 0.0]}
    layers = [link(linked=False, overlaps=False), link()]
    file.write_text(json.dumps({"name": "some-chain", "provenance": "then", "totals": totals, "kernels": layers}))
    assert bench(["--from", str(file), "-o", str(tmp_path)]) == 0
    page = (tmp_path / "some-chain.md").read_text()
    assert "| each alone, summed | 4.00 | — | 1.50 |" in page
    assert "| one graph | 5.00 ± 1.0% | +0.50 | 1.80 |" in page
    assert "| one graph, overlapping (1 of 2) | 3.00 ± 2.0% | -0.50 | 3.00 |" in page
    assert "| cuDNN, one graph | 9.00 ± 0.0% | +1.50 | — |" in page
    assert "the layer before's" in capsys.readouterr().out
    assert page.rstrip().endswith("then")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected a --log"),
        (["--log", "tuning_logs", "--suite", "filter1d"], "expected a suite of convolutions only"),
        (["--log", "tuning_logs", "--device", "opencl:0"], "expected --device cuda:N instead of opencl:0"),
        (["--log", "tuning_logs", "--only", "no such"], "no layer of resnet50 is named like 'no such'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(bench, words, said, capsys):
    assert bench(words) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@needs_nvrtc
def test_an_archive_without_a_layer_is_refused(bench, build, measured, capsys):
    archive = build("--configs", "1", "--schedule", "mma_sync", "--only", "a")
    assert bench(["--suite", "d2l", "--kernel-archive", str(archive), "--baseline", "none"]) == 2
    assert "has no kernel of conv2d:1x16x64x64,16x16x3x3,s1,p1, and 4 more" in capsys.readouterr().err


def test_without_pytorch_nothing_is_measured(bench, suite, measured, monkeypatch, capsys):
    def missing():
        raise DeviceError("the cuDNN baseline needs PyTorch")

    monkeypatch.setattr(chain, "torch_with_cudnn", missing)
    assert bench(["--suite", suite, "--log", "tuning_logs"]) == 2
    assert "needs PyTorch" in capsys.readouterr().err
    assert not measured


@pytest.mark.gpu
def test_a_chain_is_measured_on_a_gpu(bench, suite, tmp_path, gpu):
    log = tmp_path / "log.jsonl"
    log.touch()
    words = ["--suite", suite, "--epilogue", "bias,relu", "--log", str(log), "--device", gpu.text, "--picks", "1"]
    assert bench([*words, "-o", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "net-bias-relu-chain.json").read_text())
    assert [each["layer"] for each in told["kernels"]] == ["a", "a", "b"]
    assert [each["linked"] for each in told["kernels"]] == [False, True, True]
    assert {"graph", "cudnn graph"} <= {*told["totals"]}
