"""Names of 0.1 in data and options: old and new spellings are one config, and only new names are written."""

import json
import logging
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import tvmconv as tc
from tvmconv import compat, jsonfile
from tvmconv.cost_model.features import build_matrix, compute_features
from tvmconv.cost_model.model import PACKAGED_MODEL, CostModel
from tvmconv.errors import KnobError, RecordError
from tvmconv.experiments.results import ResultRow
from tvmconv.logs.header_scan import HeaderScanner
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.record import Record
from tvmconv.registry import find_schedule
from tvmconv.tensor_map import TensorMap, make_tiled_map

ROOT = Path(__file__).parent.parent
W = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
NEW = {"tile_f": (-1, 1, 8, 4), "sliced_k": 1, "copy_order": "coalesced"}
OLD = {"tile_f": (-1, 1, 8, 4), "slices": 1, "fetch": "interleaved"}


def record(config):
    target = "cuda -arch=sm_90"
    return Record(tc.parse(W), "direct", config, "NVIDIA H200", target, times=(1e-5, 1.2e-5), relative_error=1e-7)


def test_a_record_is_the_same_in_old_and_new_spelling():
    assert Record.parse(record(OLD).line()) == Record.parse(record(NEW).line()) == record(NEW)
    assert Record.parse(record(OLD).line()).identity == record(NEW).identity


def test_the_header_scanner_takes_old_and_new_spelling_for_one_config():
    scanner = HeaderScanner(lambda key: key.schedule)
    old, new = (scanner.scan_line(record(config).line().encode()) for config in (OLD, NEW))
    assert old.config == new.config
    assert b"sliced_k" in new.config


def test_the_former_key_of_the_relative_error_is_read():
    line = record(NEW).line()
    assert '"relative_error"' in line
    assert Record.parse(line.replace("relative_error", "deviation")) == record(NEW)
    with pytest.warns(DeprecationWarning, match=r"Record.relative_error"):
        assert record(NEW).deviation == 1e-7


def test_a_knob_under_both_names_is_refused():
    with pytest.raises(RecordError, match="knob twice"):
        Record.parse(record({"fetch": "interleaved", "copy_order": "coalesced"}).line())
    with pytest.raises(KnobError, match="copy_order twice"):
        compat.rename_config("direct", {"copy_order": "coalesced", "fetch": "interleaved"})


def test_a_requested_config_takes_former_names_with_one_line(caplog):
    schedule, w = find_schedule(tc.parse(W), "direct"), tc.parse(W)
    compat._reported_messages.clear()
    with caplog.at_level(logging.WARNING, "tvmconv"):
        configs = [schedule.apply(w, OLD)[1].config for _ in range(2)]
    assert configs == [schedule.apply(w, NEW)[1].config] * 2
    assert [each.getMessage() for each in caplog.records] == [
        "schedule direct: slices=1 is now sliced_k=1, fetch=interleaved is now copy_order=coalesced; "
        "the former names are deprecated"
    ]


@pytest.mark.parametrize("config", [{"fetches": 1}, {"copy_order": "no"}, {"sharers_m": 1}])
def test_unknown_names_raise(config):
    with pytest.raises(KnobError):
        find_schedule(tc.parse(W), "direct").apply(tc.parse(W), config)


def test_a_row_of_results_is_read_with_current_names():
    row = ResultRow("direct", config=OLD)
    data = json.dumps(row.to_json())
    assert ResultRow.from_json(jsonfile.parse_json(data)).config == NEW


def test_tensor_maps_are_read_with_former_keys():
    tensor_map = make_tiled_map("float16", 2, (64, 9), (64,), (32, 8), 64)
    former = {new: old for old, new in compat.TENSOR_MAP_KEYS.items()}
    data = {former.get(name, name): value for name, value in tensor_map.to_dict().items()}
    assert "steps" in data
    assert TensorMap.from_dict(data) == tensor_map


def test_json_members_have_one_name():
    data = jsonfile.parse_json('{"told": 1, "other": 2}')
    assert data.rename_members(compat.ARCHIVE_KEYS)["metadata"].value == 1
    with pytest.raises(jsonfile.JsonError, match='expected an object with "metadata" once'):
        jsonfile.parse_json('{"told": 1, "metadata": 2}').rename_members(compat.ARCHIVE_KEYS)


def test_tables_are_consistent():
    for schedule, new_by_old in compat.KNOBS.items():
        assert not {*new_by_old} & {*new_by_old.values()}, schedule
        assert len({*new_by_old.values()}) == len(new_by_old), schedule
    for schedule, values_by_knob in compat.KNOB_VALUES.items():
        assert {*values_by_knob} <= {*compat.KNOBS[schedule].values()}
        for new_by_old in values_by_knob.values():
            assert len({*new_by_old.values()}) == len(new_by_old)
            assert not {*new_by_old} & {*new_by_old.values()}


@pytest.mark.parametrize(
    ("schedule", "old", "new"),
    [
        ("hopper", "rows", "wgmma_m_tiles"),
        ("hopper", "rounds", "cluster_waves"),
        ("hopper", "w.rows", "w.rows"),
        ("stem", "rows", "block_p"),
        ("stem", "blocks", "blocks"),
        ("mma_sync", "meet=scratch", "split_k_reduction=workspace"),
        ("direct", "weight_layout=oihw", "weight_layout=oihw"),
        ("depthwise_nhwc", "weight=global", "weight_scope=global"),
        ("direct", "tile_f.0", "tile_f.0"),
        ("direct", "estimate/least", "estimate/least"),
    ],
)
def test_features_have_current_names(schedule, old, new):
    assert compat.rename_feature(schedule, old) == new


LAYERS = (
    W,
    "conv2d:1x96x56x56,96x1x3x3,s1,p1,g96",
    "conv2d:1x96x56x56,96x1x3x3,s1,p1,g96,nhwc",
    "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc",
    "conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc,add",
    "conv2d:1x3x224x224,64x3x7x7,s2,p3,f16,nhwc",
)


def test_the_packaged_model_has_features_that_its_schedules_produce():
    model = CostModel.load(PACKAGED_MODEL)
    seen = set()
    for text in LAYERS:
        w = tc.parse(text)
        for schedule in tc.schedules(w):
            schedule_model = model.schedule_models.get(schedule.name)
            if schedule_model is None:
                continue
            space = schedule.space(w)
            features = compute_features(w, space, np.zeros((1, len(space.knobs)), np.int32), model.device_spec)
            build_matrix(features, schedule_model.names, schedule_model.knobs)
            missing = {name for name in schedule_model.names if name not in features and "=" not in name}
            assert not {compat.split_feature(name)[0] for name in missing} & {*space.knobs}, schedule.name
            assert len({*schedule_model.names}) == len(schedule_model.names)
            for config in (*schedule_model.portfolio, *(example.config for example in schedule_model.examples)):
                assert {*config} <= {*schedule_model.knobs}
            seen.add(schedule.name)
    assert seen == {*model.schedule_models}


def test_a_feature_that_no_schedule_produces_raises():
    columns = {"blocks": np.zeros(2, np.float32)}
    assert build_matrix(columns, ("blocks", "taps"), ("taps",)).tolist() == [[0, -1]] * 2
    with pytest.raises(ValueError, match="does not produce: rounds"):
        build_matrix(columns, ("blocks", "rounds"), ("taps",))


def logs():
    data = Path(__file__).parent / "data"
    return sorted((*ROOT.glob("tuning_logs/**/*.jsonl"), *data.glob("**/*.jsonl"), *data.glob("**/*.jsonl.gz")))


@cache
def knobs_of(workload, schedule):
    return {*find_schedule(workload, schedule).space(workload).knobs}


def test_every_knob_of_the_recorded_logs_is_known():
    """Each schedule is asked once for each set of knobs that a log has of it."""
    checked = set()
    for path in logs():
        for each in read_records(path, InvalidLines()):
            sample = (
                each.workload.operator,
                each.workload.layout if hasattr(each.workload, "layout") else "",
                (each.schedule, tuple(each.config)),
            )
            if sample not in checked:
                checked.add(sample)
                unknown = {*each.config} - knobs_of(each.workload, each.schedule)
                assert not unknown, f"{path}: {each.schedule} has no knobs {unknown}"
    assert len({schedule for _, _, (schedule, _) in checked}) >= 10


# Records of hopper, in d2l-*-nhwc*.jsonl, that violate constraints which later commits added.
NUM_OUTDATED = 11


@pytest.mark.slow
def test_every_recorded_config_still_applies():
    outdated = []
    for path in logs():
        for each in read_records(path, InvalidLines()):
            if each.ok:
                try:
                    find_schedule(each.workload, each.schedule).apply(each.workload, each.config)
                except tc.KnobError as error:
                    outdated.append((path.name, each.schedule, str(error)))
    assert {schedule for _, schedule, _ in outdated} <= {"hopper"}
    assert all(name.startswith("d2l-") and "violate the constraint" in error for name, _, error in outdated)
    assert len(outdated) <= NUM_OUTDATED


def test_former_keywords_and_classes_are_accepted():
    @compat.accept_former_keywords(compare="measure_baseline")
    def search(measure_baseline=True):
        return measure_baseline

    with pytest.warns(DeprecationWarning, match=r"search\(compare=\) is now measure_baseline="):
        assert search(compare=False) is False
    with pytest.raises(TypeError, match="its former name"):
        search(compare=False, measure_baseline=False)
    with pytest.warns(DeprecationWarning, match="transfer_logs"), pytest.raises(tc.TuningError, match="transfer_logs"):
        tc.tune(W, "tiling", transfer=5)
    assert (tc.Tuned, tc.Status) == (tc.TuneResult, tc.SearchProgress)
