"""Exported libraries on a GPU: a fresh process without tvmconv runs them, and finds what PyTorch finds on the CPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from relax_models import randomized
from torch import nn

import tvmconv.relax
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.measure.workers.pool import keep_workers_alive

pytestmark = pytest.mark.gpu

CALL = """
import numpy, pathlib, sys, tvm
from tvm import relax

for path in sorted(pathlib.Path().glob("*.so")):
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cuda(0))
    for file in sorted(pathlib.Path().glob(f"{path.stem}-[0-9]*.npy")):
        x = tvm.runtime.tensor(numpy.load(file), tvm.cuda(0))
        for _ in range(3):  # the later calls replay a CUDA graph
            y = machine["main"](x)
        numpy.save(f"output-{file.name}", (y if isinstance(y, tvm.runtime.Tensor) else y[0]).numpy())
assert not any(each.startswith("tvmconv") for each in sys.modules)
"""
BOUNDS = {"f32": 1e-5, "launches": 1e-5, "tf32": 3e-3, "f16": 5e-3, "bf16": 3e-2, "batches": 1e-5}
BATCHES = {"batches": (1, 3, 16)}  # of which TVM computes 3


class Network(nn.Module):
    """Wide and depthwise convolutions, a transposed one, a residual and a concatenation, between inputs and outputs in
    float32.
    """

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 72, 3, padding=1, bias=False), nn.BatchNorm2d(72), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(72, 72, 3, 2, 1, groups=72), nn.BatchNorm2d(72), nn.SiLU())
        self.second = nn.Conv2d(72, 72, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(72, 40, 2, 2), nn.Conv2d(112, 24, 1)
        self.dtype = dtype

    def forward(self, x):
        first = self.first(x.to(self.dtype))
        y = self.depthwise(first)
        y = torch.relu(self.second(y) + y)
        return self.last(torch.cat([self.up(y), first], 1)).float()


def make_model(name):
    torch.manual_seed(0)
    model = randomized(Network(torch.bfloat16 if name == "bf16" else torch.float32))
    return model.bfloat16() if name == "bf16" else model


def compile_model(name, x):
    batch = {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=64)},)} if name in BATCHES else {}
    mod = tvmconv.relax.from_exported_program(torch.export.export(make_model(name), (x,), **batch))
    mod = tvmconv.relax.to_float16(mod) if name == "f16" else mod
    sizes = (1, 16) if name in BATCHES else ()
    optimized = tvmconv.relax.optimize_with_report(mod, "cuda:0", tf32=name == "tf32", batch_sizes=sizes)
    assert optimized.report.num_replaced == 5 * max(len(sizes), 1), str(optimized.report)
    return optimized.compile(cuda_graph=name != "launches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a library for each name, its inputs, and the outputs that a process has found."""
    folder = tmp_path_factory.mktemp("gpu")
    with keep_workers_alive():
        for name in BOUNDS:
            inputs = [torch.randn(size, 3, 28, 22) for size in BATCHES.get(name, (2,))]
            compile_model(name, inputs[-1]).export_library(str(folder / f"{name}.so"))
            for x in inputs:
                np.save(folder / f"{name}-{len(x)}.npy", x.numpy())
    environment = {**os.environ, **make_cuda_environment()}
    done = subprocess.run(
        [sys.executable, "-c", CALL], cwd=folder, capture_output=True, text=True, env=environment, check=False
    )
    (folder / "errors").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("name", BOUNDS)
def test_libraries_equal_pytorch(name, folder):
    for size in BATCHES.get(name, (2,)):
        x, output = folder / f"{name}-{size}.npy", folder / f"output-{name}-{size}.npy"
        assert output.exists(), (folder / "errors").read_text()
        with torch.no_grad():
            expected = make_model("f32")(torch.from_numpy(np.load(x))).numpy()
        found = np.load(output)
        assert found.shape == expected.shape
        assert np.linalg.norm(found - expected) < BOUNDS[name] * np.linalg.norm(expected)
