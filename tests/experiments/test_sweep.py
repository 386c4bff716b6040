"""Sweeps are read from files of any version, and tell how long they will take."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tvmconv.devices import Arch
from tvmconv.experiments.results import Result, Row
from tvmconv.experiments.sweep import Sweep, measure_sweep
from tvmconv.reports.sweep import markdown
from tvmconv.workloads import parse

SHIPPED = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200"


@pytest.mark.parametrize("name", ["d2l", "d2l-tuned", "resnet50-3x3", "mobilenet-depthwise-tuned"])
def test_a_shipped_sweep_gives_the_table_beside_it(name):
    assert markdown(Sweep.read(SHIPPED / f"{name}.json")) == (SHIPPED / f"{name}.md").read_text()


def test_a_sweep_over_sizes_is_known_by_its_workloads():
    def over_sizes(*texts):
        results = [Result(parse(text), "cuda:0", "NVIDIA H200", 0, (Row("basic"),)) for text in texts]
        return Sweep("filters", list(texts), results, "here").over_sizes

    assert over_sizes("filter2d:8x8x1,5x5", "filter2d:8x16x1,5x5")
    assert not over_sizes("filter2d:8x8x1,5x5", "filter2d:8x16x1,5x5,clamp")
    assert not over_sizes("filter2d:8x8x1,5x5", "filter2d:8x16x1,3x3")
    assert not over_sizes("filter2d:8x8x1,5x5", "filter2d:8x8x1,5x5")
    assert not over_sizes("filter2d:8x8x1,5x5")


def test_the_time_left_is_told_from_the_second_workload_on(monkeypatch):
    steps, clock = [], iter([0.0, 10.0, 14.0, 20.0])

    def building(workload, *, device, progress):
        progress("building")
        return Result(workload, device.text, device.name, 0, (Row("basic"),))

    monkeypatch.setattr("tvmconv.experiments.sweep.run_ladder", building)
    monkeypatch.setattr("tvmconv.experiments.sweep.time.monotonic", lambda: next(clock))
    workloads = {n: parse(f"filter1d:{n},k1") for n in ("4", "5")}
    measure_sweep(
        "small",
        workloads,
        Arch("sm_90"),
        "command",
        progress=lambda prefix: nullcontext(lambda step: steps.append(f"{prefix}{step}")),
        done=lambda sweep: None,
    )
    assert steps == ["sm_90: 1 of 2, 4, building", "sm_90: 2 of 2, 5, building, 6 s left"]
