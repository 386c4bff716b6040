import json

import pytest

from tvmconv.errors import WorkloadError
from tvmconv.workloads import SUITES, parse, suite
from tvmconv.workloads.suites import iterate_layers

# Convolutions and linear layers of each network, and their multiplications.
NETWORKS = {
    "resnet50": (53, 4.087e9),
    "vgg16": (13, 15.347e9),
    "mobilenet": (27, 567.7e6),
    "yolov8s": (64, 14.30e9),  # 28.6 GFLOP of the model's page
    "efficientnet_b0": (81, 384.5e6),
    "convnext_tiny": (22 + 36, 4.455e9),
    "sd_vae_decoder": (36 + 4, 1.240e12),
    "sd_unet": (98, 221.97e9),
    "video_vae": (2 * 38, 22.311e12),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_and_products_sum_to_those_of_the_network(name):
    layers, (convolutions, macs) = suite(name), NETWORKS[name]
    assert sum(layer.count for layer in layers) == convolutions
    assert sum(layer.count * layer.workload.flops for layer in layers) / 2 == pytest.approx(macs, rel=1e-3)


@pytest.mark.parametrize("name", SUITES)
def test_a_walk_has_every_layer_in_order_under_a_name_of_its_own(name):
    layers = iterate_layers(name)
    assert len({layer.name for layer in layers}) == len(layers) == sum(layer.count for layer in suite(name))
    firsts = {layer.workload: layer.name for layer in reversed(layers)}
    assert [layer.name for layer in suite(name)] == [layer.name for layer in layers if layer.name in firsts.values()]


@pytest.mark.parametrize("name", ["d2l", *NETWORKS])
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


# Sizes from the models' own code: ultralytics 8 (yolov8s at 640), diffusers (sd_… at 512), torchvision (others at 224).
LAYERS = {
    "video_vae": {
        "480p.mid.res0.conv1": "conv3d:1x384x1x60x104,384x384x3x3x3,s1,p0x1x1,c2",
        "480p.up0.time_conv": "conv3d:1x384x1x60x104,768x384x3x1x1,s1,p0,c2",
        "480p.up1.res0.conv1": "conv3d:1x192x2x120x208,384x192x3x3x3,s1,p0x1x1,c2",
        "720p.up2.upsample": "conv3d:1x192x4x360x640,96x192x1x3x3,s1,p0x1x1,up1x2x2",
        "720p.conv_out": "conv3d:1x96x4x720x1280,3x96x3x3x3,s1,p0x1x1,c2",
    },
    "yolov8s": {
        "0.conv": "conv2d:1x3x640x640,32x3x3x3,s2,p1",
        "2.m0.cv1": "conv2d:1x32x160x160,32x32x3x3,s1,p1",
        "9.cv2": "conv2d:1x1024x20x20,512x1024x1x1,s1,p0",
        "12.cv1": "conv2d:1x768x40x40,256x768x1x1,s1,p0",
        "22.cv3.0.2": "conv2d:1x128x80x80,80x128x1x1,s1,p0",
        "22.dfl": "conv2d:1x16x4x8400,1x16x1x1,s1,p0",
    },
    "efficientnet_b0": {
        "block0.se_reduce": "conv2d:1x32x1x1,8x32x1x1,s1,p0",
        "block3.depthwise": "conv2d:1x144x56x56,144x1x5x5,s2,p2,g144",
        "block15.project": "conv2d:1x1152x7x7,320x1152x1x1,s1,p0",
        "head": "conv2d:1x320x7x7,1280x320x1x1,s1,p0",
    },
    "convnext_tiny": {
        "stem": "conv2d:1x3x224x224,96x3x4x4,s4,p0",
        "downsample3": "conv2d:1x384x14x14,768x384x2x2,s2,p0",
        "stage3.0.depthwise": "conv2d:1x384x14x14,384x1x7x7,s1,p3,g384",
        "stage4.0.mlp_project": "conv2d:1x3072x7x7,768x3072x1x1,s1,p0",
    },
    "sd_vae_decoder": {
        "post_quant_conv": "conv2d:1x4x64x64,4x4x1x1,s1,p0",
        "mid.attn.q": "conv2d:1x512x64x64,512x512x1x1,s1,p0",
        "up1.upsample": "conv2d:1x512x256x256,512x512x3x3,s1,p1",
        "up3.res0.conv_shortcut": "conv2d:1x256x512x512,128x256x1x1,s1,p0",
        "conv_out": "conv2d:1x128x512x512,3x128x3x3,s1,p1",
    },
    "sd_unet": {
        "down0.downsample": "conv2d:1x320x64x64,320x320x3x3,s2,p1",
        "mid.attn.proj_in": "conv2d:1x1280x8x8,1280x1280x1x1,s1,p0",
        "up1.res2.conv1": "conv2d:1x1920x16x16,1280x1920x3x3,s1,p1",
        "up2.res2.conv_shortcut": "conv2d:1x960x32x32,640x960x1x1,s1,p0",
        "up3.res0.conv1": "conv2d:1x960x64x64,320x960x3x3,s1,p1",
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_the_sizes_of_the_models(name):
    layers = {layer.name: layer.workload.text for layer in suite(name)}
    assert {layer: layers[layer] for layer in LAYERS[name]} == LAYERS[name]


def test_variant_has_all_that_was_asked_for_and_the_counts():
    how = {"dtype": "float16", "layout": "nhwc", "epilogue": ("bias", "relu")}
    plain, varied = suite("resnet50"), suite("resnet50", 32, **how)
    assert [(layer.name, layer.count) for layer in varied] == [(layer.name, layer.count) for layer in plain]
    assert varied[0].workload.text == "conv2d:32x3x224x224,64x3x7x7,s2,p3,f16,nhwc,bias,relu"


def test_filters_have_no_variants():
    assert suite("filter1d", dtype="float32") == suite("filter1d")
    for how in ({"dtype": "float16"}, {"layout": "nhwc"}, {"epilogue": ("relu",)}):
        with pytest.raises(WorkloadError, match="applies to convolutions only, not to filter1d"):
            suite("filter1d", **how)


@pytest.fixture
def file(tmp_path):
    """Write a suite; its path."""

    def write(data):
        path = tmp_path / "mine.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return str(path)

    return write


A, B = "conv2d:2x4x8x8,4x4x3x3,s1,p1,relu", "filter1d:100,k3"


def test_file_is_a_suite_whose_equal_layers_are_counted_together(file):
    layers = suite(file([{"name": "a", "text": A, "count": 2, "more": None}, {"name": "b", "text": A}]))
    assert [(layer.name, layer.workload, layer.count) for layer in layers] == [("a", parse(A), 3)]


def test_file_is_as_it_says_unless_a_variant_is_asked_for(file):
    path = file([{"name": "a", "text": A}, {"name": "b", "text": B}])
    assert [layer.workload for layer in suite(path)] == [parse(A), parse(B)]
    varied = suite(file([{"name": "a", "text": A}]), 3, dtype="bfloat16", epilogue=())
    assert [layer.workload.text for layer in varied] == ["conv2d:3x4x8x8,4x4x3x3,s1,p1,bf16"]


LAYER = {"name": "a", "text": A, "count": 1}
BAD_FILES = {
    "not JSON": ("[", "is not a suite, expected JSON"),
    "too deep": ("[" * 100_000, "is not a suite, expected JSON"),
    "no list": ({"name": "a"}, "expected a list of layers"),
    "empty": ([], "expected a list of layers"),
    "no object": ([LAYER, 3], "layer 2: 3: expected an object"),
    "no name": ([{"text": A}], "layer 1: name=None: expected"),
    "a name that breaks a table": ([{**LAYER, "name": "a|b"}], "name='a|b'"),
    "a name of two lines": ([{**LAYER, "name": "a\nb"}], "expected up to 100 printable"),
    "no text": ([{"name": "a"}], "text=None: expected the text of a workload"),
    "bad text": ([{**LAYER, "text": "conv2d:1"}], "layer 1: 'conv2d:1': expected"),
    "count of none": ([{**LAYER, "count": 0}], "count=0: expected an integer"),
    "count that is none": ([{**LAYER, "count": True}], "count=True: expected an integer"),
    "one name twice": ([LAYER, {**LAYER, "text": B}], "2 layers are named 'a'"),
}


@pytest.mark.parametrize(("data", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_malformed_file_is_refused_with_what_is_wrong(file, data, said):
    with pytest.raises(WorkloadError) as caught:
        suite(file(data))
    assert said in str(caught.value)
    assert "mine.json" in str(caught.value)
