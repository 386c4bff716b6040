"""What a sweep's chart says that it shows."""

import pytest

from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.sweep import make_title
from tvmconv.workloads import parse

CONVOLUTIONS = ("conv2d:1x4x6x6,8x4x3x3,p1", "conv2d:1x2x6x6,8x2x1x1")
FILTERS = ("filter2d:64x64x1,3x3", "filter2d:64x64x3,5x5")


@pytest.mark.parametrize(
    ("texts", "what"),
    [
        (CONVOLUTIONS, "Convolutions of suite s"),
        (FILTERS, "Filters of suite s"),
        ((CONVOLUTIONS[0], FILTERS[0]), "Workloads of suite s"),
        (("filter1d:100,k5", "filter1d:200,k5"), "filter1d:k5"),
    ],
)
def test_a_chart_is_titled_by_what_was_computed(texts, what):
    results = [Result(parse(text), "cuda:0", "NVIDIA H200", 0, (ResultRow("basic"),)) for text in texts]
    assert make_title(Sweep("s", list(texts), results, "here")) == f"{what}, float32, on NVIDIA H200"
