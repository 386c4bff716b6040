"""Models that TVM's importers refuse as they are: 16 bits, transposed 3-D convolutions, computed constants of ONNX."""

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
import tvm
from onnx import TensorProto, helper, numpy_helper
from relax_models import CPU, differ, randomized
from torch import nn

import tvmconv.relax
from tvmconv.cli import main
from tvmconv.compiler import nvrtc
from tvmconv.models.onnx_folding import fold_constants
from tvmconv.relax.layouts import is_truncating


@pytest.mark.slow
def test_half_precision_model_equals_pytorch():
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    model, x = randomized(nn.Sequential(*layers)), torch.randn(1, 3, 6, 6)
    program = torch.export.export(model.half(), (x.half(),))
    optimized = tvmconv.relax.optimize_with_report(tvmconv.relax.from_exported_program(program), CPU)
    assert [line.workload for line in optimized.report.lines] == ["conv2d:1x3x6x6,8x3x3x3,s1,p0,f16,bias,relu"]
    assert differ(optimized.compile(), model, x.half()) < 5e-3


def test_symbolic_model_in_float16_has_normalizations_before_convolutions():
    model = randomized(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8)))
    x, batch = torch.randn(3, 3, 8, 10), torch.export.Dim("batch", min=1, max=8)
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,), dynamic_shapes=({0: batch},)))
    executable = tvmconv.relax.optimize_with_report(tvmconv.relax.to_float16(mod), CPU, batch_sizes=(3,)).compile()
    for size in (2, 3):
        assert differ(executable, model, x[:size]) < 5e-3


def test_bfloat16_model_and_transposed_volume_are_imported():
    layers = nn.ConvTranspose3d(3, 8, 2, 2, groups=1), nn.BatchNorm3d(8), nn.SiLU(), nn.Conv3d(8, 2, 1)
    model, x = nn.Sequential(*layers).eval().bfloat16(), torch.randn(1, 3, 2, 3, 4).bfloat16()
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    optimized = tvmconv.relax.optimize_with_report(mod, CPU, layout="nhwc")
    assert [line.workload for line in optimized.report.lines] == [
        "conv3d_transpose:1x3x2x3x4,3x8x2x2x2,s2,p0,bf16,nhwc,bias,silu",
        "conv3d:1x8x4x6x8,2x8x1x1x1,s1,p0,bf16,nhwc,bias",
    ]


@pytest.mark.parametrize(("activation", "name"), [(nn.Hardswish(), "hardswish"), (nn.SiLU(), "silu")])
def test_activations_in_float32_between_casts_are_fused(activation, name):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), activation).eval().half(), torch.randn(1, 3, 4, 4).half()
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    optimized = tvmconv.relax.optimize_with_report(mod, CPU)
    assert optimized.report.lines[0].workload == f"conv2d:1x3x4x4,4x3x1x1,s1,p0,f16,bias,{name}"


@pytest.mark.parametrize(
    "layer",
    [nn.SELU(), nn.ELU(0.5), nn.Upsample(size=(13, 5)), nn.Upsample(scale_factor=1.5), nn.Upsample(scale_factor=2)],
)
def test_scaled_activations_and_nearest_pixels_equal_pytorch(layer):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), layer).eval(), torch.randn(1, 3, 8, 6)
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    assert differ(tvmconv.relax.optimize_with_report(mod, CPU).compile(), model, x) < 1e-5


def make_padded_model():
    """A padding from a shape and constants, around a convolution whose weight is the product of constants."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 2, 5, 6]), ("y", None)))
    weight = np.random.default_rng(0).standard_normal((4, 2, 3, 3)).astype(np.float32)
    arrays = {"weight": weight, "two": np.float32(2), "index": np.array([1, 1], np.int64), "zeros": np.zeros(4, int)}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "index"], ["channels"]),  # 2, 2
        helper.make_node("Concat", ["zeros", "zeros_2", "channels"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("Mul", ["weight", "two"], ["factor"]),
        helper.make_node("Conv", ["padded", "factor"], ["y"], pads=[1, 1, 1, 1]),
    ]
    arrays["zeros_2"] = np.zeros(2, np.int64)
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "padded", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), weight


def test_computed_constants_of_onnx_are_folded():
    model, weight = make_padded_model()
    folded = fold_constants(model)
    assert folded.graph.node[-1].input[0] == "x"  # the padding has no other reader
    assert len(model.graph.node) == 6
    optimized = tvmconv.relax.optimize_with_report(tvmconv.relax.from_onnx(model), CPU)
    assert [line.workload for line in optimized.report.lines] == ["conv2d:1x2x5x6,4x2x3x3,s1,p1x1x3x3"]
    x = torch.randn(1, 2, 5, 6)
    expected = nn.functional.conv2d(nn.functional.pad(x, (0, 2, 0, 2)), torch.from_numpy(weight * 2), None, 1, 1)
    machine = tvm.relax.VirtualMachine(optimized.compile(), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x.numpy())).numpy()
    assert np.abs(found - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize("op", ["RandomNormalLike", "Unknown"])
def test_results_that_are_no_constants_stay(op):
    node = helper.make_node(op, ["weight"], ["sum"])
    weight = numpy_helper.from_array(np.ones(3, np.float32), "weight")
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("y", "sum")]
    graph = helper.make_graph([node, helper.make_node("Neg", ["sum"], ["y"])], "g", [], results[:1], [weight])
    folded = fold_constants(helper.make_model(graph))
    assert [node.op_type for node in folded.graph.node] == [op, "Neg"]


def test_command_reads_weights_in_a_file_of_their_own(tmp_path, capsys):
    model, _ = make_padded_model()
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, size_threshold=0)
    assert main(["relax", str(path), "--target", "llvm", "--csv"]) == 0
    assert "conv2d:1x2x5x6,4x2x3x3,s1,p1x1x3x3" in capsys.readouterr().out


PADDED = [
    ("Conv", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, "s2,p1x0x1x1,relu", (1, 6, 5, 5)),
    ("Conv", {"auto_pad": "SAME_LOWER", "strides": [2, 2]}, "s2,p1x1x1x0,relu", (1, 6, 5, 5)),
    ("Conv", {"auto_pad": "SAME_UPPER", "dilations": [2, 1]}, "s1,p2x1,d2x1,relu", (1, 6, 9, 10)),
    ("ConvTranspose", {"auto_pad": "SAME_UPPER", "strides": [2, 2]}, "s2,p0x0x1x1,relu", (1, 6, 18, 20)),
    ("ConvTranspose", {"output_shape": [18, 21], "strides": [2, 2]}, "s2,p1x0x0x0,relu", (1, 6, 18, 21)),
]


@pytest.mark.parametrize(("op", "attributes", "text", "sizes"), PADDED)
def test_automatic_paddings_of_onnx_are_those_of_the_kernel(op, attributes, text, sizes):
    """TVM's importer pads by a function of its own, and ignores the size of a transposed convolution's output."""
    nodes = [helper.make_node(op, ["x", "weight"], ["sum"], **attributes), helper.make_node("Relu", ["sum"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 4, 9, 10]), ("y", None)))
    weight = numpy_helper.from_array(np.ones((6, 4, 3, 3) if op == "Conv" else (4, 6, 3, 3), np.float32), "weight")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    optimized = tvmconv.relax.optimize_with_report(tvmconv.relax.from_onnx(model), CPU)
    assert [line.workload.split(",", 2)[2] for line in optimized.report.lines] == [text]
    assert tuple(map(int, optimized.mod["main"].ret_ty.shape)) == sizes


def test_automatic_padding_of_a_mean_and_a_symbolic_batch():
    """The zeros around the pixels count in no mean. Sizes of a batch need not be known."""
    nodes = [
        helper.make_node("AveragePool", ["x"], ["mean"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
        helper.make_node("Conv", ["mean", "weight"], ["y"], auto_pad="SAME_UPPER"),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", ["n", 4, 9, 10]), ("y", None)))
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((6, 4, 3, 3), np.float32), "weight")
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    mod = tvmconv.relax.from_onnx(model)
    assert "call_tir" not in mod["main"].script()
    optimized = tvmconv.relax.optimize_with_report(mod, CPU, batch_sizes=(2,))
    array = np.random.default_rng(1).standard_normal((2, 4, 9, 10), np.float32)
    machine = tvm.relax.VirtualMachine(optimized.compile(), tvm.cpu())
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": array})[0]
    assert np.allclose(machine["main"](tvm.runtime.tensor(array)).numpy(), expected, atol=1e-5)


def test_model_that_tvm_refuses_is_an_error_of_one_line(tmp_path, capsys):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 5, 9, 9]), ("y", None)))
    weight = numpy_helper.from_array(np.ones((8, 4, 3, 3), np.float32), "weight")  # of four channels, not five
    graph = helper.make_graph([helper.make_node("Conv", ["x", "weight"], ["y"])], "g", [x], [y], [weight])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    assert main(["relax", str(path), "--target", "sm_90"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "TVM cannot import" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason="NVRTC is missing")
def test_tf32_is_an_option_and_weights_are_compensated():
    model, x = nn.Conv2d(64, 64, 3, padding=1, bias=False).eval(), torch.randn(1, 64, 14, 14)
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    optimized = tvmconv.relax.optimize_with_report(mod, "sm_90", tf32=True)
    (line,) = optimized.report.lines
    assert line.workload == "conv2d:1x64x14x14,64x64x3x3,s1,p1,tf32,nhwc"
    workload = tvmconv.parse(line.workload)
    assert [is_truncating(workload, name) for name in ("mma_sync", "hopper", "implicit_gemm")] == [True, True, False]
    weights = []
    tvm.relax.analysis.post_order_visit(
        optimized.mod["main"],
        lambda node: weights.append(node.value.numpy()) if isinstance(node, tvm.ir.GenericConst) else None,
    )
    (weight,) = (array for array in weights if array.ndim == 4)
    exact = np.moveaxis(model.weight.detach().numpy(), 1, -1)
    assert not (weight.view(np.uint32) & 0x1FFF).any()
    assert abs(np.abs(weight).sum() / np.abs(exact).sum() - 1 - 2**-11 / (2 * np.log(2))) < 2e-5
    assert "tf32" not in tvmconv.relax.optimize_with_report(mod, "sm_90").report.lines[0].workload


@pytest.mark.parametrize("is_decomposed", [False, True])
@pytest.mark.parametrize(("is_affine", "tracks"), [(False, False), (True, False), (True, True)])
def test_instance_norms_have_the_epsilon_of_the_model(is_affine, tracks, is_decomposed):
    norm = nn.InstanceNorm2d(5, eps=0.3, affine=is_affine, track_running_stats=tracks)
    model, x = nn.Sequential(nn.Conv2d(3, 5, 1), norm), torch.randn(2, 3, 4, 4)
    for parameter in (*model.parameters(), *model.buffers()):
        parameter.data = parameter.data + torch.rand(parameter.shape)
    program = torch.export.export(model.eval(), (x,))
    mod = tvmconv.relax.from_exported_program(program, run_ep_decomposition=is_decomposed)
    assert differ(tvmconv.relax.optimize_with_report(mod, CPU).compile(), model, x) < 1e-5


class Norms(nn.Module):
    """Normalizations that TVM 0.27 does not compile in bfloat16."""

    def __init__(self):
        super().__init__()
        self.conv, self.instance = nn.Conv2d(3, 6, 1), nn.InstanceNorm2d(6, affine=True)
        self.groups = nn.Sequential(nn.GroupNorm(2, 6, affine=False, eps=0.2), nn.GroupNorm(3, 6))
        self.layer = nn.LayerNorm(6)

    def forward(self, x):
        y = self.groups(self.instance(self.conv(x.bfloat16())))
        return self.layer(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).float()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_normalizations_in_bfloat16_equal_pytorch(layout):
    model, x = Norms().eval().bfloat16(), torch.randn(2, 3, 5, 4)
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    optimized = tvmconv.relax.optimize_with_report(mod, CPU, layout=layout)
    assert differ(optimized.compile(), model, x) < 2e-2


@pytest.mark.parametrize("is_half", [False, True])
def test_circular_padding_is_a_concatenation(is_half):
    layers = nn.Conv2d(3, 8, 3, padding=(2, 0), padding_mode="circular"), nn.ReLU(), nn.Conv2d(8, 4, 1)
    model, x = nn.Sequential(*layers).eval(), torch.randn(1, 3, 6, 5)
    mod = tvmconv.relax.from_exported_program(torch.export.export(model, (x,)))
    optimized = tvmconv.relax.optimize_with_report(tvmconv.relax.to_float16(mod) if is_half else mod, CPU)
    assert optimized.report.num_replaced == 2
    assert differ(optimized.compile(), model, x) < (5e-3 if is_half else 1e-5)


@pytest.mark.parametrize("limits", [{"min": -0.5}, {"max": 0.5}])
def test_one_limit_in_bfloat16_is_no_clip_with_infinity(limits):
    class Limited(nn.Module):
        def forward(self, x):
            return (x * 2).clamp(**limits)

    mod = tvmconv.relax.from_exported_program(torch.export.export(Limited(), (torch.randn(3, 4).bfloat16(),)))
    optimized = tvmconv.relax.optimize(mod, "sm_90")
    assert "clip" not in optimized["main"].script()
    optimized = tvmconv.relax.optimize_with_report(mod, CPU)
    assert "inf" not in optimized.mod["main"].script()
