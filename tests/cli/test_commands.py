import io
import json
import re
import subprocess
import sys

import pytest

import tvmconv as tc
from tvmconv.cli import main
from tvmconv.cli.errors import run_guarded
from tvmconv.experiments.results import ResultRow
from tvmconv.kernel import IR_LEVELS

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"
LADDER = ["default", "tiling", "columns", "vthread", "conflict_free"]
ALL = [*LADDER, "direct", "implicit_gemm"]  # that compute a convolution of one group


def run(capsys, *words):
    """Exit status, stdout and stderr of a command."""
    status = main(words)
    return status, *capsys.readouterr()


def test_help_does_not_import_tvm():
    heavy = ("tvm", "pyopencl", "torch", "matplotlib", "cuda.bindings")
    code = f"import sys, tvmconv.cli; tvmconv.cli.main(['--help']); sys.exit(str([*{{*{heavy}}} & {{*sys.modules}}]))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.stderr.strip() == "[]"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["run", "--help"], ["show", "--help"]])
def test_help_ends_with_status_0(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, err) == (0, "")
    assert "tvmconv" in out


REFUSALS = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["fly"], "'fly'"),
    "no workload": (["run"], "expected a workload or --suite"),
    "no colon": (["run", "banana"], "'banana'"),
    "groups": (["run", "conv2d:1x3x8x8,4x1x3x3,g2"], "groups"),
    "kernel too large": (["run", "conv2d:1x3x2x2,4x3x3x3"], "larger than the padded image"),
    "zero size": (["run", "conv2d:0x3x8x8,4x3x3x3"], "at least 1"),
    "unknown schedule": (["run", SMALL, "fly"], "no schedule 'fly'"),
    "architecture that NVRTC does not know": (
        ["show", SMALL, "tiling", "--arch", "sm_11"],
        "unknown architecture 'sm_11'",
    ),
    "tile past its extent": (["run", SMALL, "tiling", "--set", "tile_c=-1,4,4000"], "too large"),
    "unknown device": (["run", SMALL, "--device", "tpu"], "unknown device 'tpu'"),
    "absent device": (["run", SMALL, "--device", "opencl:99"], "no device 'opencl:99'"),
    "compile-only device": (["run", SMALL, "--device", "sm_90"], "to compile for only"),
    "unknown knob": (["run", SMALL, "--set", "colour=1"], "no knob 'colour'"),
    "malformed --set": (["run", SMALL, "--set", "tile_c"], "expected KNOB=VALUE"),
    "value of a knob": (["run", SMALL, "tiling", "--set", "tile_c=1"], "tile_c takes 3 factors"),
    "no time": (["run", SMALL, "--seconds", "0"], "expected a positive number, not '0'"),
    "negative seed": (["run", SMALL, "--seed", "-1"], "'-1'"),
    "unknown baseline": (["run", SMALL, "--baseline", "mkl"], "'mkl'"),
    "baseline without a GPU": (["run", SMALL, "--device", "opencl", "--baseline", "cudnn"], "needs an NVIDIA GPU"),
    "unknown suite": (["run", "--suite", "alexnet"], "'alexnet'"),
    "variant of a workload": (["run", SMALL, "--dtype", "f16"], "--dtype is for the layers of a suite"),
    "suite that is no file": (["run", "--suite", "nowhere.json"], "nowhere.json: No such file"),
    "suite that is no suite": (["run", "--suite", __file__], "is not a suite, expected JSON such as"),
    "unknown option": (["run", SMALL, "--fast"], "--fast"),
    "unknown stage": (["show", SMALL, "tiling", "--stage", "llvm"], "'llvm'"),
    "unknown schedule to show": (["show", SMALL, "fly"], "no schedule 'fly'"),
    "unknown architecture": (["show", SMALL, "tiling", "--arch", "gfx90a"], "'gfx90a'"),
    "architecture and device": (["show", SMALL, "tiling", "--arch", "sm_90", "--device", "auto"], "not allowed"),
    "PTX of OpenCL": (["show", SMALL, "tiling", "--device", "opencl", "--stage", "ptx"], "CUDA only"),
    "schedules of no workload": (["schedules", "banana"], "'banana'"),
    "unknown suite to list": (["suites", "alexnet"], "'alexnet'"),
    "line break": (["run", "conv2d:1x3\n8x8"], "tvmconv: "),
}


@pytest.mark.parametrize(("words", "said"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_one_line_and_status_2(capsys, words, said):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("tvmconv: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_workload_without_schedules_is_refused(capsys, schedule_registry):
    schedule_registry.clear()
    status, _, err = run(capsys, "run", SMALL + ",tf32", "--device", "opencl:0")
    assert (status, err) == (2, "tvmconv: no schedule computes conv2d in tf32\n")


def test_a_workload_past_this_machines_memory_is_refused(capsys, monkeypatch):
    monkeypatch.setattr("tvmconv.verification.os.sysconf", lambda name: 1)
    status, _, err = run(capsys, "run", SMALL)
    assert (status, err.count("\n")) == (2, 1)
    assert "this machine has" in err


def test_run_prints_a_row_for_every_schedule(capsys):
    status, out, _ = run(capsys, "run", SMALL, "--device", "opencl:0", "--seconds", "0.01")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line.split()[:1] and line.split()[0] in ALL] == ALL


def test_run_says_what_auto_picked(capsys):
    status, _, err = run(capsys, "run", SMALL, "default", "--seconds", "0.01")
    assert status == 0
    assert "auto picked" in err


def test_json_has_what_the_table_has(capsys):
    words = ["run", SMALL, "tiling", "--device", "opencl:0", "--seconds", "0.01", "--seed", "7", "--json"]
    status, out, err = run(capsys, *words)
    result = json.loads(out)
    assert (status, err) == (0, "")
    assert (result["workload"], result["device"], result["seed"]) == ("conv2d:1x4x6x6,8x4x3x3,s1,p1", "opencl:0", 7)
    assert set(result["rows"][1]) == set(ResultRow.__dataclass_fields__)
    assert result["rows"][1]["timing"]["median"] > 0


def test_run_with_a_wrong_kernel_has_status_1(capsys, monkeypatch):
    monkeypatch.setattr("tvmconv.workloads.dtypes.SUM_TOLERANCE", 0.0)
    monkeypatch.setattr("tvmconv.kernel.Kernel.time", lambda *args, **kwargs: pytest.fail("timed"))
    status, out, _ = run(capsys, "run", SMALL, "default", "--device", "opencl:0")
    assert status == 1
    assert "default failed: wrong result" in out


@pytest.mark.parametrize("stage", IR_LEVELS)
def test_every_stage_is_shown_without_a_gpu(capsys, stage):
    status, out, err = run(capsys, "show", SMALL, "vthread", "--stage", stage, "--arch", "sm_90")
    assert (status, err) == (0, "")
    assert out.strip()


def test_show_has_the_preamble_on_request(capsys):
    words = ("show", SMALL, "vthread", "--stage", "source", "--arch", "sm_90")
    _, kernel, _ = run(capsys, *words)
    _, full, _ = run(capsys, *words, "--full")
    assert kernel.startswith('extern "C" __global__')
    assert full.endswith(kernel)
    assert "#include" in full.removesuffix(kernel)


def test_schedules_tell_where_they_run(capsys, schedule_registry):
    def listed(s, w, k):
        """Never built."""

    tc.schedule("conv2d", device_kinds=("cuda",), exact_arch=90)(listed)
    _, out, _ = run(capsys, "schedules")
    assert "(cuda only, sm_90 only)" in next(line for line in out.splitlines() if " listed " in line)
    assert "(cuda only, sm_80 and later)" in next(line for line in out.splitlines() if " mma_sync " in line)
    _, out, _ = run(capsys, "schedules", "--json")
    told = {entry["schedule"]: (entry["since"], entry["only"]) for entry in json.loads(out)}
    assert (told["listed"], told["mma_sync"], told["tiling"]) == ((None, "sm_90"), ("sm_80", None), (None, None))


def test_devices_tells_a_remedy_for_what_is_not_there(capsys):
    _, out, _ = run(capsys, "devices", "--json")
    entries = json.loads(out)
    assert "opencl:0" in [entry["device"] for entry in entries]
    assert all(entry["remedy"] for entry in entries if entry["name"] is None)


VARIANT = ["--dtype", "tf32", "--layout", "nhwc", "--batch", "8", "--epilogue", "bias,relu", "--only", "3x3"]


def test_suites_lists_the_layers_of_a_variant(capsys):
    status, out, _ = run(capsys, "suites", "resnet50", *VARIANT, "--skip", "conv2")
    assert status == 0
    assert out.splitlines()[1].split() == [
        *("conv3_1.3x3", "1", "conv2d:8x128x56x56,128x128x3x3,s2,p1,tf32,nhwc,bias,relu")
    ]


def test_run_takes_a_suite_from_a_file_in_a_variant(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL}]))
    words = ["run", "--suite", str(file), "default", "--dtype", "bf16", "--device", "opencl:0", "--seconds", "0.01"]
    status, out, _ = run(capsys, *words, "--json")
    assert (status, json.loads(out)["workload"]) == (0, "conv2d:1x4x6x6,8x4x3x3,s1,p1,bf16")


def test_run_of_a_network_ends_with_the_times_of_all_its_layers(capsys, tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps([{"name": "a", "text": SMALL, "count": 3}, {"name": "b", "text": "conv1d:1x2x9,4x2x3"}]))
    _, out, _ = run(capsys, "run", "--suite", str(file), "--device", "opencl:0", "--seconds", "0.01", "default")
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


def test_an_interrupt_has_the_status_of_the_signal(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("tvmconv.cli.devices.list_devices", interrupt)
    assert run(capsys, "devices") == (130, "", "")


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
