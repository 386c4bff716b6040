"""Workers of `tvmconv bench relax-models` hang or end, and other methods still have rows; the table of stored rows."""

import json
import subprocess

import pytest

from tvmconv.benchmarks import relax_models
from tvmconv.benchmarks.relax_methods import NetworkCase

# Stands for the worker: it writes the events of one method after another, and leaves its process number.
WORKER = """
import json, os, sys, time
write = lambda event: print(json.dumps(event), flush=True)
for method in json.loads(sys.argv[1])["methods"]:
    write({"event": "waiting"})
    if method == "pytorch":
        time.sleep(2.5)  # longer than the limit, for the GPU
    write({"event": "running"})
    if method == "tvm-nhwc":
        os.kill(os.getpid(), 9)
    if method == "metaschedule":
        time.sleep(60)
    write({"event": "row", "row": {"method": method, "device_seconds": 3e-6, "details": {"pid": os.getpid()}}})
"""


@pytest.fixture
def case(tmp_path):
    methods = ("tvm", "tvm-nhwc", "pytorch", "metaschedule", "tvmconv-relax")
    return NetworkCase(
        "resnet50", "f16", 1, methods, None, 1.0, str(tmp_path / "relax.jsonl"), str(tmp_path / "gpu.lock")
    )


def test_a_method_that_hangs_or_ends_its_process_costs_itself_alone(case, tmp_path, monkeypatch, capsys):
    popen = subprocess.Popen
    monkeypatch.setattr(
        relax_models.subprocess, "Popen", lambda words, **kwargs: popen([*words[:2], WORKER, *words[3:]], **kwargs)
    )
    monkeypatch.setattr(relax_models, "make_cuda_environment", dict)
    result = relax_models._run_case(relax_models._CaseResult(case, tmp_path, "provenance"), 2.0)
    rows = json.loads((tmp_path / "relax-resnet50-f16.json").read_text())["rows"]
    assert [row["method"] for row in rows] == list(case.methods)
    failures = ["", "the worker ended with status -9", "", "time limit of 2 s", ""]
    assert [row["failure"] for row in rows] == failures
    assert result.rows[0].details["pid"] != result.rows[2].details["pid"]
    assert "resnet50" in (tmp_path / "relax-resnet50-f16.md").read_text()
    assert capsys.readouterr().err.count("\n") == len(case.methods)


def test_results_become_the_table_of_a_page(bench, tmp_path, capsys):
    def write(name, network, batch, gpu="NVIDIA H100 80GB HBM3", **seconds):
        rows = [
            {"method": method.replace("_", "-"), "device_seconds": each, "made_seconds": 20.0, "error": 1e-3}
            for method, each in seconds.items()
        ]
        file = tmp_path / name
        case = {"network": network, "dtype": "f16", "batch": batch, "provenance": f"{gpu}; TVM 0.27"}
        file.write_text(json.dumps({**case, "rows": rows}))
        return file

    page = tmp_path / "page.md"
    page.write_text("before\n<!-- relax-models -->\nold\n<!-- /relax-models -->\nafter\n")
    files = [
        write("1.json", "resnet50", 16, tvm=8e-3, tvmconv_relax=1e-3, pytorch=None),
        write("2.json", "resnet50", 1, tvmconv_relax=1e-4, pytorch=4e-4, pytorch_compiled=3e-4),
        write("3.json", "resnet50", 1, tvm=2e-4),
        write("4.json", "resnet50", 1, "NVIDIA H200", tvm=1e-4),
    ]
    assert bench([*files, "--update-page", page], "relax-table") == 0
    assert "geometric mean" in capsys.readouterr().out
    lines = page.read_text().splitlines()
    headers = ["network", "dtype", "batch", "GPU", "TVM [µs]", "PyTorch, best [µs]", "tvmconv.relax [µs]"]
    headers += ["× TVM", "× PyTorch, best", "made in [s]", "error"]
    assert lines[2] == f"| {' | '.join(headers)} |"
    assert lines[4:8] == [
        "| resnet50 | f16 | 1 | NVIDIA H100 80GB HBM3 | 200 | 300 | 100 | 2.00 | 3.00 | 20.0 | 1.0e-03 |",
        "| resnet50 | f16 | 1 | NVIDIA H200 | 100 | — | — | — | — | — | — |",
        "| resnet50 | f16 | 16 | NVIDIA H100 80GB HBM3 | 8,000 | — | 1,000 | 8.00 | — | 20.0 | 1.0e-03 |",
        "| geometric mean | — | — | — | — | — | — | 4.00 | 3.00 | — | — |",
    ]
    page.write_text("[]")
    assert bench([page], "relax-table") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_candidates_of_metaschedule_have_a_table(bench, tmp_path, capsys):
    details = {"tasks": 5, "trials": 7, "succeeded": 6, "trials_by_task": [[4, 4], [2, 2], [1, 0]]}
    rows = [
        {"method": "metaschedule", "device_seconds": 9e-4, "details": details},
        {"method": "tvmconv-relax", "device_seconds": 1e-4, "details": {}},
        {"method": "tvm", "device_seconds": None, "details": {}},
    ]
    case = {"network": "resnet50", "dtype": "f16", "batch": 16, "provenance": "NVIDIA H200; TVM 0.27"}
    file, page = tmp_path / "1.json", tmp_path / "page.md"
    file.write_text(json.dumps({**case, "rows": rows}))
    page.write_text("<!-- relax-candidates -->\n<!-- /relax-candidates -->\n")
    assert bench([file, "--candidates", "--update-page", page], "relax-table") == 0
    assert "| resnet50 | f16 | 16 | NVIDIA H200 | 5 | 2 | 7 | 6 | 900 | 9.00 |" in page.read_text().splitlines()
