"""ONNX files: built here, as exporters of old and new write them."""

import contextlib

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import Error, ModelError
from tvmconv.models.input_spec import InputSpec
from tvmconv.models.model_layers import derive_layers

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

IMAGE = [1, 3, 8, 8]


def weight(name, *shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor(name, dtype, shape, np.zeros(int(np.prod(shape)), np.float32))


def model_of(nodes, weights=(), x=IMAGE, outputs=("y",), dtype=TensorProto.FLOAT, functions=(), opset=17, **inputs):
    given = [helper.make_tensor_value_info(name, dtype, shape) for name, shape in {"x": x, **inputs}.items()]
    gives = [helper.make_tensor_value_info(name, dtype, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", given, gives, list(weights))
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=list(functions))


def conv(x="x", y="y", k="k", *more, **attributes):
    return helper.make_node("Conv", [x, k, *more], [y], **attributes)


@pytest.fixture
def derived(tmp_path):
    """What is derived from a model, through a file."""

    def of(model, *inputs):
        file = tmp_path / "model.onnx"
        file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        return derive_layers(str(file), [InputSpec.parse(each) for each in inputs])

    return of


@pytest.fixture
def texts(derived):
    """The texts of a model's layers, none of which is left out."""

    def of(*arguments):
        found = derived(*arguments)
        assert found.skipped_layers == ()
        return [layer.workload.text for layer in found.layers]

    return of


@pytest.mark.parametrize(
    ("attributes", "rest"),
    [
        ({}, "s1,p0"),
        ({"strides": [2, 1], "pads": [1, 1, 1, 1]}, "s2x1,p1"),
        ({"pads": [1, 2, 0, 1]}, "s1,p1x2x0x1"),
        ({"pads": [2, 2, 2, 2], "dilations": [2, 2]}, "s1,p2,d2"),
        ({"auto_pad": "VALID"}, "s1,p0"),
        ({"auto_pad": "NOTSET", "pads": [1] * 4}, "s1,p1"),
        ({"auto_pad": "SAME_UPPER"}, "s1,p1"),
        ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, "s2,p0x0x1x1"),
        ({"auto_pad": "SAME_LOWER", "strides": [2, 2]}, "s2,p1x1x0x0"),
        ({"auto_pad": "SAME_UPPER", "dilations": [3, 1]}, "s1,p3x1,d3x1"),
        ({"auto_pad": "SAME_UPPER", "strides": [5, 5]}, "s5,p0"),
    ],
)
def test_attributes_are_options_of_the_text(texts, attributes, rest):
    found = texts(model_of([conv(**attributes)], [weight("k", 4, 3, 3, 3)]))
    assert found == [f"conv2d:1x3x8x8,4x3x3x3,{rest}"]


@pytest.mark.parametrize(("auto_pad"), ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(
    ("size", "taps", "stride", "dilation"), [(7, 3, 2, 1), (8, 4, 3, 1), (9, 2, 1, 3), (5, 5, 4, 2)]
)
def test_the_output_has_the_size_that_onnx_infers(derived, auto_pad, size, taps, stride, dilation):
    attributes = {"strides": [stride] * 2, "dilations": [dilation] * 2, "auto_pad": auto_pad}
    model = model_of([conv(**attributes)], [weight("k", 4, 3, taps, taps)], x=[1, 3, size, size])
    (layer,) = derived(model).layers
    shape = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape
    assert list(layer.workload.output_shape) == [each.dim_value for each in shape.dim]


@pytest.mark.parametrize(
    ("x", "k", "attributes", "text"),
    [
        ([1, 4, 50], (8, 4, 5), {"pads": [2, 1]}, "conv1d:1x4x50,8x4x5,s1,p2x1"),
        ([2, 4, 5, 6, 7], (8, 4, 1, 3, 3), {"strides": [1, 2, 2]}, "conv3d:2x4x5x6x7,8x4x1x3x3,s1x2x2,p0"),
        ([1, 8, 6, 6], (8, 1, 3, 3), {"group": 8}, "conv2d:1x8x6x6,8x1x3x3,s1,p0,g8"),
        ([1, 8, 6, 6], (4, 4, 3, 3), {"group": 2}, "conv2d:1x8x6x6,4x4x3x3,s1,p0,g2"),
    ],
)
def test_ranks_and_groups(texts, x, k, attributes, text):
    assert texts(model_of([conv(**attributes)], [weight("k", *k)], x=x)) == [text]


@pytest.mark.parametrize(
    ("dtype", "text"), [(TensorProto.FLOAT, ""), (TensorProto.FLOAT16, ",f16"), (TensorProto.BFLOAT16, ",bf16")]
)
def test_element_types_are_dtypes(texts, dtype, text):
    found = texts(model_of([conv()], [weight("k", 4, 3, 3, 3, dtype=dtype)], dtype=dtype))
    assert found == [f"conv2d:1x3x8x8,4x3x3x3,s1,p0{text}"]


def scalar(name, value):
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.float32(value)))


def tail(*nodes):
    return [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes]


HALF = numpy_helper.from_array(np.float32([0.5]), "half")
EPILOGUES = {
    "relu": (tail(("Relu", ["c"], ["y"])), "bias,relu"),
    "clip of old, 0 to 1": (tail(("Clip", ["c"], ["y"], {"min": 0.0, "max": 1.0})), "bias,clamp"),
    "clip, 0 to 1": ([scalar("l", 0), scalar("h", 1), *tail(("Clip", ["c", "l", "h"], ["y"]))], "bias,clamp"),
    "clip from 0": ([scalar("l", 0), *tail(("Clip", ["c", "l"], ["y"]))], "bias,relu"),
    "clip to an input": (tail(("Clip", ["c", "", "limit"], ["y"])), "bias"),
    "relu6": ([scalar("l", 0), scalar("h", 6), *tail(("Clip", ["c", "l", "h"], ["y"]))], "bias,relu6"),
    "hardswish": (tail(("HardSwish", ["c"], ["y"])), "bias,hardswish"),
    "hardsigmoid": (tail(("HardSigmoid", ["c"], ["y"], {"alpha": 1 / 6})), "bias,hardsigmoid"),
    "hardsigmoid, a fifth": (tail(("HardSigmoid", ["c"], ["y"])), "bias"),
    "silu": (tail(("Sigmoid", ["c"], ["s"]), ("Mul", ["s", "c"], ["y"])), "bias,silu"),
    "gelu by erf": (
        [
            scalar("root", 2**0.5),
            scalar("one", 1),
            *tail(("Div", ["c", "root"], ["d"]), ("Erf", ["d"], ["e"]), ("Add", ["e", "one"], ["a"])),
            *tail(("Mul", ["c", "a"], ["m"]), ("Mul", ["m", "half"], ["y"])),
        ],
        "bias,gelu",
    ),
    "gelu": (tail(("Gelu", ["c"], ["y"])), "bias,gelu"),
    "gelu by tanh": (tail(("Gelu", ["c"], ["y"], {"approximate": "tanh"})), "bias,gelu_tanh"),
    "leaky relu": (tail(("LeakyRelu", ["c"], ["y"])), "bias,leaky_relu"),
    "leaky relu of YOLO": (tail(("LeakyRelu", ["c"], ["y"], {"alpha": 0.1})), "bias,leaky_relu0.1"),
    "elu": (tail(("Elu", ["c"], ["y"])), "bias,elu"),
    "softplus": (tail(("Softplus", ["c"], ["y"])), "bias,softplus"),
    "tanh": (tail(("Tanh", ["c"], ["y"])), "bias,tanh"),
    "normalised": (tail(("BatchNormalization", ["c", *["v"] * 4], ["n"]), ("Relu", ["n"], ["y"])), "bias,relu"),
    "residual": (tail(("Add", ["c", "r"], ["a"]), ("Relu", ["a"], ["y"])), "bias,add,relu"),
    "residual that is broadcast": (tail(("Add", ["c", "row"], ["a"]), ("Relu", ["a"], ["y"])), "bias"),
    "dropout": (tail(("Dropout", ["c"], ["d"]), ("Identity", ["d"], ["i"]), ("Relu", ["i"], ["y"])), "bias,relu"),
    "cast to the same": (tail(("Cast", ["c"], ["d"], {"to": TensorProto.FLOAT}), ("Relu", ["d"], ["y"])), "bias,relu"),
    "cast": (tail(("Cast", ["c"], ["d"], {"to": TensorProto.FLOAT16}), ("Relu", ["d"], ["y"])), "bias"),
    "used twice": (tail(("Relu", ["c"], ["r1"]), ("MaxPool", ["c"], ["y"], {"kernel_shape": [2, 2]})), "bias"),
}  # fmt: skip


@pytest.mark.parametrize(("nodes", "epilogue"), EPILOGUES.values(), ids=EPILOGUES)
def test_what_follows_is_the_epilogue(texts, nodes, epilogue):
    weights = [weight("k", 4, 3, 3, 3), weight("b", 4), weight("v", 4), HALF]
    model = model_of([conv("x", "c", "k", "b"), *nodes], weights, r=[1, 4, 6, 6], row=[1, 4, 1, 6], limit=[], opset=20)
    assert texts(model) == [f"conv2d:1x3x8x8,4x3x3x3,s1,p0,{epilogue}"]


def test_a_value_that_a_body_sees_is_used(texts):
    gives = [helper.make_tensor_value_info("inner", 1, None)]
    body = helper.make_graph([helper.make_node("Neg", ["c"], ["inner"])], "b", [], gives)
    branches = helper.make_node("If", ["cond"], ["y"], then_branch=body, else_branch=body)
    nodes = [conv(y="c"), helper.make_node("Relu", ["c"], ["r"]), branches]
    weights = [weight("k", 4, 3, 3, 3), helper.make_tensor("cond", TensorProto.BOOL, [], [True])]
    assert texts(model_of(nodes, weights)) == ["conv2d:1x3x8x8,4x3x3x3,s1,p0"]


def test_names_are_unique_and_of_nodes_or_their_outputs(derived):
    nodes = [
        conv("x", "a", name="/one/Conv"),
        conv("a", "b", "l"),
        conv("b", "c", "l", name="b"),
        conv("c", "y", "l", name="x" * 200 + "|\n"),
    ]
    model = model_of(nodes, [weight("k", 4, 3, 1, 1), weight("l", 4, 4, 1, 1)])
    names = [layer.name for layer in derived(model).layers]
    assert names == ["/one/Conv", "b", "b#2", "…" + "x" * 97 + "__"]


DYNAMIC = ["batch", 3, "height", None]


def dynamic_model():
    weights = [weight("k", 4, 3, 3, 3), weight("l", 4, 4, 1, 1)]
    return model_of([conv(pads=[1] * 4), conv("y", "z", "l")], weights, DYNAMIC)


def test_inputs_set_dynamic_dimensions(texts):
    first, second = texts(dynamic_model(), "x=2x3x9x7")
    assert (first, second) == ("conv2d:2x3x9x7,4x3x3x3,s1,p1", "conv2d:2x4x9x7,4x4x1x1,s1,p0")


def test_shapes_of_dynamic_dimensions_are_inferred_anew(texts):
    model = onnx.shape_inference.infer_shapes(dynamic_model())
    assert [str(each) for each in model.graph.value_info]
    assert texts(model, "2x3x9x7")[1] == "conv2d:2x4x9x7,4x4x1x1,s1,p0"


def test_a_name_is_one_size_in_all_inputs(derived):
    nodes = [*tail(("Concat", ["x", "z"], ["c"], {"axis": 1})), conv("c")]
    model = model_of(nodes, [weight("k", 4, 6, 3, 3)], ["n", 3, 8, 8], z=["n", 3, 8, 8])
    assert derived(model, "5x3x8x8").layers[0].workload.N == 5
    with pytest.raises(ModelError, match=r"input 'z' is nx3x8x8 in the file, which 6x3x8x8 does not match"):
        derived(model, "5x3x8x8", "6x3x8x8")


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "input 'x' is batch×3×height×?, whose dimension 0, 'batch', is dynamic: --input x=SIZES sets it"),
        (["1x4x8x8"], "input 'x' is batchx3xheightx? in the file, which 1x4x8x8 does not match"),
        (["1x3x8"], "which 1x3x8 does not match"),
        (["z=1x3x8x8"], "no input 'z': the model's inputs are x"),
        (["1x3x8x8", "1x3x8x8"], "one too many: the model's inputs are x"),
        (["1x3x8x8,f16"], "input 'x' has a dtype in the file"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(derived, inputs, said):
    with pytest.raises(ModelError) as caught:
        derived(dynamic_model(), *inputs)
    assert said in str(caught.value)
    assert "model.onnx" in str(caught.value)


def test_an_input_without_a_shape_is_set(texts, derived):
    model = model_of([conv()], [weight("k", 4, 3, 3, 3)], None)
    assert texts(model, "1x3x8x8") == ["conv2d:1x3x8x8,4x3x3x3,s1,p0"]
    with pytest.raises(ModelError, match="input 'x' has no shape: --input x=SIZES sets it"):
        derived(model)


def test_files_of_old_have_weights_among_the_inputs(texts):
    model = model_of([conv()], [weight("k", 4, 3, 3, 3)], ["n", 3, 8, 8], k=[4, 3, 3, 3])
    model.ir_version = 3
    assert texts(model, "1x3x8x8") == ["conv2d:1x3x8x8,4x3x3x3,s1,p0"]


def test_weights_in_another_file_are_not_needed(texts):
    model = model_of([conv()], [weight("k", 4, 3, 3, 3)])
    (k,) = model.graph.initializer
    k.ClearField("float_data")
    k.data_location = TensorProto.EXTERNAL
    k.external_data.add(key="location", value="nowhere.bin")
    assert texts(model) == ["conv2d:1x3x8x8,4x3x3x3,s1,p0"]


LEFT_OUT = {
    "of integers": ("ConvInteger", ["i", "ik"], "t0: tvmconv has no workload for ConvInteger"),
    "of float64": ("Conv", ["d", "dk"], "t0: dtype='float64': expected one of float32"),
    "of unknown shape": ("Conv", ["u", "k"], "t0: the shape of its input is unknown"),
    "of channels that do not fit": ("Conv", ["x", "wide"], "t0: weight '4x7x3x3' has 7 input channels: 3 channels"),
    "larger than its input": ("Conv", ["x", "large"], "t0: the kernel, 9x9 with its dilation, is larger"),
}


@pytest.mark.parametrize(("kind", "reads", "said"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_is_no_workload_is_left_out_and_why(derived, kind, reads, said):
    unknown = helper.make_node("Mystery", ["x"], ["u"], domain="mine")
    casts = tail(("Cast", ["x"], ["i"], {"to": TensorProto.UINT8}), ("Cast", ["x"], ["d"], {"to": TensorProto.DOUBLE}))
    weights = [
        weight("k", 4, 3, 3, 3),
        weight("wide", 4, 7, 3, 3),
        weight("large", 4, 3, 9, 9),
        helper.make_tensor("ik", TensorProto.UINT8, [1, 3, 1, 1], [0] * 3),
        weight("dk", 4, 3, 3, 3, dtype=TensorProto.DOUBLE),
    ]
    node = helper.make_node(kind, reads, ["o"], name="t0")
    found = derived(model_of([unknown, *casts, node, conv()], weights))
    assert [layer.name for layer in found.layers] == ["y"]
    (line,) = found.skipped_layers
    assert line.startswith(said)


def test_bodies_and_functions_are_not_looked_into(derived):
    gives = [helper.make_tensor_value_info("inner", 1, None)]
    body = helper.make_graph([conv("x", "inner"), conv("x", "unused")], "b", [], gives)
    branches = helper.make_node("If", ["cond"], ["z"], name="choice", then_branch=body, else_branch=body)
    function = helper.make_function("mine", "Block", ["a", "k"], ["o"], [conv("a", "o")], [helper.make_opsetid("", 17)])
    weights = [weight("k", 4, 3, 3, 3), helper.make_tensor("cond", TensorProto.BOOL, [], [True])]
    call = helper.make_node("Block", ["x", "k"], ["w"], domain="mine")
    found = derived(model_of([conv(), branches, call], weights, outputs=("y", "z", "w"), functions=[function]))
    assert len(found.layers) == 1
    assert found.skipped_layers == (
        "the bodies of If choice: 4 convolutions inside, which are not translated",
        "function Block: 1 convolution inside, which are not translated",
    )


@pytest.mark.parametrize("length", [0, 1, 20, 200, -1])
def test_a_file_that_is_cut_off_is_refused(derived, length):
    whole = model_of([conv()], [weight("k", 4, 3, 3, 3)]).SerializeToString()
    with pytest.raises(ModelError, match="is not an ONNX model"):
        derived(whole[:length])


@pytest.mark.parametrize("data", [b"\x80\x04\x95", b"PK\x03\x04 a checkpoint", b"[]", bytes(1000)])
def test_a_file_of_something_else_is_refused(derived, data):
    with pytest.raises(ModelError, match="is not an ONNX model"):
        derived(data)


@pytest.fixture
def whole():
    model = model_of([conv(y="c"), *tail(("Relu", ["c"], ["y"]))], [weight("k", 4, 3, 1, 1)])
    return model.SerializeToString()


def test_noise_in_a_file_is_refused_or_read(derived, whole):
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        with contextlib.suppress(Error):
            derived(bytes(data))


@pytest.mark.parametrize(
    ("attributes", "rest"),
    [
        ({}, "s1,p0"),
        ({"strides": [2, 2], "pads": [1, 0, 1, 1]}, "s2,p1x0x1x1"),
        ({"strides": [2, 2], "output_padding": [1, 0]}, "s2,p0,op1x0"),
        ({"strides": [2, 2], "output_shape": [16, 16]}, "s2,p1x1x0x0"),
        ({"strides": [2, 2], "auto_pad": "SAME_UPPER"}, "s2,p0x0x1x1"),
        ({"dilations": [2, 1], "group": 3}, "s1,p0,d2x1,g3"),
    ],
)
def test_transposed_convolutions_are_layers(texts, attributes, rest):
    node = helper.make_node("ConvTranspose", ["x", "k"], ["y"], **attributes)
    assert texts(model_of([node], [weight("k", 3, 4, 3, 3)])) == [f"conv2d_transpose:1x3x8x8,3x4x3x3,{rest}"]


def test_a_training_step_has_the_gradients_that_weights_need(tmp_path):
    scaled = helper.make_node("Mul", ["x", "scale"], ["s"])
    nodes = [scaled, conv("s", "a"), helper.make_node("ConvTranspose", ["a", "t"], ["y"], strides=[2, 2])]
    weights = [weight("k", 4, 3, 3, 3), weight("t", 4, 2, 2, 2), weight("scale", 3, 1, 1)]
    (tmp_path / "model.onnx").write_bytes(model_of(nodes, weights).SerializeToString())
    found = derive_layers(str(tmp_path / "model.onnx"), training=True)
    assert [(layer.name, layer.workload.text) for layer in found.layers] == [
        ("a", "conv2d:1x3x8x8,4x3x3x3,s1,p0"),
        ("a wgrad", "conv2d_wgrad:1x3x8x8,4x3x3x3,s1,p0"),
        ("y", "conv2d_transpose:1x4x6x6,4x2x2x2,s2,p0"),
        ("y dgrad", "conv2d:1x2x12x12,4x2x2x2,s2,p0"),
        ("y wgrad", "conv2d_wgrad:1x2x12x12,4x2x2x2,s2,p0"),
    ]


def qdq_nodes(x, y, scale="1", zero="zero"):
    """The nodes that round a tensor, and return to floats."""
    return [
        helper.make_node("QuantizeLinear", [x, scale, zero], [f"{y}_q"]),
        helper.make_node("DequantizeLinear", [f"{y}_q", scale, zero], [y]),
    ]


def qdq_model(*, zero=(TensorProto.INT8, 0), more=(), tail=(), pads=(0, 0, 0, 0)):
    """A model with one quantized convolution of random integers, and its initializers by name."""
    rng = np.random.default_rng(0)
    integer_type = np.int8 if zero[0] == TensorProto.INT8 else np.uint8
    arrays = {
        "sx": np.float32(0.05),
        "zero": np.array(zero[1], integer_type),
        "wq": rng.integers(-127, 128, (6, 3, 3, 3)).astype(np.int8),
        "sw": np.float32(rng.uniform(0.001, 0.01, 6)),
        "zw": np.zeros(6, np.int8),
        "b": np.float32(rng.normal(size=6)),
        "sy": np.float32(0.1),
        "zero_y": np.array(zero[1] + 5, integer_type),
    }
    nodes = [
        *qdq_nodes("x", "xf", "sx"),
        helper.make_node("DequantizeLinear", ["wq", "sw", "zw"], ["w"], axis=0),
        helper.make_node("Conv", ["xf", "w", "b"], ["c"], pads=pads),
        *tail,
        *qdq_nodes("r" if tail else "c", "y", "sy", "zero_y"),
    ]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    model = model_of([*nodes, *more], weights, outputs=("y",), opset=19)
    model.graph.output.append(helper.make_tensor_value_info("y_q", zero[0], None))
    return model, arrays


@pytest.mark.parametrize(
    ("zero", "tail", "pads", "text"),
    [
        ((TensorProto.INT8, -5), (), (0,) * 4, "1x3x8x8,6x3x3x3,s1,p0,i8,scale,bias,quantize"),
        ((TensorProto.INT8, 0), ["Relu"], (1,) * 4, "1x3x8x8,6x3x3x3,s1,p1,i8,scale,bias,relu,quantize,zero_point"),
        ((TensorProto.UINT8, 128), (), (1,) * 4, "1x3x8x8,6x3x3x3,s1,p1,i8,scale,bias,quantize,zero_point"),
        ((TensorProto.UINT8, 0), (), (1, 0, 1, 2), "1x3x10x10,6x3x3x3,s1,p0,i8,scale,bias,quantize,zero_point"),
    ],
)
def test_quantized_convolutions_compute_what_onnx_defines(texts, zero, tail, pads, text):
    nodes = [helper.make_node(kind, ["c"], ["r"]) for kind in tail]
    model, arrays = qdq_model(zero=zero, tail=nodes, pads=pads)
    assert texts(model) == [f"conv2d:{text}"]
    image = np.random.default_rng(1).normal(size=IMAGE).astype(np.float32)
    expected = ReferenceEvaluator(model).run(["y_q"], {"x": image})[0]

    offset = 128 if zero[0] == TensorProto.UINT8 else 0
    zero_x, zero_y = (int(arrays[name]) - offset for name in ("zero", "zero_y"))
    x = np.clip(np.rint(image / arrays["sx"]) + zero_x, -128, 127).astype(np.int8)
    if zero_x:
        x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=zero_x)
    scale = arrays["sx"] * arrays["sw"]
    bias = arrays["b"] - scale * zero_x * arrays["wq"].astype(np.float32).sum((1, 2, 3))
    numbers = [np.float32([1 / arrays["sy"]]), *([np.float32([zero_y])] if zero_y else [])]
    y = tc.build(tc.parse(f"conv2d:{text}"), "default", device="opencl:0")(x, arrays["wq"], scale, bias, *numbers)
    difference = np.abs(y.astype(int) + offset - expected.astype(int))
    assert difference.max() <= 1  # a float32 sum is rounded differently next to half an integer
    assert (difference > 0).mean() < 0.01


@pytest.mark.parametrize(("zero", "bias"), [(0, ""), (-5, ",bias")])
def test_a_zero_point_of_the_input_needs_a_bias(texts, zero, bias):
    model, _ = qdq_model(zero=(TensorProto.INT8, zero))
    next(node for node in model.graph.node if node.op_type == "Conv").input.remove("b")
    (text,) = texts(model)
    assert text.startswith(f"conv2d:1x3x8x8,6x3x3x3,s1,p0,i8,scale{bias},quantize")


def test_residuals_of_quantized_convolutions_have_8_bits(texts):
    sum_of = [helper.make_node("Add", ["c", "other"], ["s"]), helper.make_node("Relu", ["s"], ["r"])]
    quantized, _ = qdq_model(tail=[*qdq_nodes("o", "other", "sx"), *sum_of])
    floating, _ = qdq_model(tail=[helper.make_node("Identity", ["o"], ["other"]), *sum_of])
    for model, rest in (
        (quantized, "i8,scale,bias,add,relu,quantize,zero_point"),
        (floating, "out-f32,i8,scale,bias,add,relu"),
    ):
        model.graph.input.append(helper.make_tensor_value_info("o", TensorProto.FLOAT, [1, 6, 6, 6]))
        assert [text.partition("p0,")[2] for text in texts(model)] == [rest]


def test_weights_with_a_zero_point_are_floats(texts):
    model, _ = qdq_model()
    next(each for each in model.graph.initializer if each.name == "zw").CopyFrom(
        numpy_helper.from_array(np.ones(6, np.int8), "zw")
    )
    assert texts(model) == ["conv2d:1x3x8x8,6x3x3x3,s1,p0,bias"]


def test_weights_of_8_bit_floats_may_have_another_type(texts):
    model, arrays = qdq_model()
    kinds = {"zero": TensorProto.FLOAT8E4M3FN, "zero_y": TensorProto.FLOAT8E4M3FN}
    kinds |= {"wq": TensorProto.FLOAT8E5M2, "zw": TensorProto.FLOAT8E5M2}
    for each in model.graph.initializer:
        if kind := kinds.get(each.name):
            values = np.zeros(arrays[each.name].shape) if each.name != "wq" else np.ones(arrays["wq"].shape)
            each.CopyFrom(helper.make_tensor(each.name, kind, values.shape, values.ravel()))
    model.graph.output[-1].type.tensor_type.elem_type = TensorProto.FLOAT8E4M3FN
    assert texts(model) == ["conv2d:1x3x8x8,6x3x3x3,s1,p0,weight-e5m2,e4m3,scale,bias,quantize"]


def test_operators_of_quantized_convolutions_are_layers(texts):
    model, _ = qdq_model(zero=(TensorProto.UINT8, 128))
    reads = ["x_q", "sx", "zero", "wq", "sw", "zw", "sy", "zero_y"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zero"], ["x_q"]),
        helper.make_node("QLinearConv", reads, ["y_q"]),
    ]
    other = model_of(nodes, model.graph.initializer, outputs=())
    other.graph.output.append(helper.make_tensor_value_info("y_q", TensorProto.UINT8, None))
    assert texts(other) == ["conv2d:1x3x8x8,6x3x3x3,s1,p0,i8,scale,quantize,zero_point"]
