"""Lanes of a suite, whose layers are not searched but given results."""

from argparse import Namespace
from dataclasses import replace

import pytest

from tvmconv.benchmarks.suite_lanes import measure_in_lanes
from tvmconv.errors import Error
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import LayerSelection, Sweep
from tvmconv.reports.sweep import write_numbers
from tvmconv.workloads import Layer, parse

LAYERS = {f"layer{c}": Layer(f"layer{c}", parse(f"conv2d:1x{c}x6x6,{c}x{c}x1x1"), c) for c in (1, 2, 4)}
LAYERS["again"] = replace(LAYERS["layer4"], name="again")  # measured once, as layer4
SELECTION = LayerSelection("mine", LAYERS)


def make_result(label):
    return Result(LAYERS[label].workload, "opencl:0", "a device", 0, (ResultRow("tuned", failure="not timed"),))


def start_lane(args):
    assert args.workers


def fake_layer(args, selection, previous, kernels):
    """Give the last layer of a selection a result, unless it has two channels."""
    label = [*selection.layers][-1]
    if args.fails and label == "layer2":
        raise Error("two channels")
    sweep = previous or Sweep("mine-tuned", [], [], f"by {args.workers} workers", [])
    labels, counts = [*sweep.labels, label], [*sweep.counts, LAYERS[label].count]
    sweep = replace(sweep, labels=labels, results=[*sweep.results, make_result(label)], counts=counts)
    write_numbers(sweep, args.out)
    return sweep


def options(tmp_path, **more):
    return Namespace(
        out=tmp_path, workers=4, **{"lanes": 2, "stop_after": None, "fails": False, "configs": None, **more}
    )


def test_lanes_measure_all_layers_that_earlier_results_lack(tmp_path):
    previous = Sweep("mine-tuned", ["layer2"], [make_result("layer2")], "before", [2])
    sweep = measure_in_lanes(options(tmp_path), SELECTION, previous, start_lane, fake_layer)
    assert (sweep.labels, sweep.counts) == ([*LAYERS], [1, 2, 4, 4])
    assert [result.workload for result in sweep.results] == [*SELECTION.workloads.values()]
    assert sweep.provenance == "by 2 workers"
    assert {file.name for file in tmp_path.iterdir()} == {"mine-tuned.json", "mine-tuned.md"}


@pytest.mark.usefixtures("in_this_process")
def test_a_layer_that_fails_leaves_the_results_of_the_others(tmp_path, capsys):
    sweep = measure_in_lanes(options(tmp_path, fails=True, lanes=1), SELECTION, None, start_lane, fake_layer)
    assert sweep.labels == ["layer1", "layer4", "again"]
    assert "lane 1 of 1 ended with an error" in capsys.readouterr().err


@pytest.mark.usefixtures("in_this_process")
def test_no_layer_begins_after_the_time(tmp_path):
    with pytest.raises(Error, match="no layer of mine was measured"):
        measure_in_lanes(options(tmp_path, stop_after=1e-9, lanes=1), SELECTION, None, start_lane, fake_layer)
