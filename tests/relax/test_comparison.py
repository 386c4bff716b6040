"""TVM's own code for what a kernel replaces: the functions that are timed, and the process that times them."""

import subprocess
import sys
import time
from subprocess import PIPE

import numpy as np
import pytest
import torch
import tvm
from relax_models import Residual, exported, randomized
from tvm import relax

from tvmconv.deadline import Deadline
from tvmconv.relax import comparison
from tvmconv.relax.kernels import CompileTarget, FoundKernel, KernelFinder, resolve_target
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
    assert [functions[f"conv{i}"].attrs["workload"] for i in (1, 2, 3)] == [site.workload.text for site in sites]
    machine = relax.VirtualMachine(tvm.compile(functions, "llvm"), tvm.cpu())
    y = x = tvm.runtime.tensor(X.numpy())
    for index, site in enumerate(sites, 1):
        y = machine[f"conv{index}"](y, site.weight.value, *([] if site.residual is None else [x]))
    with torch.no_grad():
        np.testing.assert_allclose(y.numpy(), model(X).numpy(), atol=1e-4)


@pytest.mark.slow  # it starts a process
def test_process_that_cannot_time_costs_nothing_else(residual):
    functions = comparison.extract_functions(residual[1], {"main": find_sites(residual[1]["main"])[0][:1]})
    with comparison.start_timer(functions, tvm.target.Target("llvm"), 0) as timer:  # no CUDA device is there
        times = timer.time_functions(Deadline.after(60))
    assert times.seconds == {}
    assert times.note.startswith("TVM's own code was timed for 0 of 1 distinct convolutions: ")


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import time; time.sleep(60)", "1 of 2 {}: the time limit ended the comparison."),
        ("import sys; sys.exit('no mma.h')", "1 of 2 {}: no mma.h."),
        ("""import sys; print("no rule", file=sys.stderr); print('["conv1d", null]')""", "1 of 2 {}: no rule."),
        ("""print('["conv1d", 2e-6]', flush=True)""", ""),
    ],
)
def test_comparison_ends_in_time_and_says_what_is_missing(tmp_path, code, note):
    errors = tmp_path / "errors"
    program = f"""print('["conv2d", 1e-6]', flush=True); input(); {code}"""
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=PIPE, stdout=PIPE, stderr=stderr, bufsize=1, text=True
        ) as process,
    ):
        started_at = time.monotonic()
        times = comparison.TvmTimer(process, 2, errors).time_functions(Deadline.after(2))
        process.kill()
    assert time.monotonic() - started_at < 10
    assert times.seconds["conv2d"] == 1e-6
    assert times.note == (note and f"TVM's own code was timed for {note.format('distinct convolutions')}")


def test_function_that_tvm_cannot_compile_costs_itself_alone(residual, monkeypatch, capsys):
    functions = comparison.extract_functions(residual[1], {"main": find_sites(residual[1]["main"])[0]})
    compile_module = tvm.compile

    def fail_for_one(mod, target):
        if any(str(variable.name_hint) == "conv2" for variable, _ in mod.functions_items()):
            raise ValueError("no rule")
        return compile_module(mod, target)

    monkeypatch.setattr(comparison.tvm, "compile", fail_for_one)
    parts = list(comparison._compile_parts(functions, tvm.target.Target("llvm")))
    compiled = {
        str(variable.name_hint): executable is not None
        for part, executable in parts
        for variable, _ in part.functions_items()
    }
    assert compiled == {"conv1": True, "conv2": False, "conv3": True}
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
