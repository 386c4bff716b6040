"""Weights are packed when a model is compiled, by the launches that a kernel has for them."""

import numpy as np
import pytest
import torch
from relax_models import exported
from torch import nn

import tvmconv as tc
import tvmconv.relax
from tvmconv import registry
from tvmconv.compiler import nvrtc
from tvmconv.emulator.execution import execute
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.logs.candidates import TUNED, Candidate
from tvmconv.relax.packing import pack_weight, remove_prepack_kernels
from tvmconv.verification import Problem

REASON = nvrtc.explain_unavailability()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_kernel_with_a_packed_weight_computes_the_convolution():
    problem = Problem(tc.parse("conv2d:2x5x7x9,6x5x3x3,s1,p1,bias"))
    kernel = tc.build(problem.workload, "winograd", arch="sm_90")
    packed = remove_prepack_kernels(kernel.executable)
    assert (packed.input_indices, len(packed.executable.kernels)) == ((0, 2), 3)  # X and bias, but not K
    workspace = pack_weight(kernel.lowered_module, problem.inputs[1])
    values = [problem.inputs[index] for index in packed.input_indices]
    values += [workspace[index] for index in packed.packed_indices]
    arrays = [GlobalArray.from_values(f"input{index}", value) for index, value in enumerate(values)]
    results = [packed.executable.output, *packed.executable.workspace]
    arrays += [GlobalArray.allocate_unwritten("result", np.dtype(r.dtype), int(np.prod(r.shape))) for r in results]
    for lowered, compiled in zip(kernel.kernels[1:], packed.executable.kernels, strict=True):
        execute(lowered.function, lowered.launch, [arrays[index] for index in compiled.arguments])
    output = arrays[len(values)].values.reshape(packed.executable.output.shape)
    assert problem.check(output).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_constant", [True, False])
def test_packed_weight_is_a_constant_of_the_model(monkeypatch, is_constant):
    def iterate_candidates(_logs, workload, *_):
        yield Candidate(registry.find_schedule(workload, "winograd"), {}, TUNED)

    monkeypatch.setattr("tvmconv.relax.candidate_queue.iterate_candidates", iterate_candidates)
    model = nn.Conv2d(5, 6, 3, padding=1).eval()
    if is_constant:
        mod = exported(model, torch.randn(1, 5, 7, 9))
    else:
        mod = exported(_Parameters(), torch.randn(1, 5, 7, 9), model.weight.detach())
    optimized = tvmconv.relax.optimize_with_report(mod, "sm_90")
    assert optimized.report.lines[0].implementation == "winograd", str(optimized.report)
    text = optimized.mod["main"].script()
    assert ('_packed"' in text) == is_constant  # the name of the function
    optimized.compile()


class _Parameters(nn.Module):
    def forward(self, x, weight):
        return nn.functional.conv2d(x, weight, padding=1)
