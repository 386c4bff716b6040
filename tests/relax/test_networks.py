"""Whole networks of both importers: how many convolutions become ours, what they compute, and whether they compile."""

import io
import os
import subprocess
import sys
from ctypes.util import find_library

import pytest
import torch
from relax_models import (
    CPU,
    DenseBlock,
    UNet,
    UNet3d,
    WaveNet,
    differ,
    exported,
    make_mobilenet_v2,
    make_resnet18,
    randomized,
)
from torch import nn
from tvm import relax
from tvm.ir import Call

import tvmconv.relax
from tvmconv.compiler.cuda_environment import make_cuda_environment
from tvmconv.relax.candidate_queue import CandidateQueue
from tvmconv.relax.compile_target import resolve_target
from tvmconv.relax.kernels import KernelFinder
from tvmconv.relax.optimize import plan_functions, prepare_module

onnx = pytest.importorskip("onnx")
from tvm.relax.frontend.onnx import from_onnx  # noqa: E402
from tvm.relax.frontend.torch import from_exported_program  # noqa: E402

NETWORKS = {"resnet18": make_resnet18, "mobilenet_v2": make_mobilenet_v2, "unet": lambda: randomized(UNet(8))}
NUM_CONVOLUTIONS = {"resnet18": 20, "mobilenet_v2": 52, "unet": 13}
NUM_LINEAR = {"resnet18": 1, "mobilenet_v2": 1, "unet": 0}


def imported(source, model, x, importers=(from_exported_program, from_onnx)):
    """A model as a module of Relax, by one of the importers, which are TVM's unless others are given."""
    if source == "torch":
        return importers[0](torch.export.export(model, (x,)))
    file = io.BytesIO()
    with pytest.warns(DeprecationWarning, match="legacy"):  # the exporter that needs no further package
        torch.onnx.export(model, (x,), file, dynamo=False, opset_version=17)
    return importers[1](onnx.load_from_string(file.getvalue()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["torch", "onnx"])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_equal_pytorch(network, source):
    model, x = NETWORKS[network](), torch.randn(1, 3, 32, 32)
    mod = imported(source, model, x)
    optimized = tvmconv.relax.optimize_with_report(mod, CPU)
    assert optimized.report.num_replaced == len(optimized.report.lines) == NUM_CONVOLUTIONS[network]
    others = {"relax.add", "relax.maximum", "relax.minimum", "relax.clip", "relax.nn.relu", "relax.nn.conv2d"}
    assert len(list_calls(optimized.mod, others)) == NUM_LINEAR[network]  # the bias of the linear layer
    assert differ(optimized.compile(), model, x) < 1e-5
    num_convolutions = NUM_CONVOLUTIONS[network] + NUM_LINEAR[network]
    for arch in ("sm_80", "sm_90"):
        assert count_kernels(mod, resolve_target(arch)) == num_convolutions, arch


def count_kernels(mod, target):
    """How many convolutions and linear layers have a schedule and a config on a target. Nothing is compiled."""
    planned, _ = plan_functions(prepare_module(mod, has_kernels=True), target, "auto")
    workloads = [workload for sites in planned.values() for _, workload in sites]
    logs = KernelFinder(target, None).read_logs()
    return sum(workloads.count(each) for each in set(workloads) if CandidateQueue(logs, each, target.device).advance())


FAMILIES = {
    "unet3d": (UNet3d, (1, 8, 8, 10), 9),
    "wavenet": (WaveNet, (1, 37), 14),
    "densenet": (DenseBlock, (8, 9, 11), 7),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("source", ["torch", "onnx"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_networks_equal_pytorch(family, source):
    make, shape, num_convolutions = FAMILIES[family]
    model, x = randomized(make()), torch.randn(2, *shape)
    mod = imported(source, model, x, (tvmconv.relax.from_exported_program, tvmconv.relax.from_onnx))
    for layout in ("nchw", "nhwc"):
        optimized = tvmconv.relax.optimize_with_report(mod, CPU, layout=layout)
        assert optimized.report.num_replaced == len(optimized.report.lines) == num_convolutions
        assert differ(optimized.compile(), model, x) < 1e-4


def list_calls(mod, names):
    """The calls of some operations in the main function."""
    calls = []

    def visit(expr):
        if isinstance(expr, Call) and getattr(expr.op, "name", "") in names:
            calls.append(expr)

    relax.analysis.post_order_visit(mod["main"], visit)
    return calls


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_limits_of_onnx_are_part_of_the_kernel(dtype):
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 1), nn.Hardtanh(min_val=-0.5)).eval()
    x = torch.randn(1, 4, 9, 9)
    mod = imported("onnx", model, x)
    if dtype == "float16":
        mod = tvmconv.relax.to_float16(mod)
    optimized = tvmconv.relax.optimize_with_report(mod, CPU)
    first, last = (line.workload for line in optimized.report.lines)
    assert first.endswith(",bias,relu6")
    assert last.endswith(",bias")  # no epilogue has these limits
    assert differ(optimized.compile(), model, x) < (1e-5 if dtype == "float32" else 5e-3)


def test_residual_may_be_a_batch_normalization():
    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.shortcut, self.shortcut_norm = nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x):
            return torch.relu(self.norm(self.conv(x)) + self.shortcut_norm(self.shortcut(x)))

    model, x = randomized(Shortcut()), torch.randn(1, 4, 9, 9)
    for layout in ("nchw", "nhwc"):
        optimized = tvmconv.relax.optimize_with_report(exported(model, x), CPU, layout=layout)
        assert optimized.report.num_replaced == 2
        assert not list_calls(optimized.mod, {"relax.nn.conv2d", "relax.nn.batch_norm"})
        assert differ(optimized.compile(), model, x) < 1e-5


LOAD = """
import sys, tvm
module = tvm.runtime.load_module("model.so")
assert module.implements_function("vm_load_executable")
assert not any(name.startswith("tvmconv") for name in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", ["torch", "onnx"])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_compile_for_cuda(network, source, arch, tmp_path):
    mod = imported(source, NETWORKS[network](), torch.randn(1, 3, 224, 224))
    optimized = tvmconv.relax.optimize_with_report(mod, arch)
    num_convolutions = NUM_CONVOLUTIONS[network] + NUM_LINEAR[network]
    assert len(optimized.report.lines) == optimized.report.num_replaced == num_convolutions, str(optimized.report)
    calls = list_calls(optimized.mod, {"relax.call_dps_packed"})
    assert len(calls) == num_convolutions
    assert all(isinstance(argument.ty, relax.TensorType) for call in calls for argument in call.args[1])
    optimized.compile().export_library(str(tmp_path / "model.so"))
    assert b"__global__" not in (tmp_path / "model.so").read_bytes()  # nothing is left to compile
    if find_library("cuda"):  # TVM's loader of CUDA kernels needs the driver
        environment = {**os.environ, **make_cuda_environment()}
        subprocess.run([sys.executable, "-c", LOAD], cwd=tmp_path, check=True, env=environment)
