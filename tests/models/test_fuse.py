"""Epilogues, on graphs as both kinds of models become."""

import math

import pytest

from tvmconv.models import epilogue_fusion
from tvmconv.models.model_graph import ModelGraph, ModelOp
from tvmconv.workloads import parse

TEXT = "conv2d:1x8x6x6,8x8x3x3,s1,p1"
SHAPE = (1, 8, 6, 6)


class Model:
    """Writes a graph down, an operation a line."""

    def __init__(self):
        self.graph = ModelGraph(shapes={"x": SHAPE, "c": (8, 1, 1), "wide": (1, 8, 1, 6)}, constants={"c", "wide"})

    def conv(self, x, y, bias=False):
        self.graph.shapes[y] = SHAPE
        self.graph.add_conv(y, (x,), (y,), lambda: parse(TEXT + ",bias" * bias))
        return y

    def op(self, kind, *operands, to, **how):
        self.graph.shapes[to] = SHAPE
        self.graph.add_pointwise(kind, list(operands), (to,), **how)
        return to

    def other(self, *reads, to, kind=""):
        self.graph.shapes[to] = SHAPE
        self.graph.add(ModelOp(kind, reads, (to,)))
        return to

    def epilogues(self):
        return {layer.name: ",".join(layer.workload.epilogue) for layer in epilogue_fusion.fuse_epilogues(self.graph)}


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def y(model):
    return model.conv("x", "y")


def test_normalisation_is_a_bias_once(model):
    y = model.conv("x", "y", bias=True)
    model.op("relu", model.other(y, to="n", kind="norm"), to="r")
    assert model.epilogues() == {"y": "bias,relu"}


def test_a_factor_and_a_summand_for_each_channel_are_a_bias(model, y):
    scaled = model.op("mul", "c", y, to="m")
    model.op("relu", model.op("add", scaled, "c", to="a"), to="r")
    assert model.epilogues() == {"y": "bias,relu"}


def test_what_is_divided_by_the_output_is_not_folded(model, y):
    model.op("relu", model.op("div", 2.0, y, to="m"), to="r")
    assert model.epilogues() == {"y": ""}


def test_a_summand_for_each_channel_that_is_computed_is_no_bias(model, y):
    model.graph.constants.clear()
    model.op("add", y, "c", to="a")
    assert model.epilogues() == {"y": ""}


def test_what_is_made_of_constants_is_constant(model, y):
    model.op("neg", "c", to="d")
    model.graph.shapes["d"] = (8, 1, 1)
    model.op("add", y, "d", to="a")
    assert model.epilogues() == {"y": "bias"}


def silu(model, y):
    return model.op("mul", y, model.op("sigmoid", y, to="s"), to="out")


def silu_by_exp(model, y):
    bottom = model.op("add", model.op("exp", model.op("neg", y, to="n"), to="e"), 1.0, to="b")
    return model.op("div", y, bottom, to="out")


def gelu_by_erf(model, y):
    inner = model.op("erf", model.op("div", y, 1.4142135, to="d"), to="e")
    return model.op("mul", 0.5, model.op("mul", y, model.op("add", inner, 1.0, to="a"), to="m"), to="out")


def gelu_halved_first(model, y):
    half = model.op("mul", y, 0.5, to="h")
    inner = model.op("add", model.op("erf", model.op("mul", y, 0.70703125, to="d"), to="e"), 1.0, to="a")
    return model.op("mul", half, inner, to="out")


def clamp(model, y):
    return model.op("min", model.op("max", y, 0.0, to="m"), 1.0, to="out")


def relu_by_max(model, y):
    return model.op("max", 0.0, y, to="out")


def relu_twice(model, y):
    return model.op("clip", model.op("relu", y, to="r"), to="out", low=0)


SPELLINGS = {
    "silu": (silu, silu_by_exp),
    "gelu": (gelu_by_erf, gelu_halved_first),  # the second with a constant that bfloat16 rounded
    "clamp": (clamp,),
    "relu": (relu_by_max, relu_twice),
}


@pytest.mark.parametrize(
    ("write", "name"), [pytest.param(each, name, id=each.__name__) for name in SPELLINGS for each in SPELLINGS[name]]
)
def test_an_activation_is_told_by_what_it_computes(model, y, write, name):
    model.op("add", write(model, y), "x", to="end")
    assert model.epilogues() == {"y": f"{name},add"}


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("clip", {"low": 0, "high": 5}),
        ("clip", {"low": 0, "high": 20}),
        ("leaky_relu", {"slope": 0.3}),
        ("elu", {"alpha": 0.5}),
    ],
)
def test_activations_that_no_epilogue_has_are_left_alone(model, y, kind, how):
    model.op("add", model.op(kind, y, to="a", **how), "x", to="end")
    assert model.epilogues() == {"y": ""}


def test_what_changes_nothing_is_looked_through(model, y):
    model.op("same", model.op("relu", model.op("same", y, to="i"), to="r"), to="j")
    model.op("add", "j", "x", to="end")
    assert model.epilogues() == {"y": "relu,add"}


def test_a_value_that_another_operation_uses_ends_the_epilogue(model, y):
    model.op("relu", model.other(y, to="n", kind="norm"), to="r")
    model.other("n", to="o")
    assert model.epilogues() == {"y": "bias"}


def test_a_value_that_the_model_gives_ends_the_epilogue(model, y):
    model.op("relu", y, to="r")
    model.graph.outputs.add("y")
    assert model.epilogues() == {"y": ""}


def test_a_value_inside_an_activation_has_no_other_reader(model, y):
    silu(model, y)
    model.other("s", to="o")
    assert model.epilogues() == {"y": ""}


def test_a_residual_is_added_before_its_activation(model, y):
    model.op("relu", model.op("add", "x", y, to="a"), to="r")
    assert model.epilogues() == {"y": "add,relu"}


def test_a_residual_has_the_shape_of_the_output(model, y):
    model.graph.shapes["row"] = (1, 8, 1, 6)
    model.op("add", y, "row", to="a")
    assert model.epilogues() == {"y": ""}


def test_of_two_convolutions_the_later_one_adds_the_other(model):
    y, z = model.conv("x", "y"), model.conv("x", "z", bias=True)
    model.op("relu", model.op("add", y, z, to="a"), to="r")
    assert model.epilogues() == {"y": "", "z": "bias,add,relu"}


def test_an_earlier_convolution_may_add_the_later_one(model):
    y, z = model.conv("x", "y"), model.other(model.conv("x", "z"), to="pooled")
    model.op("add", y, z, to="a")
    assert model.epilogues() == {"y": "add", "z": ""}


def test_an_epilogue_has_several_operations_in_order(model):
    y = model.conv("x", "y", bias=True)
    a = model.op("add", silu(model, y), "x", to="a")
    model.op("relu", a, to="r")
    assert model.epilogues() == {"y": "bias,silu,add,relu"}


def test_a_graph_with_a_circle_ends(model, y):
    model.op("add", y, "r", to="a")
    model.op("relu", "a", to="r")
    model.graph.shapes["r"] = SHAPE
    model.op("relu", "r", to="y")
    assert model.epilogues() == {"y": "add,relu"}


def test_a_long_tail_of_arithmetic_ends(model, y):
    value = y
    for number in range(100):
        value = model.op("mul", model.op("add", value, math.pi, to=f"a{number}"), "x", to=f"m{number}")
    assert model.epilogues() == {"y": "bias"}
