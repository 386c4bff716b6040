"""Recorded spaces are found in files, in logs and in folders, and what is none is refused in one line."""

import json
import math
from dataclasses import replace

import pytest

from tvmconv import Error
from tvmconv.logs.record import ErrorKind, Record
from tvmconv.search.recorded_space import find_recorded_spaces
from tvmconv.space import SplitKnob
from tvmconv.workloads import parse

SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")
OTHER = parse("conv2d:1x2x6x6,8x2x3x3,p1")
CACHE = {"tune_params_keys": ["block"], "cache": {"1": {"block": 1, "time": 2.0}, "2": {"block": 2, "time": 1.0}}}


def record(tile, unroll, seconds=1e-6, **fields):
    """A record of a config with a split and a choice; one that failed if it took no time."""
    error = ErrorKind.NONE if seconds else ErrorKind.RUN_TIMEOUT
    shown = {"workload": SMALL, "schedule": "direct", "device": "NVIDIA H200", "target": "cuda", **fields}
    config = {"tile": (-1, *tile), "unroll": unroll}
    return Record(config=config, times=(seconds,) if seconds else (), error=error, **shown)


def measured(**fields):
    """Six configs, one of which failed, and the fastest of which is known."""
    seconds = [3e-6, 1e-6, 0, 2e-6, 4e-6, 5e-6]
    configs = [((1, 2), 0), ((2, 2), 0), ((4, 2), 0), ((1, 2), 512), ((2, 2), 512), ((4, 1), 512)]
    return [record(*config, each, **fields) for config, each in zip(configs, seconds, strict=True)]


def write(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(each.line() + "\n" for each in records))
    return path


def test_a_log_is_a_space_of_what_was_measured(tmp_path):
    log = write(tmp_path / "a.jsonl", measured())
    ((name, recording),) = find_recorded_spaces([log], min_configs=6)
    assert name == f"{log}: direct of {SMALL} on NVIDIA H200"
    assert (len(recording.space.enumerated_legal), recording.num_failed, recording.best_seconds) == (6, 1, 1e-6)
    assert recording.measure({"tile": (-1, 4, 2), "unroll": 0}).cost == math.inf
    assert recording.measure({"tile": (-1, 1, 2), "unroll": 512}).cost == 2e-6


def test_a_split_stays_one_knob_that_a_model_sees_the_factors_of(tmp_path):
    ((_, recording),) = find_recorded_spaces([write(tmp_path / "a.jsonl", measured())], min_configs=6)
    space = recording.space
    assert isinstance(space.knobs["tile"], SplitKnob)
    assert space.sizes == (4, 2)
    features, names = space.compute_features(space.enumerated_legal)
    column = dict(zip(names, features.T, strict=True))
    factors = [tuple(space.config_from_point(point)["tile"][1:]) for point in space.enumerated_legal]
    assert [(2 ** column["tile.1"][i], 2 ** column["tile.2"][i]) for i in range(6)] == factors
    near = space.list_neighbors(space.point_from_config({"tile": (-1, 2, 2), "unroll": 0}))
    assert len(near) == 3  # two with another tile, one with another unrolling; that of (4, 1) was not recorded


def test_each_workload_and_schedule_of_a_log_is_its_own_space(tmp_path):
    records = measured() + measured(workload=OTHER) + measured(schedule="implicit_gemm")[:3]
    names = [name for name, _ in find_recorded_spaces([write(tmp_path / "a.jsonl", records)], min_configs=4)]
    assert [name.partition(": ")[2] for name in names] == [
        f"direct of {SMALL} on NVIDIA H200",
        f"direct of {OTHER} on NVIDIA H200",
    ]


def test_configs_of_other_knobs_and_last_timings_are_left_out(tmp_path):
    former = [replace(each, config={"tile": each.config["tile"]}) for each in measured()[:3]]
    other_parts = [replace(each, config={"tile": (-1, 2), "unroll": 0}) for each in measured()[:1]]
    last = [replace(each, times=(1e-9,), final=True) for each in measured()[:1]]
    ((_, recording),) = find_recorded_spaces(
        [write(tmp_path / "a.jsonl", former + other_parts + measured() + last)], min_configs=6
    )
    assert (len(recording.space.enumerated_legal), recording.best_seconds) == (6, 1e-6)


def test_a_folder_is_searched_for_all_of_them(tmp_path):
    log = write(tmp_path / "inner/a.jsonl", measured())
    write(tmp_path / "inner/few.jsonl", measured()[:2])
    (tmp_path / "table.json").write_text('{"name": "no recording"}')
    (tmp_path / "cache.json").write_text(json.dumps(CACHE))
    names = [name for name, _ in find_recorded_spaces([tmp_path], min_configs=3)]
    assert names == [str(tmp_path / "cache.json"), f"{log}: direct of {SMALL} on NVIDIA H200"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"has no workload and schedule with 3 configs, at least one of them valid$"),
        (["garbage"], r"has no workload and schedule with 3 configs, at least one of them valid: 1 bad line \(1\)"),
        ([record((1, 2), unroll, 0).line() for unroll in range(5)], "at least one of them valid"),
    ],
)
def test_a_log_without_a_space_is_refused_in_one_line(tmp_path, lines, message):
    log = tmp_path / "a.jsonl"
    log.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(Error, match=message):
        list(find_recorded_spaces([log], min_configs=3))
