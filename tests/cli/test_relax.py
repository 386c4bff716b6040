"""`tvmconv relax` compiles ONNX models and says what runs."""

import json

import numpy as np
import pytest

from tvmconv.cli import main

onnx = pytest.importorskip("onnx")


@pytest.fixture
def model(tmp_path):
    """A convolution with ReLU, of a dynamic batch."""
    weight = onnx.numpy_helper.from_array(np.ones((8, 4, 3, 3), np.float32), "weight")
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", channels, 6, 6])
        for name, channels in (("x.1", 4), ("y", 8))
    )
    conv = onnx.helper.make_node("Conv", ["x.1", "weight"], ["sum"], pads=[1, 1, 1, 1])
    nodes = [conv, onnx.helper.make_node("Relu", ["sum"], ["y"])]
    graph = onnx.helper.make_graph(nodes, "model", [x], [y], [weight])
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def test_library_is_written_and_runs(model, tmp_path, capsys, recwarn):
    library = tmp_path / "model.so"
    assert main(["relax", model, "--target", "llvm", "--input", "2x4x6x6", "--json", "-o", str(library)]) == 0
    assert not [warning for warning in recwarn if "Renaming" in str(warning.message)]
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["workload"] == "conv2d:2x4x6x6,8x4x3x3,s1,p1,relu"

    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    y = machine["main"](tvm.runtime.tensor(np.ones((2, 4, 6, 6), np.float32)))
    assert y.numpy()[0, 0, 0, 0] == 16  # 2 × 2 taps of 4 channels lie inside


def test_float16_inside_keeps_inputs_and_outputs(model, tmp_path, capsys):
    command = ["relax", model, "--target", "llvm", "--input", "2x4x6x6", "--float16", "--json"]
    assert main([*command, "-o", str(tmp_path / "model.so")]) == 0
    (line,) = json.loads(capsys.readouterr().out)["lines"]
    assert line["workload"] == "conv2d:2x4x6x6,8x4x3x3,s1,p1,f16,relu"

    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "model.so")), tvm.cpu())
    y = machine["main"](tvm.runtime.tensor(np.ones((2, 4, 6, 6), np.float32))).numpy()
    assert (y.dtype, y[0, 0, 1, 1]) == (np.float32, 36)


def test_dynamic_batch_has_kernels_for_the_given_sizes(model, capsys):
    assert main(["relax", model, "--target", "sm_90", "--batch-size", "2", "--batch-size", "3", "--json"]) == 0
    lines = {line["function"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert lines["main_batch3"]["workload"] == "conv2d:3x4x6x6,8x4x3x3,s1,p1,relu"
    assert lines["main_batch_any"]["implementation"] == "TVM"
    assert main(["relax", model, "--target", "llvm", "--input", "2x4x6x6", "--batch-size", "2"]) == 2
    assert "no function has a symbolic size" in capsys.readouterr().err


def test_errors_of_the_command_line(model, tmp_path, capsys):
    assert main(["relax", str(tmp_path / "none.onnx"), "--target", "llvm"]) == 2
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    assert main(["relax", str(tmp_path / "bad.onnx"), "--target", "llvm"]) == 2
    assert "is not an ONNX model" in capsys.readouterr().err
    assert main(["relax", model, "--target", "sm_1", "--input", "2x4x6x6"]) == 2
    assert "unknown device" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_branches_of_a_model_run(tmp_path, layout):
    helper, dtype = onnx.helper, onnx.TensorProto.FLOAT
    weights = [onnx.numpy_helper.from_array(np.full((4, 4, 1, 1), value, np.float32), f"w{value}") for value in (1, 2)]
    branches = [
        helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, dtype, None)])
        for name, node in {
            "a": helper.make_node("Relu", ["sum"], ["a"]),
            "b": helper.make_node("Conv", ["sum", "w2"], ["b"]),
        }.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["sum"]),
        helper.make_node("If", ["condition"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    inputs = [
        helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", dtype, [1, 4, 6, 6]),
    ]
    graph = helper.make_graph(nodes, "model", inputs, [helper.make_tensor_value_info("y", dtype, None)], weights)
    file, library = tmp_path / "model.onnx", tmp_path / "model.so"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    assert main(["relax", str(file), "--target", "llvm", "--layout", layout, "-o", str(library)]) == 0

    import tvm
    from tvm import relax

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    for condition, expected in ((True, 4), (False, 32)):
        arguments = np.array(condition), np.ones((1, 4, 6, 6), np.float32)
        assert (machine["main"](*map(tvm.runtime.tensor, arguments)).numpy() == expected).all()
