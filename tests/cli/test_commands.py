import io
import json
import re
import subprocess
import sys

import pytest

import tvmconv as tc
from tvmconv.cli.errors import run_guarded
from tvmconv.experiments.results import ResultRow
from tvmconv.kernel import IR_LEVELS

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"
LADDER = ["default", "tiling", "columns", "vthread", "conflict_free"]
ALL = [*LADDER, "direct", "implicit_gemm"]  # that compute a convolution of one group


def test_help_does_not_import_tvm():
    heavy = ("tvm", "pyopencl", "torch", "matplotlib", "cuda.bindings")
    code = f"import sys, tvmconv.cli; tvmconv.cli.main(['--help']); sys.exit(str([*{{*{heavy}}} & {{*sys.modules}}]))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.stderr.strip() == "[]"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["show", "--help"]])
def test_help_ends_with_status_0(run, words):
    status, out, err = run(*words)
    assert (status, err) == (0, "")
    assert "tvmconv" in out


def test_a_workload_without_schedules_is_refused(run, schedule_registry):
    schedule_registry.clear()
    status, _, err = run("run", SMALL + ",tf32", "--device", "opencl:0")
    assert (status, err) == (2, "tvmconv: no schedule computes conv2d in tf32\n")


def test_a_workload_past_this_machines_memory_is_refused(run, monkeypatch):
    monkeypatch.setattr("tvmconv.verification.os.sysconf", lambda name: 1)
    status, _, err = run("run", SMALL)
    assert (status, err.count("\n")) == (2, 1)
    assert "this machine has" in err


def test_run_prints_a_row_for_every_schedule(run):
    status, out, _ = run("run", SMALL, "--device", "opencl:0", "--seconds", "0.01")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in ALL] == ALL


def test_run_says_what_auto_picked(run):
    status, _, err = run("run", SMALL, "default", "--seconds", "0.01")
    assert status == 0
    assert "auto picked" in err


def test_json_has_what_the_table_has(run):
    words = ["run", SMALL, "tiling", "--device", "opencl:0", "--seconds", "0.01", "--seed", "7", "--json"]
    status, out, err = run(*words)
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert (result["workload"], result["device"], result["seed"]) == ("conv2d:1x4x6x6,8x4x3x3,s1,p1", "opencl:0", 7)
    assert set(result["rows"][1]) == set(ResultRow.__dataclass_fields__)
    assert result["rows"][1]["timing"]["median"] > 0


def test_run_with_a_wrong_kernel_has_status_1(run, monkeypatch):
    monkeypatch.setattr("tvmconv.workloads.dtypes.SUM_TOLERANCE", 0.0)
    monkeypatch.setattr("tvmconv.kernel.Kernel.time", lambda *args, **kwargs: pytest.fail("timed"))
    status, out, _ = run("run", SMALL, "default", "--device", "opencl:0")
    assert status == 1
    assert "default failed: wrong result" in out


@pytest.mark.parametrize("stage", IR_LEVELS)
def test_every_stage_is_shown_without_a_gpu(run, stage):
    status, out, err = run("show", SMALL, "vthread", "--stage", stage, "--arch", "sm_90")
    assert (status, err) == (0, "")
    assert out.strip()


def test_show_has_the_preamble_on_request(run):
    words = ("show", SMALL, "vthread", "--stage", "source", "--arch", "sm_90")
    _, kernel, _ = run(*words)
    _, full, _ = run(*words, "--full")
    assert kernel.startswith('extern "C" __global__')
    assert full.endswith(kernel)
    assert "#include" in full.removesuffix(kernel)


def test_schedules_tell_where_they_run(run, schedule_registry):
    def listed(s, w, k):
        """Never built."""

    tc.schedule("conv2d", device_kinds=("cuda",), exact_arch=90)(listed)
    _, out, _ = run("schedules")
    assert "(cuda only, sm_90 only)" in next(line for line in out.splitlines() if " listed " in line)
    assert "(cuda only, sm_80 and later)" in next(line for line in out.splitlines() if " mma_sync " in line)
    _, out, _ = run("schedules", "--json")
    told = {entry["schedule"]: (entry["since"], entry["only"]) for entry in json.loads(out)}
    assert (told["listed"], told["mma_sync"], told["tiling"]) == ((None, "sm_90"), ("sm_80", None), (None, None))


def test_devices_tells_a_remedy_for_what_is_not_there(run):
    _, out, _ = run("devices", "--json")
    entries = json.loads(out)
    assert "opencl:0" in [entry["device"] for entry in entries]
    assert all(entry["remedy"] for entry in entries if entry["name"] is None)


VARIANT = ["--dtype", "tf32", "--layout", "nhwc", "--batch", "8", "--epilogue", "bias,relu", "--only", "3x3"]


def test_suites_lists_the_layers_of_a_variant(run):
    status, out, _ = run("suites", "resnet50", *VARIANT, "--skip", "conv2")
    assert status == 0
    assert out.splitlines()[1].split() == [
        *("conv3_1.3x3", "1", "conv2d:8x128x56x56,128x128x3x3,s2,p1,tf32,nhwc,bias,relu")
    ]


def test_run_takes_a_suite_from_a_file_in_a_variant(run, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL}]))
    words = ["run", "--suite", str(file), "default", "--dtype", "bf16", "--device", "opencl:0", "--seconds", "0.01"]
    status, out, _ = run(*words, "--json")
    assert (status, json.loads(out)["workload"]) == (0, "conv2d:1x4x6x6,8x4x3x3,s1,p1,bf16")


def test_run_of_a_network_ends_with_the_times_of_all_its_layers(run, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL, "count": 3}, {"name": "b", "text": "conv1d:1x2x9,4x2x3"}]))
    _, out, _ = run("run", "--suite", str(file), "--device", "opencl:0", "--seconds", "0.01", "default")
    header, *layers, total = (re.split("  +", line) for line in out.splitlines()[-4:])
    assert (header, total[0]) == (["layer", "default [µs]"], "all, times their number")
    a, b, network = (float(line[1].replace(",", "")) for line in (*layers, total))
    assert network == pytest.approx(3 * a + b, rel=0.02)


def test_a_closed_pipe_is_no_traceback():
    command = [sys.executable, "-m", "tvmconv", "suites", "resnet50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_characters_that_ascii_lacks_are_escaped(errors, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii", errors))
    assert run_guarded("tvmconv", lambda: print("2 × 3 µs") or 0) == 0
    assert out.getvalue() == b"2 \\xd7 3 \\xb5s\n"


def test_an_interrupt_has_the_status_of_the_signal(run, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("tvmconv.cli.devices.list_devices", interrupt)
    assert run("devices") == (130, "", "")


def test_an_interrupt_waits_for_no_thread():
    script = (
        "import threading, time\n"
        "from tvmconv import cli\n"
        "def dispatch(words):\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    print('so far')\n"
        "    raise KeyboardInterrupt\n"
        "cli._dispatch = dispatch\n"
        "cli.command_line()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "so far\n", "")
