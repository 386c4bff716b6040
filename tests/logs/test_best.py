"""The best record of logs, of this device or the nearest; fast however long the log."""

import random
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import records

import tvmconv as tc
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import (
    DeviceMatch,
    RecordIndex,
    find_best_per_workload,
    find_best_record,
    find_unconfirmed_trial,
    index_logs_by_workload,
    list_log_files,
)
from tvmconv.logs.record import ErrorKind, Record

W, OTHER = tc.parse("conv2d:1x8x6x6,4x8x3x3,p1"), tc.parse("conv2d:1x8x6x6,8x8x1x1")
H200 = SimpleNamespace(name="NVIDIA H200", arch="sm_90", kind="cuda")
CPU = SimpleNamespace(name="cpu (PoCL)", arch=None, kind="opencl")


def record(seconds, tile=1, device="NVIDIA H200", target="cuda -arch=sm_90", **fields):
    whole = {"workload": W, "schedule": "tiling", "config": {"tile": tile}, "times": (seconds,)} | fields
    return Record(device=device, target=target, **whole)


@pytest.fixture
def write(tmp_path):
    """Write lines or records to a log; its path."""

    def write_log(*lines, name="log.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{line.line() if isinstance(line, Record) else line}\n" for line in lines))
        return path

    return write_log


@pytest.mark.parametrize(("times", "expected"), [((9, 1, 3), 3), ((9, 1), 9), ((1, 2, 3, 4), 3)])
def test_a_config_counts_by_the_median_of_its_trials(write, times, expected):
    first, second = (
        write(*(record(t * 1e-6) for t in part), name=n) for part, n in ((times[:1], "1"), (times[1:], "2"))
    )
    rival = write(record(expected * 1e-6 + 1e-9, tile=2), name="rival")
    assert find_best_record([first, second, rival], W) == record(expected * 1e-6)


def test_trials_on_two_devices_are_not_trials_of_one_config(write):
    log = write(record(1e-6, device="V100"), record(3e-6), record(5e-6), record(3e-6))
    assert [found.cost for found in find_best_per_workload({log: InvalidLines()})] == [1e-6, 3e-6]


def test_the_best_may_be_asked_of_a_schedule_and_a_device(write):
    log = write(record(1e-6, device="V100"), record(2e-6, schedule="vthread"), record(3e-6), record(4e-6, tile=2))
    assert find_best_record(log, W, schedule="tiling", device="NVIDIA H200") == record(3e-6)
    assert find_best_record(log, W, schedule=["tiling", "vthread"], device="NVIDIA H200").schedule == "vthread"
    assert find_best_record(log, W, device="TPU") is None


def test_errors_and_garbage_are_never_the_best(write):
    failed = record(0, times=(), error=ErrorKind.RUNTIME)
    assert find_best_record(write("garbage", failed, record(2e-6), record(1e-6).line()[:-5]), W) == record(2e-6)
    assert find_best_record(write(failed), W) is None


def final(seconds, tile, **fields):
    return record(seconds, tile=tile, final=True, **fields)


def test_last_timings_decide_among_the_fastest(write):
    trials = record(1e-6, tile=1), record(2e-6, tile=2), record(3e-6, tile=3)
    finals = final(6e-6, tile=1), final(5e-6, tile=2)
    assert find_best_record(write(*trials, *finals), W) == finals[1]
    assert find_best_record(write(*finals), W) == finals[1]  # where a log was thinned
    lucky = record(0.9e-6, tile=4)
    assert find_best_record(write(*trials, *finals, lucky), W) == finals[1]  # until it is timed again
    ranked = find_best_per_workload({write(*trials, *finals, lucky): InvalidLines()}, max_configs=9)
    assert ranked == [finals[1], finals[0], lucky, trials[2]]


def test_a_trial_faster_than_all_final_timings_is_unconfirmed(write):
    def found(*records):
        (indexes,) = index_logs_by_workload({write(*records): InvalidLines()}).values()
        return find_unconfirmed_trial(indexes)

    trials = record(1e-6, tile=1), record(2e-6, tile=2)
    assert found(*trials) is None
    assert found(*trials, final(3e-6, tile=1)) == trials[1]
    assert found(*trials, final(3e-6, tile=1), final(4e-6, tile=2)) is None
    assert found(*trials, final(1.5e-6, tile=1)) is None


def test_of_last_timings_of_a_config_the_latest_counts(write):
    first, again = final(4e-6, tile=1, timestamp=1.0), final(7e-6, tile=1, timestamp=2.0)
    other = final(5e-6, tile=2, timestamp=1.0)
    assert find_best_record(write(again, first, other, record(3e-6, tile=1)), W) == other


def test_a_last_timing_that_failed_is_none(write):
    failed = record(0, tile=1, times=(), error=ErrorKind.RUNTIME, final=True)
    assert find_best_record(write(record(1e-6, tile=1), failed), W) == record(1e-6, tile=1)
    other = final(5e-6, tile=2)
    assert find_best_record(write(record(1e-6, tile=1), failed, other), W) == other


def test_wrong_answer_in_any_log_makes_a_config_invalid(write):
    right = write(record(1e-6, tile=1), record(2e-6, tile=2), final(1.5e-6, tile=1), name="right.jsonl")
    for target in ("cuda -arch=sm_90", "opencl"):
        wrong = write(record(0, tile=1, target=target, times=(), error=ErrorKind.WRONG_ANSWER), name="wrong.jsonl")
        expected = record(2e-6, tile=2)
        assert find_best_record([right, wrong], W) == find_best_record([wrong, right], W) == expected
        assert find_best_per_workload({wrong: InvalidLines(), right: InvalidLines()}, max_configs=9) == [expected]
        assert [found for _, found in RecordIndex([right, wrong]).iterate_by_device_match(W, H200)] == [expected]
    elsewhere = record(0, device="NVIDIA H100", times=(), error=ErrorKind.WRONG_ANSWER)
    assert find_best_record(write(record(1e-6), elsewhere), W) == record(1e-6)


def test_a_line_that_only_looks_like_a_record_is_passed_over(write):
    broken = record(1e-6).line().replace('["tile", "ot", 1]', '["tile", "ot"]')
    assert find_best_record(write(broken, record(2e-6)), W) == record(2e-6)
    broken = record(1e-6, message="spoilt").line().replace('"spoilt"', "5")
    assert find_best_record(write(record(2e-6), broken, record(3e-6, tile=2)), W) == record(2e-6)


def best_of_all(found):
    """What `find_best_per_workload` says of records of one workload on one device, found without an index."""
    wrong = {record.identity for record in found if record.error is ErrorKind.WRONG_ANSWER}
    valid = [record for record in found if record.ok and record.identity not in wrong]
    latest = {record.identity: record for record in sorted(valid, key=lambda record: record.timestamp) if record.final}
    trials = {}
    for record in valid:
        trials.setdefault(record.identity, []).append(record.cost)
    medians = [statistics.median_high(costs) for costs in trials.values()]
    return min([record.cost for record in latest.values()] or medians, default=None)


@settings(max_examples=30)
@given(st.lists(records(schedules=("direct",)), max_size=12))
def test_the_fast_way_finds_what_the_slow_way_finds(tmp_path_factory, found):
    log = tmp_path_factory.mktemp("log") / "log.jsonl"
    log.write_text("".join(f"{replace(record, timestamp=float(i)).line()}\n" for i, record in enumerate(found)))
    of_each = {}
    for record in read_records(log, InvalidLines()):
        of_each.setdefault((record.workload, record.device), []).append(record)
    slow = {key: cost for key, of_one in of_each.items() if (cost := best_of_all(of_one))}
    fast = {(record.workload, record.device): record.cost for record in find_best_per_workload({log: InvalidLines()})}
    assert fast == slow


def test_a_folder_stands_for_the_logs_below_it(write, tmp_path):
    with pytest.raises(tc.Error, match=r"no logs in folder .*: expected files \*\.jsonl"):
        find_best_record(tmp_path, W)
    slow, fast = write(record(2e-6, tile=2)), write(record(1e-6), name="more/log.jsonl")
    assert sorted(list_log_files(tmp_path)) == sorted([slow, fast])
    assert find_best_record(tmp_path, W) == find_best_record([slow, fast], W) == record(1e-6)


def test_nearest_device_comes_first_and_then_the_fastest_record(write):
    here = [record(8e-6, tile=1), record(9e-6, tile=2)]
    same_arch = record(7e-6, device="NVIDIA H100")
    near, far = (record(t, device=n, target=f"cuda -arch={n}") for t, n in ((6e-6, "sm_86"), (5e-6, "sm_61")))
    unknown = record(4e-6, device="v100", target="cuda -model=v100")
    opencl = record(3e-6, device="cpu", target="opencl")
    log = write(opencl, unknown, far, near, same_arch, *reversed(here))
    assert list(RecordIndex(log).iterate_by_device_match(W, H200)) == [
        (DeviceMatch.DEVICE, here[0]),
        (DeviceMatch.DEVICE, here[1]),
        (DeviceMatch.ARCH, same_arch),
        (DeviceMatch.KIND, near),
        (DeviceMatch.KIND, far),
        (DeviceMatch.KIND, unknown),
    ]
    assert list(RecordIndex(log).iterate_by_device_match(W, CPU)) == [(DeviceMatch.KIND, opencl)]


@pytest.mark.slow
def test_best_of_100_thousand_lines_is_found_in_seconds(tmp_path):
    log = tmp_path / "log.jsonl"
    first, rest = record(0.125, tile=77777).line().split("77777")
    middle, last = rest.split("0.125")
    rng = random.Random(0)
    times = [rng.uniform(1e-5, 1e-3) for _ in range(100_000)]
    with log.open("w") as file:
        file.writelines(f"{first}{tile}{middle}{seconds!r}{last}\n" for tile, seconds in enumerate(times))
    start = time.process_time()
    assert find_best_record(log, W).cost == min(times)
    assert time.process_time() - start < 5  # about 0.7 s on a machine that does nothing else
