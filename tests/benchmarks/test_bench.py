"""`tvmconv bench`: its benchmarks are there, load when they are named, and share their options."""

import subprocess
import sys
from pathlib import Path

import pytest

from tvmconv import benchmarks, cli
from tvmconv.cli.bench import BENCHMARKS

SHARED = {"common", "torch_networks", "__init__"}
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


@pytest.mark.parametrize("words", [["nothing"], [], ["sweep", "--nothing"], ["chain", "--device", "tpu", "--log", "x"]])
def test_bad_input_is_one_line_and_status_2(words, capsys):
    assert cli.main(["bench", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("name", "words", "values"), OLD_OPTIONS)
def test_old_names_of_options_are_accepted(name, words, values):
    args = vars(cli.parse_words(["bench", name, *words]))
    assert {key: args[key] for key in values} == values
    assert args["command"] == " ".join(["tvmconv bench", name, *words])
