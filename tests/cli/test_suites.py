"""`tvmconv suites --from`: a model's convolutions, printed and written."""

import json
import sys

import numpy as np
import pytest

CONV = "conv2d:1x3x8x8,3x3x3x3,s1,p1,relu"


@pytest.fixture
def model(tmp_path):
    """Writes an ONNX model of nodes; its path."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper

    def write(*nodes):
        weight = helper.make_tensor("k", onnx.TensorProto.FLOAT, [3, 3, 3, 3], np.zeros(81, np.float32))
        x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, 8, 8])
        y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        graph = helper.make_graph([helper.make_node(*each[:3], **each[3]) for each in nodes], "g", [x], [y], [weight])
        file = tmp_path / "model.onnx"
        file.write_bytes(helper.make_model(graph).SerializeToString())
        return str(file)

    return write


PAD = {"pads": [1] * 4}
INTEGER = ("ConvInteger", ["c", "k"], ["y"], {"name": "up"})


@pytest.fixture
def two_and_one(model):
    """A model of two equal convolutions, and one that is no workload."""
    relu = [("Relu", [f"{name}0"], [name], {}) for name in "abc"]
    return model(
        ("Conv", ["x", "k"], ["a0"], {**PAD, "name": "first"}),
        relu[0],
        ("Conv", ["a", "k"], ["b0"], PAD),
        relu[1],
        ("Conv", ["b", "k"], ["c0"], {"strides": [2, 2]}),
        relu[2],
        INTEGER,
    )


def test_a_model_s_convolutions_are_printed_as_a_suite_s(run, two_and_one):
    status, out, err = run("suites", "--from", two_and_one, "--input", "1x3x8x8")
    assert (status, err) == (0, "tvmconv: left out: up: tvmconv has no workload for ConvInteger\n")
    assert [line.split() for line in out.splitlines()] == [
        ["layer", "times", "workload"],
        ["first", "2", CONV],
        ["c0", "1", "conv2d:1x3x8x8,3x3x3x3,s2,p0,relu"],
    ]


def test_quantized_convolutions_are_listed_with_a_hint(run, model):
    onnx = pytest.importorskip("onnx")
    zero = onnx.helper.make_tensor("", onnx.TensorProto.INT8, [], [0])
    pairs = [
        (f"{kind}Linear", [read, "s", "z"], [written], {})
        for name in "xk"
        for kind, read, written in (("Quantize", name, f"{name}q"), ("Dequantize", f"{name}q", f"{name}d"))
    ]
    constants = [("Constant", [], ["s"], {"value_float": 0.5}), ("Constant", [], ["z"], {"value": zero})]
    file = model(*constants, *pairs, ("Conv", ["xd", "kd"], ["y"], PAD))
    status, out, err = run("suites", "--from", file, "--input", "1x3x8x8", "--csv")
    assert status == 0
    assert "conv2d:1x3x8x8,3x3x3x3,s1,p1,out-f32,i8,scale" in out
    assert err == "tvmconv: tensor cores compute convolutions of 8 bits channels last: choose --layout nhwc\n"
    status, out, err = run("suites", "--from", file, "--input", "1x3x8x8", "--csv", "--layout", "nhwc")
    assert (status, err) == (0, "")
    assert "i8,nhwc,scale" in out


def test_a_training_step_has_gradients_of_a_model_and_of_a_suite(run, two_and_one, tmp_path):
    status, out, _ = run("suites", "--from", two_and_one, "--input", "2x3x8x8", "--training", "--csv")
    bare, strided = "2x3x8x8,3x3x3x3,s1,p1", "2x3x8x8,3x3x3x3,s2,p0"
    assert status == 0
    assert out.replace('"', "").splitlines() == [
        "layer,times,workload",
        f"first,2,conv2d:{bare}",
        f"first wgrad,2,conv2d_wgrad:{bare}",
        f"b0 dgrad,1,conv2d_dgrad:{bare}",
        f"c0,1,conv2d:{strided}",
        f"c0 dgrad,1,conv2d_dgrad:{strided}",
        f"c0 wgrad,1,conv2d_wgrad:{strided}",
    ]
    file = tmp_path / "suite.json"
    assert run("suites", "vgg16", "--training", "--batch", "8", "--only", "dgrad", "-o", str(file))[0] == 0
    assert all(layer["text"].startswith("conv2d_dgrad:8x") for layer in json.loads(file.read_text()))
    assert run("suites", str(file), "--training")[2].endswith("expected a convolution or a transposed convolution\n")


def test_what_is_written_is_read_as_a_suite(run, two_and_one, tmp_path):
    file = tmp_path / "suite.json"
    file.write_text("what was there before")
    status, out, _ = run("suites", "--from", two_and_one, "--input", "1x3x8x8", "-o", str(file))
    assert (status, out) == (0, "")
    assert json.loads(file.read_text())[0] == {"name": "first", "text": CONV, "count": 2}
    _, printed, _ = run("suites", "--from", two_and_one, "--input", "1x3x8x8")
    assert run("suites", str(file)) == (0, printed, "")


def test_layers_that_a_variant_makes_equal_are_counted_together(run, model):
    nodes = [("Conv", ["x", "k"], ["a"], PAD), ("Relu", ["a"], ["b"], {}), ("Conv", ["b", "k"], ["y"], PAD)]
    bare = ["--epilogue", "relu"]
    _, out, _ = run("suites", "--from", model(*nodes), "--input", "1x3x8x8", *bare)
    assert out.splitlines()[1].split() == ["a", "2", CONV]


def test_a_pytorch_module_is_a_suite(run, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 3, 1))\n"
    )
    status, out, _ = run("suites", "--from", "net:build", "--input", "1x3x8x8")
    sys.modules.pop("net")
    assert (status, out.splitlines()[1].split()) == (0, ["0", "1", "conv2d:1x3x8x8,3x3x1x1,s1,p0,bias"])


def test_a_model_without_workloads_is_refused(run, model):
    file = model(("Identity", ["x"], ["c"], {}), INTEGER)
    status, _, err = run("suites", "--from", file)
    assert (status, err.splitlines()[1]) == (2, f"tvmconv: {file} has no convolution that is a workload")


@pytest.mark.parametrize(("library", "source"), [("onnx", "m.onnx"), ("torch", "json:loads")])
def test_a_library_that_is_missing_is_named_with_its_extra(run, monkeypatch, library, source):
    monkeypatch.setitem(sys.modules, library, None)
    status, out, err = run("suites", "--from", source, "--input", "1x3x8x8")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"pip install \"{library}\" (in a clone of tvmconv: pip install -e '.[{library}]')" in err
