"""TVM's own code for what a kernel replaces: the functions that are timed, and the process that times them."""

import os
import subprocess
import sys
import time
from ctypes.util import find_library
from subprocess import PIPE

import numpy as np
import pytest
import torch
import tvm
from relax_models import CPU, Residual, exported, randomized
from torch import nn
from tvm import relax

from tvmconv.deadline import Deadline
from tvmconv.relax import comparison, to_float16
from tvmconv.relax.compile_target import CompileTarget, resolve_target
from tvmconv.relax.kernels import FoundKernel, KernelFinder
from tvmconv.relax.optimize import choose_kernel, prepare_module
from tvmconv.relax.sites import find_sites

X = torch.randn(2, 4, 10, 14, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def residual():
    model = randomized(Residual())
    return model, prepare_module(exported(model, X), has_kernels=False)


def test_extracted_functions_compute_convolutions_with_their_epilogues(residual):
    model, mod = residual
    sites, _ = find_sites(mod["main"])
    functions = comparison.extract_functions(mod, {"main": sites})
    names = {str(function.attrs["workload"]): str(name.name_hint) for name, function in functions.functions_items()}
    assert names.keys() == {site.workload.text for site in sites}
    machine = relax.VirtualMachine(tvm.compile(functions, CPU), tvm.cpu())
    y = x = tvm.runtime.tensor(X.numpy())
    for site in sites:
        y = machine[names[site.workload.text]](y, site.weight.value, *([] if site.residual is None else [x]))
    with torch.no_grad():
        np.testing.assert_allclose(y.numpy(), model(X).numpy(), atol=1e-4)


def test_functions_with_the_most_operations_come_first(residual):
    sites, _ = find_sites(residual[1]["main"])
    functions = comparison.extract_functions(residual[1], {"main": sites, "other": sites[1:2] * 1000})
    texts = [function.attrs["workload"] for _, function in comparison.rank_functions(functions)]
    first, depthwise, up = (site.workload for site in sites)
    assert first.flops > up.flops
    assert texts == [depthwise.text, first.text, up.text]


@pytest.fixture
def functions(residual):
    return comparison.extract_functions(residual[1], {"main": find_sites(residual[1]["main"])[0]})


@pytest.mark.slow  # it starts processes
@pytest.mark.parametrize("target", ["llvm", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_processes_time_functions_of_tvm(functions, target):
    with comparison.start_timer(0, has_float16=False) as timer:
        timer.compile_functions(functions, resolve_target(target).target)
        times = timer.time_functions(Deadline.after(100))
    assert times.note == "TVM's own code was timed for 3 of 3 distinct convolutions."
    assert times.seconds.keys() == {function.attrs["workload"] for function in functions.functions.values()}
    assert all(1e-8 < seconds < 1 for seconds in times.seconds.values())


@pytest.mark.slow  # it starts processes
@pytest.mark.skipif(find_library("cuda") is not None, reason="there may be a CUDA device")
def test_process_that_cannot_time_costs_nothing_else(functions):
    with comparison.start_timer(0, has_float16=False) as timer:
        timer.compile_functions(functions, tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
        times = timer.time_functions(Deadline.after(100))
    assert times.seconds == {}
    assert times.note.startswith("TVM's own code was timed for 0 of 3 distinct convolutions: ")


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import time; time.sleep(60)", "1 of 3 {}: the time limit ended the comparison."),
        (
            """print('["conv1d", 2e-6]\\n["conv3d", null]', flush=True); import time; time.sleep(60)""",
            "2 of 3 {}: its process ended.",
        ),
        ("import sys; sys.exit('no mma.h')", "1 of 3 {}: no mma.h."),
        (
            """import sys; print("no rule", file=sys.stderr); print('["conv1d", null]\\n["conv3d", 3e-6]')""",
            "2 of 3 {}: no rule.",
        ),
        ("""print('["conv1d", 2e-6]\\n["conv3d", 3e-6]', flush=True)""", "3 of 3 {}."),
    ],
)
def test_comparison_ends_in_time_and_says_what_is_missing(tmp_path, functions, code, note):
    program = f"""import sys; input(); sys.stdin.read(); print('["conv2d", 1e-6]', flush=True); {code}"""
    with (
        (tmp_path / comparison.ERRORS_FILE).open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=stderr, bufsize=1, text=True
        ) as process,
    ):
        started_at = time.monotonic()
        timer = comparison.TvmTimer([process], process.stdout.fileno(), tmp_path)
        timer.compile_functions(functions, CPU)
        times = timer.time_functions(Deadline.after(2))
        process.kill()
    assert time.monotonic() - started_at < 10
    assert times.seconds["conv2d"] == 1e-6
    assert times.note == f"TVM's own code was timed for {note.format('distinct convolutions')}"


@pytest.mark.parametrize(("num_cores", "number"), [(2, 1), (12, 3), (64, 4)])
def test_processes_leave_cores_to_the_search(num_cores, number):
    assert comparison.count_compilers(num_cores) == number


def test_modules_in_float16_are_known():
    mod = exported(nn.Sequential(nn.Conv2d(8, 16, 3)).eval(), torch.randn(1, 8, 5, 5))
    assert not comparison.uses_float16(mod)
    assert comparison.uses_float16(to_float16(mod))


class Reporter:
    """What a compiler reports, in place of the times of functions."""

    device = tvm.cpu()

    def __init__(self):
        self.reports = []

    def report_times(self, compiled):
        names = [(str(variable.name_hint), executable is not None) for (variable, _), executable in compiled]
        self.reports.append(names)
        compiled.clear()


def test_functions_are_reported_as_soon_as_they_are_compiled(functions, monkeypatch, capsys):
    begins, stays_open = os.pipe()
    compile_module = tvm.compile

    def fail_for_one(mod, target):
        (name,) = (str(variable.name_hint) for variable, _ in mod.functions_items())
        if name == "conv2":
            os.close(stays_open)  # the time has come
            raise ValueError("no rule")
        return compile_module(mod, target)

    monkeypatch.setattr(comparison.tvm, "compile", fail_for_one)
    reporter = Reporter()
    comparison.compile_and_time(comparison.rank_functions(functions), CPU, begins, reporter)
    os.close(begins)
    assert reporter.reports == [[("conv1", True), ("conv2", False)], [("conv3", True)], []]
    assert capsys.readouterr().err == "ValueError: no rule\n"


@pytest.mark.parametrize(("tvm_seconds", "implementation"), [(2e-6, "TVM"), (4e-6, "hopper")])
def test_convolution_stays_with_tvm_where_its_code_is_faster(residual, monkeypatch, tvm_seconds, implementation):
    site = find_sites(residual[1]["main"])[0][0]
    finder = KernelFinder(CompileTarget(resolve_target("llvm").target, None), None)
    kernel = FoundKernel("symbol", "hopper", "tuned", seconds=3e-6)
    monkeypatch.setattr(finder, "find", lambda workload: kernel)
    times = {site.workload.text: tvm_seconds}
    replacement, line = choose_kernel(finder, "main", site, site.workload, times)
    assert (replacement is None, line.implementation) == (implementation == "TVM", implementation)
    assert (line.tvm_seconds, line.seconds) == (tvm_seconds, 3e-6)
