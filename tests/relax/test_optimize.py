"""Models that TVM compiles with our kernels compute what PyTorch computes, and the report says what is ours."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import tvm
from relax_models import CPU, Residual, UNet, differ, exported, randomized
from torch import nn
from tvm import relax

import tvmconv
import tvmconv.relax
from tvmconv.cost_model.recommend import recommend_configs
from tvmconv.devices import find_device
from tvmconv.errors import DeviceError, ModelError, TuningError
from tvmconv.logs.candidates import Candidate
from tvmconv.registry import find_schedule
from tvmconv.relax.candidate_queue import prefer_if_clearly_faster
from tvmconv.relax.compile_target import resolve_target
from tvmconv.relax.kernels import KernelFinder

X = torch.randn(2, 4, 10, 14, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def residual():
    model = randomized(Residual())
    return model, exported(model, X)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_epilogues_are_fused_and_equal_pytorch(residual, layout):
    model, mod = residual
    optimized = tvmconv.relax.optimize_with_report(mod, CPU, layout=layout)
    texts = [line.workload for line in optimized.report.lines]
    last = ",nhwc" if layout == "nhwc" else ""
    assert texts == [
        f"conv2d:2x4x10x14,8x4x3x3,s1,p1{last},bias,relu6",
        f"conv2d:2x8x10x14,8x1x3x3,s2,p1,g8{last},bias,silu",
        f"conv2d_transpose:2x8x5x7,8x2x4x4,s2,p1,g2{last},bias,add,hardswish",
    ]
    assert optimized.mod["main"].script().count("R.call_tir") == 3
    assert differ(optimized.compile(), model, X) < 1e-5


def test_chain_is_transposed_at_its_borders_only(residual):
    _, mod = residual
    text = tvmconv.relax.optimize(mod, CPU, layout="nhwc")["main"].script()
    assert text.count("permute_dims") == 2  # the input, which is also the residual, and the output


class Gated(nn.Module):
    """A pooling, a gate of the channels and a concatenation between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(20, 4, 1)

    def forward(self, x):
        y = nn.functional.max_pool2d(nn.functional.silu(self.first(x)), 3, 2, 1)
        gated = torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))) * y
        return self.last(torch.cat([gated, y, nn.functional.avg_pool2d(x, 3, 2, ceil_mode=True)[..., :4, :6]], 1))


def test_operations_between_channels_last_kernels_are_done_channels_last():
    model = randomized(Gated())
    optimized = tvmconv.relax.optimize_with_report(exported(model, X), CPU, layout="nhwc")
    assert optimized.report.num_replaced == 3
    text = optimized.mod["main"].script()
    assert text.count("permute_dims") == 3  # the input, its pooled and sliced copy, and the output
    assert text.count(' layout="NHWC"') == 1
    assert differ(optimized.compile(), model, X) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Conv1d(4, 6, 5, 2, 3, 2), nn.BatchNorm1d(6), nn.GELU()), torch.randn(2, 4, 21)),
        (nn.Sequential(nn.Conv3d(4, 6, 3, (1, 2, 1), 1, groups=2), nn.LeakyReLU(0.1)), torch.randn(2, 4, 4, 5, 7)),
        (nn.Sequential(nn.ConvTranspose1d(4, 6, 5, 3, 1, 1), nn.Tanh()), torch.randn(2, 4, 9)),
    ],
    ids=["conv1d", "conv3d", "conv1d_transpose"],
)
def test_other_ranks_equal_pytorch(model, x):
    model = randomized(model)
    optimized = tvmconv.relax.optimize_with_report(exported(model, x), CPU, layout="nhwc")
    assert optimized.report.num_replaced == 1
    assert optimized.report.lines[0].workload.count(",bias,") == 1
    assert differ(optimized.compile(), model, x) < 1e-5


def test_unet_has_two_transpositions_and_equals_pytorch():
    model, x = randomized(UNet(4)), torch.randn(1, 3, 12, 20)
    optimized = tvmconv.relax.optimize_with_report(exported(model, x), CPU, layout="nhwc")
    assert [line.workload.split(":")[0] for line in optimized.report.lines].count("conv2d_transpose") == 2
    assert optimized.report.num_replaced == 13
    assert optimized.mod["main"].script().count("permute_dims") == 2
    assert differ(optimized.compile(), model, x) < 1e-5


def test_pipeline_equals_pytorch(residual):
    model, mod = residual
    executable = tvm.compile(mod, "llvm", relax_pipeline="tvmconv")
    assert differ(executable, model, X) < 1e-5


def test_value_with_another_reader_is_not_fused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            y = self.conv(x)
            return torch.relu(y) + y * 2

    model = Model().eval()
    optimized = tvmconv.relax.optimize_with_report(exported(model, X), CPU)
    assert optimized.report.lines[0].workload.endswith("s1,p1,bias")
    assert differ(optimized.compile(), model, X) < 1e-5


@pytest.fixture(scope="module")
def symbolic():
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=8)},))
    return model, relax.frontend.torch.from_exported_program(program)


def test_symbolic_batch_stays_with_tvm_and_is_reported(symbolic):
    model, mod = symbolic
    optimized = tvmconv.relax.optimize_with_report(mod, CPU)
    (line,) = optimized.report.lines
    assert line.implementation == "TVM"
    assert line.reason == "a size is symbolic: expected numbers, or batch_sizes for a symbolic batch"
    assert differ(optimized.compile(), model, X) < 1e-5


def test_batch_sizes_have_kernels_of_their_own(symbolic):
    model, mod = symbolic
    optimized = tvmconv.relax.optimize_with_report(mod, CPU, batch_sizes=(2, 5))
    lines = {line.function: line for line in optimized.report.lines}
    assert {name: line.workload.split(",")[0] for name, line in lines.items()} == {
        "main_batch2": "conv2d:2x4x10x14",
        "main_batch5": "conv2d:5x4x10x14",
        "main_batch_any": "",
    }
    assert lines["main_batch_any"].reason == "the batch size is none of 2, 5"
    executable = optimized.compile()
    for batch in (2, 3, 5):
        assert differ(executable, model, torch.randn(batch, *X.shape[1:])) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((2, 2), "different positive"), ((0,), "different positive"), (3, "a list of integers"), (("a",), "a list of")],
)
def test_wrong_batch_sizes_are_refused(symbolic, sizes, message):
    with pytest.raises(TuningError, match=message):
        tvmconv.relax.optimize(symbolic[1], CPU, batch_sizes=sizes)


def test_exported_library_loads_in_a_fresh_process(residual, tmp_path):
    model, mod = residual
    tvmconv.relax.optimize_with_report(mod, "llvm").compile().export_library(str(tmp_path / "model.so"))
    np.save(tmp_path / "x.npy", X.numpy())
    program = """
import sys, numpy, tvm
from tvm import relax
machine = relax.VirtualMachine(tvm.runtime.load_module("model.so"), tvm.cpu())
y = machine["main"](tvm.runtime.tensor(numpy.load("x.npy")))
numpy.save("y.npy", (y if isinstance(y, tvm.runtime.Tensor) else y[0]).numpy())
assert not any(name.startswith("tvmconv") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    with torch.no_grad():
        expected = model(X).numpy()
    assert np.linalg.norm(np.load(tmp_path / "y.npy") - expected) < 1e-5 * np.linalg.norm(expected)


def test_report_as_text_json_and_html(residual):
    report = tvmconv.relax.optimize_with_report(residual[1], "llvm").report
    assert repr(report) == "<ModuleReport 3 of 3 convolutions by tvmconv>"
    assert "3 of 3 convolutions call functions of tvmconv." in str(report)
    assert len(json.loads(report.to_json())["lines"]) == 3
    assert "<table" in report._repr_html_()


def test_errors_name_what_is_accepted(residual):
    mod = residual[1]
    with pytest.raises(ModelError, match=r"expected a tvm\.IRModule"):
        tvmconv.relax.optimize("model", "llvm")
    with pytest.raises(TuningError, match="auto, nchw, nhwc"):
        tvmconv.relax.optimize(mod, "llvm", layout="chwn")
    with pytest.raises(TuningError, match="auto, nchw, nhwc"):
        tvmconv.relax.make_pipeline(layout="chwn")
    with pytest.raises(ModelError, match="no function has a symbolic size"):
        tvmconv.relax.optimize(mod, "llvm", batch_sizes=[1])
    with pytest.raises(DeviceError, match="omit seconds"):
        tvmconv.relax.optimize(mod, "llvm", seconds=1)
    with pytest.raises(DeviceError, match="architecture"):
        tvmconv.relax.optimize(mod, tvm.target.Target({"kind": "cuda", "arch": "sm_50"}))
    with pytest.raises(DeviceError, match="expected cuda, opencl or llvm"):
        tvmconv.relax.optimize(mod, tvm.target.Target("vulkan"))
    with pytest.raises(DeviceError, match="'nvidia/none'"):
        tvmconv.relax.optimize(mod, "nvidia/none")
    with pytest.raises(DeviceError, match="target None: expected a text such as sm_90"):
        tvmconv.relax.optimize(mod, None)


H100 = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize("target", ["nvidia/nvidia-h100", json.dumps(H100), H100])
def test_target_may_be_what_tvm_reads(target):
    resolved = resolve_target(target)
    assert resolved.target.attrs["arch"] == "sm_90a"
    assert resolved.device.text == "sm_90a"


def test_module_that_tvm_does_not_take_is_an_error_of_the_model():
    x, builder = relax.Var("x", relax.TensorType((1, 4, 2, 2), "float32")), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():  # of a convolution whose output is empty
            weight = relax.const(np.ones((8, 4, 3, 3), np.float32))
            output = builder.emit_output(relax.op.nn.conv2d(x, weight))
        builder.emit_func_output(output)
    with pytest.raises(ModelError, match="TVM's passes do not take the module"):
        tvmconv.relax.optimize(builder.get(), "llvm")


def test_opencl_kernels_are_those_of_build(residual):
    """The device code in TVM's executable is that of `tvmconv.build`, which PoCL runs and verifies."""
    optimized = tvmconv.relax.optimize_with_report(residual[1], "opencl:0")
    (device,) = (m for m in optimized.compile().mod.imports[0].imports if m.kind == "opencl")
    for line in optimized.report.lines:
        kernel = tvmconv.build(line.workload, line.implementation, config=line.config, device="opencl:0")
        assert kernel.verify().ok
        _, _, body = kernel.source.strip().partition("_ptr) {\n")  # the definition, behind its prototype
        assert body
        assert body in device.inspect_source()


def test_float16_model_has_its_epilogues_in_the_kernels(residual):
    model, mod = residual
    optimized = tvmconv.relax.optimize_with_report(tvmconv.relax.to_float16(mod), CPU, layout="nhwc")
    texts = [line.workload.partition("f16,nhwc,")[2] for line in optimized.report.lines]
    assert texts == ["bias,relu6", "bias,silu", "bias"]  # the residual is the input in float32
    assert differ(optimized.compile(), model, X) < 5e-3


def test_half_precision_chain_runs_channels_last_on_tensor_cores():
    chain = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 1)).eval()
    mod = tvmconv.relax.to_float16(exported(chain, torch.randn(1, 64, 14, 14)))
    optimized = tvmconv.relax.optimize_with_report(mod, "sm_80")
    assert [line.workload for line in optimized.report.lines] == [
        "conv2d:1x64x14x14,64x64x3x3,s1,p1,f16,nhwc,bias,relu",
        "conv2d:1x64x14x14,64x64x1x1,s1,p0,f16,nhwc,bias",
    ]
    assert {line.implementation for line in optimized.report.lines} == {"mma_sync"}
    assert optimized.mod["main"].script().count("R.permute_dims") == 2
    captured = "main_cuda_graph_capture"  # the function with launches that TVM captures
    assert captured in optimized.compile().as_text()
    assert captured not in optimized.compile(cuda_graph=False).as_text()


def test_weight_that_is_a_parameter_is_packed_and_scaled_by_relax():
    weight, scale = torch.randn(4, 3, 3, 3), torch.rand(1, 6, 1, 1) + 0.5
    x, k = (relax.Var(name, relax.TensorType(tuple(t.shape), "float32")) for name, t in (("x", X), ("k", weight)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, k]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d_transpose(x, k, strides=2, groups=2))
            out = builder.emit_output(relax.op.multiply(y, relax.const(scale.numpy(), "float32")))
        builder.emit_func_output(out)
    optimized = tvmconv.relax.optimize_with_report(builder.get(), CPU, layout="nhwc")
    assert optimized.report.num_replaced == 1

    def model(x, k):
        return nn.functional.conv_transpose2d(x, k, stride=2, groups=2) * scale

    assert differ(optimized.compile(), model, X, weight) < 1e-5


def test_bfloat16_chain_compiles_for_tensor_cores():
    x = relax.Var("x", relax.TensorType((1, 64, 14, 14), "bfloat16"))
    weight = relax.const(np.ones((64, 64, 3, 3), np.float32), "bfloat16")
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, weight, padding=1))
            out = builder.emit_output(relax.op.nn.relu(y))
        builder.emit_func_output(out)
    optimized = tvmconv.relax.optimize_with_report(builder.get(), "sm_80")
    (line,) = optimized.report.lines
    assert (line.workload, line.implementation) == (
        "conv2d:1x64x14x14,64x64x3x3,s1,p1,bf16,nhwc,relu",
        "mma_sync",
    )
    optimized.compile()


@pytest.mark.slow
def test_a_kernel_found_before_a_search_is_found_again_after_it(tmp_path):
    w = tvmconv.parse("conv2d:1x8x9x9,8x8x3x3,s1,p1,relu")
    finder = KernelFinder(resolve_target("opencl:0"), tmp_path / "log.jsonl", creates_log=True)
    before = finder.find(w).config_source
    finder.search({w: 1}, seconds=15)
    assert finder.find(w).config_source != before


@pytest.mark.parametrize(("slowdown", "source"), [(6.0, "predicted"), (1.1, "tuned")])
def test_prediction_precedes_the_slow_config_of_a_short_search(slowdown, source):
    workload = tvmconv.parse("conv2d:1x64x8x8,64x64x1x1,f16,nhwc")
    prediction = recommend_configs(workload, find_device("sm_90"))[0]
    measured = Candidate(find_schedule(workload, "mma_sync"), {}, "tuned", prediction.seconds * slowdown)
    candidates = list(prefer_if_clearly_faster(prediction, workload, iter([measured])))
    assert candidates[0].config_source == source
    assert candidates[-1] is measured
