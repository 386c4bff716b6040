"""A search measures what it was asked for, each config once, puts it on disk, and goes on where it was interrupted."""

import dataclasses
import functools
import itertools
import time

import few_faults
import numpy as np
import pytest
from instant import made_up
from searches import IMAGE, OTHER, TINY, WORKLOAD, append, finals_of, once, records_of, search, some, trials_of

import tvmconv as tc
from tvmconv import registry
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import Log, read_records
from tvmconv.measure.measurer import Measurer
from tvmconv.registry import low_priority_schedules
from tvmconv.search.progress import SearchProgress
from tvmconv.search.tuners import BayesianTuner


@pytest.mark.usefixtures("shared_processes")
def test_a_search_measures_verifies_and_confirms(log):
    tuned = search(log, trials=4, measure_baseline=True, remeasure_best=True)
    reference, *trials = trials_of(log)
    assert [record.schedule for record in trials] == ["tiling"] * 4
    assert once(trials)
    assert reference.schedule == "default"
    assert (tuned.status.num_trials, tuned.status.num_resumed, tuned.status.error_counts.total()) == (4, 0, 0)
    assert tuned.status.best == min(trials, key=lambda record: record.cost)
    assert tuned.status.speedup == reference.cost / tuned.status.best.cost
    assert tuned.final.relative_error < tuned.final.workload.tolerance
    assert tuned.final.timestamp > max(record.timestamp for record in trials)
    assert tuned.final.config in [record.config for record in trials]
    finals = [record for record in finals_of(log) if record.schedule == "tiling"]  # the naive schedule is no finalist
    assert tuned.final == min(finals, key=lambda record: record.cost)
    assert all(record.relative_error < WORKLOAD.tolerance for record in finals_of(log))
    assert tuned.phases["verify"] > 0
    assert tuned.seconds > 0


@pytest.mark.usefixtures("shared_processes")
def test_each_way_to_fail_is_one_record_and_the_search_goes_on(log, monkeypatch):
    strict = functools.partial(Measurer, build_timeout=8.0, memory_limit=1 << 30)
    monkeypatch.setattr("tvmconv.search.search.Measurer", strict)
    tuned = search(log, few_faults.WORKLOAD, few_faults.SCHEDULE, "grid", trials=100)
    kinds = {record.config["fault"]: record.error for record in records_of(log)}
    assert kinds == few_faults.FAULTS
    assert tuned.status.num_trials == len(few_faults.FAULTS)
    assert tuned.status.error_counts.total() == len(few_faults.FAULTS) - 1
    assert tuned.status.best.config == {"fault": "none"}


@pytest.mark.usefixtures("shared_processes")
def test_the_time_limit_holds(log):
    start = time.monotonic()
    status = search(log, seconds=2.0).status
    assert 2.0 <= status.elapsed_seconds < time.monotonic() - start < 20.0
    assert status.num_trials == len(records_of(log)) > 0


def test_it_ends_when_nothing_was_better_for_long(log, instant):
    status = search(log, trials=1000, patience=30).status
    assert status.trials_since_best >= 30
    assert status.num_trials < 1000


def test_it_ends_with_the_last_config_of_the_space(log, instant):
    size = registry.find_schedule(TINY, "tiling").space(TINY).size
    status = search(log, TINY).status
    assert (status.max_trials, status.num_trials) == (512, size)
    assert once(records_of(log))


def test_a_lost_device_ends_it_with_the_records_so_far_on_disk(log, instant):
    instant.lasts, instant.loss = 3, tc.DeviceError("opencl:0 is lost")
    with pytest.raises(tc.DeviceError, match="is lost"):
        search(log, trials=10)
    assert len(records_of(log)) == 3


def test_a_record_is_on_disk_before_it_is_counted(log, instant):
    seen = []
    search(log, trials=5, progress=lambda status: seen.append((status.num_trials, len(records_of(log)))))
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5]
    assert all(done <= there for done, there in seen)


def interrupted(log, after, **options):
    """A search that Ctrl-C ends after so many records."""

    def progress(status):
        if status.num_trials >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(log, progress=progress, **options)


@pytest.mark.sample(3)
@pytest.mark.parametrize("tuner", ["random", "grid", "ga", "gp"])
def test_the_same_call_goes_on_where_it_was_interrupted(log, instant, tuner):
    interrupted(log, 13, tuner=tuner, trials=30)
    status = search(log, tuner=tuner, trials=30).status
    assert (status.num_trials, status.num_resumed) == (30, 13)
    assert len(records_of(log)) == 30
    assert once(records_of(log))


def test_the_time_adds_up_over_sessions(log, instant):
    for after in (3, 6, 9):
        interrupted(log, after, trials=12)
    elapsed = [record.elapsed for record in records_of(log)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(elapsed))


def test_a_search_that_is_complete_measures_nothing_again(log, instant):
    search(log, trials=5, measure_baseline=True)
    before = log.read_bytes()
    instant.measured.clear()
    tuned = search(log, trials=5, measure_baseline=True)
    assert instant.measured == []
    assert log.read_bytes() == before
    assert (tuned.status.num_trials, tuned.status.reference.schedule, tuned.phases) == (5, "default", {})


def test_records_of_other_workloads_and_devices_do_not_count(log, instant, opencl):
    (record,) = some(1, 0, opencl)
    append(log, [made_up(OTHER, "tiling", record.config, opencl.name)])
    append(log, [made_up(WORKLOAD, "columns", record.config, opencl.name)])
    append(log, [made_up(WORKLOAD, "tiling", record.config, "another device")])
    status = search(log, trials=3).status
    assert (status.num_trials, status.num_resumed) == (3, 0)


def test_records_that_another_search_appends_are_not_repeated(log, instant, opencl):
    theirs = iter(some(10, 7, opencl))
    status = search(log, trials=20, progress=lambda status: append(log, itertools.islice(theirs, 1))).status
    assert status.num_trials >= 20
    assert once(records_of(log))
    assert len(instant.measured) <= 11


@pytest.mark.parametrize("end", [b'{"input": ["opencl", "conv2d', b"\xff\x00\xfe garbage \x80\n"])
def test_a_damaged_log_is_gone_on_with(log, instant, opencl, end):
    append(log, some(3, 0, opencl))
    before = log.read_bytes() + end
    log.write_bytes(before)
    status = search(log, trials=6).status
    assert (status.num_trials, status.num_resumed) == (6, 3)
    assert log.read_bytes().startswith(before)
    bad = InvalidLines()
    assert len(list(read_records(log, bad))) == 6
    assert bad.count == 1


@pytest.mark.parametrize("path", ["/dev/full", "/proc/version", "/", "/nowhere/log.jsonl"])
def test_unwritable_log_is_refused_before_anything_is_measured(path, instant):
    with pytest.raises(tc.Error, match=f"^cannot write {path}: "):
        search(path, trials=3)
    assert instant.measured == []


def test_a_search_that_fails_before_a_record_leaves_no_log(log, instant, monkeypatch):
    monkeypatch.setattr("tvmconv.search.search._SearchSession.run_trials", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        search(log, trials=3)
    assert not log.exists()


def test_full_disk_ends_the_search_with_the_records_so_far(log, instant, monkeypatch):
    appended = Log.append

    def append(self, record):
        if log.exists() and len(records_of(log)) == 3:
            raise tc.Error(f"cannot write {log}: No space left on device")
        appended(self, record)

    monkeypatch.setattr(Log, "append", append)
    with pytest.raises(tc.Error, match="No space left on device"):
        search(log, trials=10)
    assert len(records_of(log)) == 3


@pytest.mark.slow
def test_the_same_seed_proposes_the_same_of_several_schedules(tmp_path, instant):
    orders = []
    for number, seed in enumerate((1, 1, 2)):
        instant.measured.clear()
        search(tmp_path / f"{number}.jsonl", tuner="gp", schedule=None, trials=60, seed=seed, remeasure_best=True)
        orders.append(list(instant.measured))
    assert orders[0] == orders[1] != orders[2]
    assert len({name for name, _ in orders[0]}) > 2


def test_model_learns_from_other_workloads_of_the_schedule(log, tmp_path, instant, monkeypatch):
    learnt = []
    monkeypatch.setattr(BayesianTuner, "tell_transfer_trials", lambda self, space, records: learnt.append(records))
    for workload, schedule in ((OTHER, "tiling"), (WORKLOAD, "tiling"), (OTHER, "columns")):
        search(log, workload, schedule, trials=4)
    search(tmp_path / "new.jsonl", tuner="gp", trials=4, transfer_logs=[log])
    (records,) = learnt
    assert {(record.workload, record.schedule) for record in records} == {(OTHER, "tiling")}
    assert len(records) == 4


def test_what_does_not_compare_is_not_learnt(log, tmp_path, instant, monkeypatch):
    """Last timings, records of another kind of device, and of operators whose schedule has the same name."""
    learnt = []
    monkeypatch.setattr(BayesianTuner, "tell_transfer_trials", lambda self, space, records: learnt.append(records))
    search(log, OTHER, "direct", trials=2)
    ((*_, one),) = [list(read_records(log, InvalidLines()))]
    filters = dataclasses.replace(one, workload=tc.parse("filter2d:64x64x1,3x3"), config={})
    others = *(dataclasses.replace(one, **it) for it in ({"target": "cuda -arch=sm_90"}, {"final": True})), filters
    more = tmp_path / "more.jsonl"
    more.write_text("".join(f"{record.line()}\n" for record in others))
    search(
        tmp_path / "new.jsonl", WORKLOAD, "direct", tuner="gp", trials=2, transfer_logs=(path for path in [log, more])
    )
    (records,) = learnt
    assert {record.identity for record in records} <= {record.identity for record in read_records(log, InvalidLines())}
    assert len(records) == 2


def schedules_measured(instant):
    return list(dict.fromkeys(name for name, _ in instant.measured))


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["filter1d:1000,k3", "filter2d:40x30x1,3x3", "conv2d:1x8x9x9,8x1x3x3,g8"])
def test_search_without_a_schedule_tries_the_librarys_choice(log, instant, text):
    w = tc.parse(text)
    chosen, reserve = (
        [schedule.name for schedule in found(w, "opencl")]
        for found in (registry.schedules_to_tune, low_priority_schedules)
    )
    tuned = search(log, w, None, "gp", trials=len(chosen) + len(reserve))
    assert schedules_measured(instant) == [*chosen, *reserve]
    assert tuned.status.best.schedule in schedules_measured(instant)


@pytest.mark.parametrize("tuner", ["gp", "ga"])
def test_defaults_come_first_and_then_what_other_workloads_found(log, instant, opencl, tuner):
    space = registry.find_schedule(OTHER, "tiling").space(OTHER)
    known = space.config_from_point(space.sample_legal(1, np.random.default_rng(3))[0])
    append(log, [made_up(OTHER, "tiling", known, opencl.name)])
    search(log, tuner=tuner, schedule=None, trials=20)
    chosen = [schedule.name for schedule in registry.schedules_to_tune(WORKLOAD, "opencl")]
    assert [name for name, _ in instant.measured[: len(chosen)]] == chosen
    there = registry.find_schedule(WORKLOAD, "tiling").space(WORKLOAD)
    assert instant.measured[len(chosen)] == ("tiling", there.config_from_point(there.project(known)))


def test_several_schedules_share_the_trials_and_the_time(log, instant, monkeypatch):
    asked = []

    def told(trials, seconds):
        asked.append((trials, seconds))
        return SearchProgress(trials, None)

    monkeypatch.setattr("tvmconv.search.search.SearchProgress", told)
    tuned = search(log, schedule=None, tuner="gp", trials=40, seconds=1000.0)
    assert asked == [(40, 1000.0)]
    assert tuned.status.num_trials == len(records_of(log)) == 40
    assert {schedule.name for schedule in registry.schedules_to_tune(WORKLOAD, "opencl")} < set(
        schedules_measured(instant)
    )
    assert tuned.final == min(records_of(log), key=lambda record: record.cost)


@pytest.fixture
def small(opencl):
    """The device with work-groups of so few work-items that most configs exceed them."""
    return dataclasses.replace(opencl, max_threads_per_block=64)


def test_no_trial_is_spent_on_what_the_device_in_hand_cannot_run(log, instant, small):
    search(log, IMAGE, "direct", trials=40, device=small)
    space = registry.find_schedule(IMAGE, "direct").space(IMAGE)
    points = np.array([space.point_from_config(config) for _, config in instant.measured])
    assert len(points) == 40
    assert space.compute_usage(points).threads.max() <= 64
