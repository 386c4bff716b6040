"""What is predicted beside what is tuned, and what there is to win."""

from pathlib import Path

import pytest

from tvmconv.devices import Timing
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.networks import compute_roofline_headroom, make_predictions_table, make_slower_layers_table
from tvmconv.target import BEST_RATES
from tvmconv.workloads import Conv, parse

ROOT = Path(__file__).parents[2]
LARGE = "conv2d:1x512x128x128,512x512x3x3,s1,p1,f16,nhwc"  # 77.3 GFLOP: 97.2 µs at 795 TFLOP/s, and a launch
WIDE = "conv2d:1x64x512x512,64x64x1x1,s1,p0,f16,nhwc"  # 67.1 MB: 16.4 µs at 4.1 TB/s, 8.4 at 8, and a launch


def layer(text, cold=False, device="NVIDIA H200", **micros):
    rows = [ResultRow(name, timing=Timing((each * 1e-6,), "by hand", cold)) for name, each in micros.items()]
    return Result(parse(text), "cuda:0", device, 0, tuple(rows))


@pytest.mark.parametrize(("text", "cold", "least"), [(LARGE, False, 98.30), (WIDE, True, 17.44), (WIDE, False, 9.46)])
def test_attainable_time_is_a_launch_and_arithmetic_or_bytes(text, cold, least):
    assert compute_roofline_headroom(layer(text, cold, cudnn=2 * least), "cudnn") == pytest.approx(2, rel=1e-3)


def test_attainable_time_is_known_for_some_gpus_and_dtypes():
    assert compute_roofline_headroom(layer(LARGE, device="a GPU", cudnn=200), "cudnn") is None
    assert compute_roofline_headroom(layer(LARGE.replace(",f16", ""), cudnn=200), "cudnn") is None
    assert compute_roofline_headroom(layer(LARGE, tuned=200), "cudnn") is None


def test_no_measured_kernel_beats_the_attainable_time():
    compared = [Sweep.read(file) for file in (ROOT / "tuning_logs").glob("**/*-nhwc*-tuned.json")]
    shares = [
        target.roofline_seconds(result.workload, in_l2=not row.timing.cold) / row.timing.median
        for sweep in compared
        for result in sweep.results
        if (target := BEST_RATES.get(result.device_name)) and isinstance(result.workload, Conv)
        for row in result.rows
        if row.timing and "winograd" not in (row.schedule or row.name)
    ]
    assert len(shares) > 1000
    assert 0.99 < max(shares) <= 1  # and some reach it


def test_slower_layers_are_listed_with_the_possible_gain():
    layers = [layer(LARGE, predicted=130, tuned=125, cudnn=120), layer(WIDE, predicted=20, tuned=12, cudnn=11.8)]
    (line,) = make_slower_layers_table([Sweep("network-tuned", ["a", "b"], layers, "here", [1, 1])]).rows
    assert (line[3], *line[-2:]) == (LARGE, "0.960", "1.22")
    unseen = [layer(LARGE, tuned=125, cudnn=100)]
    assert not make_slower_layers_table([Sweep("network-tuned", ["a"], unseen, "here", [1])]).rows


def test_a_network_is_a_line_with_means_and_what_they_could_be():
    layers = [
        layer(LARGE, predicted=160, untuned=400, tuned=80, cudnn=120),
        layer(WIDE, predicted=20, untuned=20, tuned=20, cudnn=20),
    ]
    mine = Sweep("mine-f16-nhwc-tuned", ["a", "b"], layers, "here", [1, 2])
    plain = Sweep("other-tuned", ["a"], [layer(LARGE, tuned=80, cudnn=120)], "here", [1])
    table = make_predictions_table([mine, plain])
    line = dict(zip(table.headers, table.rows[0], strict=True))
    assert len(table.rows) == 1  # of the other nothing was predicted
    assert {name: line[name] for name in ("suite", "dtype", "layout", "batch", "layers")} == {
        "suite": "mine", "dtype": "f16", "layout": "nhwc", "batch": "1", "layers": "2",
    }  # fmt: skip
    assert (line["predicted ×"], line["untuned ×"], line["tuned ×"]) == ("0.866", "0.548", "1.22")
    assert (line["attainable ×"], line["attainable < 1.5"], line["predicted < 0.8"]) == ("1.61", "1", "1")
    assert (line["predicted [µs]"], line["cudnn [µs]"]) == ("200", "160")
