import pytest

from tvmconv.errors import WorkloadError
from tvmconv.workloads import SUITES, suite


@pytest.mark.parametrize(("name", "convolutions"), [("d2l", 5), ("resnet50", 53), ("vgg16", 13), ("mobilenet", 27)])
def test_counts_sum_to_the_network_s_convolutions(name, convolutions):
    assert sum(layer.count for layer in suite(name)) == convolutions


@pytest.mark.parametrize(("name", "macs"), [("resnet50", 4.087e9), ("vgg16", 15.347e9), ("mobilenet", 567.7e6)])
def test_multiplications_sum_to_the_network_s_known_total(name, macs):
    assert sum(layer.count * layer.workload.flops for layer in suite(name)) / 2 == pytest.approx(macs, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "weights"), [("resnet50", 23_454_912), ("vgg16", 14_710_464), ("mobilenet", 3_185_088)]
)
def test_weights_sum_to_the_network_s_known_total(name, weights):
    shapes = [(layer.count, layer.workload.weight_shape) for layer in suite(name)]
    assert sum(count * o * c * r * s for count, (o, c, r, s) in shapes) == weights


@pytest.mark.parametrize("name", SUITES)
def test_layers_are_distinct(name):
    layers = suite(name)
    assert len({layer.workload for layer in layers}) == len({layer.name for layer in layers}) == len(layers)


def test_d2l_is_the_chapter_s_sweep():
    assert [str(layer.workload) for layer in suite("d2l")] == [
        f"conv2d:1x{channels}x64x64,{channels}x{channels}x3x3,s1,p1" for channels in (16, 32, 64, 128, 256)
    ]


def test_resnet50_strides_in_the_3x3_convolution():
    strided = [layer.name for layer in suite("resnet50") if layer.workload.stride == (2, 2) and layer.workload.R == 3]
    assert strided == ["conv3_1.3x3", "conv4_1.3x3", "conv5_1.3x3"]


def test_mobilenet_alternates_depthwise_and_pointwise():
    assert sum(layer.count for layer in suite("mobilenet") if layer.workload.depthwise) == 13


@pytest.mark.parametrize("name", ["d2l", "resnet50", "vgg16", "mobilenet"])
def test_batch_sets_every_layer_s_batch(name):
    assert {layer.workload.N for layer in suite(name, batch=16)} == {16}


def test_unknown_suite_is_refused_with_the_known_ones():
    with pytest.raises(WorkloadError, match="unknown suite 'alexnet': expected one of d2l, resnet50, vgg16, mobilenet"):
        suite("alexnet")


@pytest.mark.parametrize("name", ["filter1d", "filter2d"])
def test_suites_of_filters_have_no_batch(name):
    assert {layer.workload.operator for layer in suite(name)} == {name}
    with pytest.raises(WorkloadError, match="batch=2"):
        suite(name, batch=2)
