"""What a command cannot carry out is refused in one line with status 2, before anything is measured."""

import pytest

SMALL = "conv2d:1x4x6x6,8x4x3x3,p1"
REFUSALS = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["fly"], "'fly'"),
    "no workload": (["run"], "expected a workload or --suite"),
    "no colon": (["run", "banana"], "'banana'"),
    "groups": (["run", "conv2d:1x3x8x8,4x1x3x3,g2"], "groups"),
    "kernel too large": (["run", "conv2d:1x3x2x2,4x3x3x3"], "larger than the padded image"),
    "zero size": (["run", "conv2d:0x3x8x8,4x3x3x3"], "at least 1"),
    "unknown schedule": (["run", SMALL, "fly"], "no schedule 'fly'"),
    "two baselines": (["run", SMALL, "--baseline", "cudnn", "cublas"], "cublas is no schedule but a baseline"),
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
    "unknown architecture": (["show", SMALL, "tiling", "--arch", "gfx90a"], "'gfx90a'"),
    "PTX of OpenCL": (["show", SMALL, "tiling", "--device", "opencl", "--stage", "ptx"], "CUDA only"),
    "schedules of no workload": (["schedules", "banana"], "'banana'"),
    "line break": (["run", "conv2d:1x3\n8x8"], "tvmconv: "),
    "build: no workload": (["build", "-o", "OUT"], "expected a workload"),
    "build: too many words": (["build", SMALL, "tiling", "columns", "-o", "OUT"], "expected a workload"),
    "build: a log that is not there": (["build", SMALL, "--log", "nowhere.jsonl", "-o", "OUT"], "nowhere.jsonl"),
    "build: a log and a knob": (
        ["build", SMALL, "tiling", "--log", "/dev/null", "--set", "tile_c=-1,2,2", "-o", "OUT"],
        "not both",
    ),
    "build: unknown schedule": (["build", SMALL, "fly", "-o", "OUT"], "no schedule 'fly'"),
    "build: a file for a folder": (["build", SMALL, "tiling", "-o", "/dev/null"], "/dev/null"),
    "build: architecture and device": (
        ["build", SMALL, "tiling", "--device", "auto", "--arch", "sm_90", "-o", "OUT"],
        "not allowed",
    ),
    "suites: two sources": (["suites", "d2l", "--from", "m.onnx"], "expected d2l or --from m.onnx, not both"),
    "suites: input of no model": (["suites", "d2l", "--input", "1x3"], "--input is for a model"),
    "suites: malformed input": (
        ["suites", "--from", "m.onnx", "--input", "1x"],
        "'1x': expected [NAME=]SIZES[,DTYPE], as in 1x3x224x224",
    ),
    "suites: nothing to write": (["suites", "-o", "suite.json"], "-o is for the layers of a suite"),
    "suites: a file that is not there": (
        ["suites", "--from", "nowhere.onnx"],
        "nowhere.onnx: No such file or directory",
    ),
    "suites: a folder": (["suites", "--from", "."], ".: Is a directory"),
    "suites: a file of something else": (["suites", "--from", __file__], "is not an ONNX model"),
    "suites: nowhere to write": (
        ["suites", "d2l", "-o", "nowhere/suite.json"],
        "nowhere/suite.json: No such file or directory",
    ),
    "tune: neither workload nor suite": (["tune"], "expected a workload or --suite"),
    "tune: workload and suite": (["tune", SMALL, "--suite", "d2l"], "expected a workload or --suite"),
    "tune: unknown tuner": (["tune", SMALL, "--tuner", "oracle"], "'oracle'"),
    "tune: no tracker": (["tune", SMALL, "--device", "rpc:k", "--tracker", "127.0.0.1:1"], "no tracker at 127.0.0.1:1"),
    "tune: no time": (["tune", SMALL, "--seconds", "0"], "expected a positive number, not '0'"),
    "tune: a time for each and for all": (
        ["tune", SMALL, "--seconds", "1", "--seconds-total", "2"],
        "not allowed with",
    ),
    "tune: missing log to learn from": (
        ["tune", SMALL, "--transfer-log", "nowhere.jsonl"],
        "cannot read nowhere.jsonl",
    ),
    "tune: transfer to a tuner that has no model": (
        ["tune", SMALL, "--tuner", "ga", "--transfer-log", "a.jsonl"],
        "expected gp",
    ),
    "tune: log in a missing folder": (
        ["tune", SMALL, "--log", "/nowhere/log.jsonl"],
        "cannot write /nowhere/log.jsonl: No such",
    ),
    "tune: read-only log": (["tune", SMALL, "--log", "/proc/version"], "cannot write /proc/version: "),
    "tune: log on a full disk": (["tune", SMALL, "--log", "/dev/full"], "cannot write /dev/full: "),
    "tune: a folder for a log": (["tune", SMALL, "--log", "/"], "cannot write /: "),
}


@pytest.mark.sample(47)
@pytest.mark.parametrize(("words", "message"), REFUSALS.values(), ids=REFUSALS)
def test_bad_input_is_one_line_and_status_2(run, instant, tmp_path, words, message):
    if "onnx" in message.lower():
        pytest.importorskip("onnx")
    status, out, err = run(*(word.replace("OUT", str(tmp_path)) for word in words))
    refusal = [line for line in err.splitlines() if not line.startswith("tvmconv: auto picked")]
    assert (status, out, len(refusal)) == (2, "", 1)
    assert refusal[0].startswith("tvmconv: ")
    assert message in refusal[0]
    assert instant.measured == []
