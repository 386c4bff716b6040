"""What a chain of layers is measured on, and what is told of it."""

import numpy as np
import pytest

from tvmconv.baselines.base import Baseline
from tvmconv.baselines.cudnn_chain import CudnnChain
from tvmconv.devices import Timing
from tvmconv.devices.comparison import OutputComparison
from tvmconv.errors import Error
from tvmconv.experiments import chain
from tvmconv.experiments.chain import ChainLayer, scale_weights, split_common_settings
from tvmconv.workloads import parse


@pytest.mark.parametrize("epilogue", ["", ",relu"])
def test_weights_neither_blow_up_activations_nor_let_them_vanish(epilogue):
    w = parse(f"conv2d:1x64x8x8,64x64x1x1,f16,nhwc{epilogue}")
    x = w.inputs(0)[0]
    size = np.sqrt(np.mean(x.astype(float) ** 2))
    for seed in range(12):
        _, k = scale_weights(w, w.inputs(seed))
        assert k.dtype == np.float16
        x = w.reference(x, k)
    assert 1 / 3 < np.sqrt(np.mean(x**2)) / size < 3


def link(how):
    return ChainLayer("a", "conv2d:1x4x6x6,4x4x3x3", "tiling", "tuned", False, False, 1e-6, 2e-6, how)


def test_what_a_library_says_of_every_layer_is_told_once():
    common, links = split_common_settings([link("cuDNN 9, fused, in NHWC"), link("cuDNN 9, in NHWC")])
    assert common == ["cuDNN 9", "in NHWC"]
    assert [each.how for each in links] == ["fused", ""]
    assert split_common_settings([link("")]) == ([], [link("")])


class OnNoGpu:
    """Stands for a device, a kernel on it, its bench and a chain: all that measuring asks of them."""

    def __init__(self, deviation=0.0, early=()):
        self.device, self.early, self.off = self, early, deviation
        self.reads_previous_output, self.overlaps_previous = [False, True], [False, bool(early)]

    def load(self, program):
        return self

    def create_benchmark(self, inputs, reference):
        return self

    def close(self):
        pass

    def compare(self, kernel):
        return OutputComparison(self.off)

    def time(self, inputs=None, *, use_pdl=False, seconds=0.5):
        return Timing((1e-6 if inputs else 3e-6 - use_pdl * 1e-6,), "", False)

    def __call__(self, device, programs, inputs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, *, use_pdl=False):
        return [np.full(3, value if use_pdl else 1.0) for value in (self.early or (1.0, 1.0))]


W = parse("conv2d:1x4x6x6,4x4x3x3,p1")
LAYERS = [("first", W), ("second", W)]


@pytest.fixture
def measure(monkeypatch):
    """Measure two equal layers on what stands for a GPU."""

    def run(standing, picks=0):
        monkeypatch.setattr(chain, "KernelChain", standing)
        built = {W: chain.ChainKernel("tiling", "tuned", None)}
        return chain.measure_chain(LAYERS, built, standing, lambda step: None, picks=picks)

    return run


@pytest.mark.parametrize(
    ("early", "expected"), [((), {"graph": 3e-6}), ((1.0, 1.0), {"graph": 3e-6, "overlapping": 2e-6})]
)
def test_layers_are_timed_in_one_graph_and_overlapping(measure, early, expected):
    links, times = measure(OnNoGpu(early=early))
    assert [(link.layer, link.linked, link.overlaps) for link in links] == [
        ("first", False, False),
        ("second", True, bool(early)),
    ]
    assert {name: timing.median for name, timing in times.items()} == pytest.approx(expected)


def test_cudnn_is_timed_on_the_same_layers_and_inputs(measure, monkeypatch):
    def cudnn(workloads, inputs, **how):
        assert (workloads, [*inputs], how["num_picks"]) == ([W, W], [W], 2)
        single = Baseline(Timing((4e-6,), "", False), None, "cuDNN 9")
        return CudnnChain(Timing((7e-6,), "", False), {W: single})

    monkeypatch.setattr(chain, "time_cudnn_chain", cudnn)
    links, times = measure(OnNoGpu(), picks=2)
    assert [(link.cudnn, link.how) for link in links] == [(4e-6, "cuDNN 9")] * 2
    assert times["cudnn graph"].median == 7e-6


@pytest.mark.parametrize(
    ("standing", "message"),
    [
        *((OnNoGpu(deviation), r"tiling computes conv2d.* wrong: ") for deviation in (1.0, np.nan)),
        *((OnNoGpu(early=(1.0, value)), "the output of second differs when kernels") for value in (2.0, np.nan)),
    ],
)
def test_a_wrong_kernel_and_one_that_reads_too_early_end_it(measure, standing, message):
    with pytest.raises(Error, match=message):
        measure(standing)
