"""What a sweep's chart says that it shows."""

import pytest

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.sweep import speedups, title
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
    results = [Result(parse(text), "cuda:0", "NVIDIA H200", 0, (Row("basic"),)) for text in texts]
    assert title(Sweep("s", list(texts), results, "here")) == f"{what}, float32, on NVIDIA H200"


def test_the_mean_of_the_speedups_is_geometric():
    results = []
    for channels, theirs in ((2, 2.0), (4, 8.0)):
        rows = [Row(name, timing=Timing((s,), "by hand", False)) for name, s in (("tuned", 1.0), ("cudnn", theirs))]
        results.append(Result(parse(f"conv2d:1x{channels}x6x6,4x{channels}x1x1"), "cuda:0", "a GPU", 0, tuple(rows)))
    table = speedups(Sweep("d2l-tuned", ["2", "4"], results, ""), ["cudnn"])
    assert [line.split() for line in table.text().splitlines()] == [
        ["channels", "×", "cudnn"],
        ["2", "2.00"],
        ["4", "8.00"],
        ["geometric", "mean", "4.00"],
    ]
