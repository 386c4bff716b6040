"""TVM's own code for what a kernel replaces: the functions that are timed, and the process that times them."""

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
        assert timer.time_functions(Deadline.after(60)) == {}


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
