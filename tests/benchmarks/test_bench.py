"""`tvmconv bench`: its benchmarks are there, load when they are named, and share their options."""

import subprocess
import sys
from pathlib import Path

import pytest

from tvmconv import benchmarks, cli
from tvmconv.cli.bench import BENCHMARKS

SHARED = {
    "build_ahead",
    "builder_pool",
    "common",
    "eight_bit_libraries",
    "eight_bit_limits",
    "inductor_ahead",
    "relax_methods",
}
SHARED |= {"suite_lanes", "torch_networks", "__init__"}
OLD_OPTIONS = [
    ("networks", ["a.json", "--into", "page.md"], {"page": Path("page.md")}),
    ("chain", ["--archive", "kernels.zip"], {"archive": Path("kernels.zip")}),
    ("estimates", ["a.jsonl", "--least", "3"], {"min_configs": 3}),
    ("bounds", ["--again", "bounds.json"], {"file": Path("bounds.json")}),
]


def test_each_module_is_a_benchmark():
    modules = {file.stem for file in Path(benchmarks.__file__).parent.glob("*.py")} - SHARED
    assert {name.replace("-", "_") for name in BENCHMARKS} == modules


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_says_what_a_benchmark_is_for(bench, name, capsys):
    assert bench(["--help"], name) == 0
    assert f"tvmconv bench {name} " in capsys.readouterr().out


def test_help_imports_no_benchmark():
    code = "import sys; from tvmconv import cli; cli.main(['--help']); cli.main(['bench', '--help']); "
    code += "sys.exit(str([name for name in sys.modules if 'benchmarks' in name or name in ('tvm', 'torch')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("nothing", [], "'nothing'"),
        ("sweep", ["--nothing"], "--nothing"),
        ("chain", ["--device", "tpu", "--log", "x"], "unknown device 'tpu'"),
        ("sweep", ["--only", "7x7"], "no layer of d2l is named like '7x7'; there are 16_channels, 32_channels,"),
        ("sweep", ["--suite", "alexnet"], "'alexnet'"),
        ("sweep", ["--from", "nowhere.json"], "nowhere.json"),
        ("sweep", ["--from", __file__], "no results of a sweep"),
        ("sweep", ["-o", __file__], "exists"),
        ("sweep", ["--batch", "0"], "at least 1"),
        ("throughput", ["banana"], "'banana'"),
        ("throughput", ["--trials", "0"], "at least 1"),
        ("throughput", ["--meta-seconds", "0"], "expected a positive number"),
        ("throughput", ["--device", "tpu"], "unknown device 'tpu'"),
        ("throughput", ["--device", "opencl:0", "-o", __file__], "exists"),
        ("tune-suite", ["--suite", "alexnet"], "'alexnet'"),
        ("tune-suite", ["--only", "9x9"], "'9x9'"),
        ("tune-suite", ["--trials", "-1"], "'-1'"),
        ("tune-suite", ["--suite", "nowhere.json"], "nowhere.json: No such file"),
        ("tune-suite", ["--suite", __file__], "test_bench.py is not a suite, expected JSON such as"),
        ("tune-suite", ["--skip", "channels"], "no layer of d2l is named unlike 'channels'"),
        ("tune-suite", ["--dtype", "f8"], "'f8'"),
        ("tune-suite", ["--layout", "nchw4"], "'nchw4'"),
        ("tune-suite", ["--epilogue", "swish9"], "expected operations of add, bias"),
        ("tune-suite", ["--suite", "filter1d", "--layout", "nhwc"], "layout='nhwc' applies to convolutions only"),
        ("tune-suite", ["--tune-only", "--compare-only"], "not allowed"),
        ("layouts", ["/dev/zero"], "cannot read /dev/zero: expected a regular file, not a device"),
        ("layouts", [sys.executable], "expected a text in UTF-8"),
        ("eight-bits", ["nowhere.txt", "--device", "opencl:0"], "cannot read nowhere.txt: No such file"),
        ("prebuild", ["build", "-o", "k.zip", "--list", "/dev/zero"], "expected a regular file, not a device"),
        ("prebuild", ["measure", "--device", "opencl:0", "--log", "l.jsonl", "/dev/zero"], "not a device"),
    ],
)
def test_bad_input_is_one_line_and_status_2(bench, capsys, monkeypatch, tmp_path, name, words, message):
    monkeypatch.chdir(tmp_path)
    assert bench(words, name) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("tvmconv: ")
    assert message in err


@pytest.mark.parametrize(("name", "words", "values"), OLD_OPTIONS)
def test_old_names_of_options_are_accepted(name, words, values):
    args = vars(cli.parse_words(["bench", name, *words]))
    assert {key: args[key] for key in values} == values
    assert args["command"] == " ".join(["tvmconv bench", name, *words])
