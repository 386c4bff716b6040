"""Exported libraries on a GPU: a fresh process without tvmconv runs them, and finds what PyTorch finds on the CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from relax_models import UNet, randomized
from torch import nn

import tvmconv.relax
from tvmconv.compiler.cuda_environment import make_cuda_environment

pytestmark = pytest.mark.gpu

CALL = """
import numpy, sys, tvm
from tvm import relax

machine = relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cuda(0))
for name in sys.argv[1:]:
    x = tvm.runtime.tensor(numpy.load(f"{name}.npy"), tvm.cuda(0))
    for _ in range(3):  # the later calls replay a CUDA graph
        y = machine["main"](x)
    numpy.save(f"{name}-out.npy", (y if isinstance(y, tvm.runtime.Tensor) else y[0]).numpy())
assert not any(each.startswith("tvmconv") for each in sys.modules)
"""


class Between(nn.Module):
    """A network in another dtype with inputs and outputs in float32."""

    def __init__(self, network, dtype):
        super().__init__()
        self.network, self.dtype = network.to(dtype), dtype

    def forward(self, x):
        return self.network(x.to(self.dtype)).float()


def call_library(optimized, folder, inputs, **options):
    """The outputs of a library in a fresh process."""
    optimized.compile(**options).export_library(str(folder / "model.so"))
    for name, x in inputs.items():
        np.save(folder / f"{name}.npy", x.numpy())
    environment = {**os.environ, **make_cuda_environment()}
    done = subprocess.run(
        [sys.executable, "-c", CALL, *inputs], cwd=folder, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {name: np.load(folder / f"{name}-out.npy") for name in inputs}


def compute_error(found, model, x):
    with torch.no_grad():
        expected = model(x).numpy()
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("tf32", 3e-3), ("f16", 5e-3), ("bf16", 3e-2)])
def test_libraries_equal_pytorch(dtype, bound, cuda_graph, tmp_path):
    model, x = randomized(UNet(24)), torch.randn(3, 3, 44, 36)
    program = torch.export.export(Between(randomized(UNet(24)), torch.bfloat16) if dtype == "bf16" else model, (x,))
    mod = tvmconv.relax.from_exported_program(program)
    mod = tvmconv.relax.to_float16(mod) if dtype == "f16" else mod
    optimized = tvmconv.relax.optimize_with_report(mod, "cuda:0", tf32=dtype == "tf32")
    assert optimized.report.num_replaced == len(optimized.report.lines) == 13, str(optimized.report)
    found = call_library(optimized, tmp_path, {"x": x}, cuda_graph=cuda_graph)
    assert compute_error(found["x"], model, x) < bound


def test_batches_are_dispatched(tmp_path):
    model = randomized(nn.Sequential(nn.Conv2d(8, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)))
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(2, 8, 15, 17),), dynamic_shapes=({0: batch},))
    mod = tvmconv.relax.from_exported_program(program)
    optimized = tvmconv.relax.optimize_with_report(mod, "cuda:0", batch_sizes=(1, 16))
    inputs = {f"x{size}": torch.randn(size, 8, 15, 17) for size in (1, 3, 16)}
    for name, found in call_library(optimized, tmp_path, inputs).items():
        assert compute_error(found, model, inputs[name]) < 1e-5
