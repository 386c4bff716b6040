import functools
import json
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from tvmconv import jsonfile, registry
from tvmconv.baselines.base import REGISTRY, Baseline
from tvmconv.devices import Arch, Timing
from tvmconv.devices.power import PowerSample
from tvmconv.errors import CompileError, DeviceError, KnobError
from tvmconv.experiments import run
from tvmconv.experiments.preparation import list_unsupported_schedules, select_schedules
from tvmconv.experiments.results import Result, ResultRow
from tvmconv.experiments.run import run_schedules
from tvmconv.kernel import Kernel
from tvmconv.measure import timing_rounds
from tvmconv.reports.tables import format_result
from tvmconv.workloads import Conv2d, parse

ALL = ["default", "tiling", "columns", "vthread", "conflict_free", "direct", "implicit_gemm"]
ALL += ["winograd", "winograd_fused"]
SMALL = parse("conv2d:1x4x6x6,8x4x3x3,p1")


@pytest.fixture(scope="module")
def ladder(opencl):
    return run_schedules(SMALL, device=opencl, seconds=0.01, seed=1)


def broken(s, w, k):
    k.choice("broken_by", (1, 2), default=1)
    raise CompileError("broken on purpose")


@pytest.fixture
def with_broken(schedule_registry):
    """A schedule in the library that never compiles."""
    registry.schedule("conv2d")(broken)


@pytest.fixture
def cuda_only(schedule_registry):
    """A schedule in the library that is for CUDA alone."""

    def shuffle(s, w, k):
        """Never built here."""

    registry.schedule("conv2d", device_kinds=("cuda",))(shuffle)


def names(result):
    return [row.name for row in result.rows]


def test_every_schedule_runs_in_order_and_is_verified(ladder):
    assert names(ladder) == ALL
    assert all(row.verified and row.error < 1e-5 and row.timing for row in ladder.rows)
    assert ladder.has_all_times


def test_rates_are_flops_over_the_median(ladder):
    assert all(row.gflops == pytest.approx(SMALL.flops / row.timing.median / 1e9) for row in ladder.rows)


def test_json_round_trip_is_exact(ladder):
    assert Result.from_json(jsonfile.parse_json(json.dumps(ladder.to_json()))) == ladder


def test_json_has_no_nan(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "__call__", lambda self, *inputs: np.full(SMALL.output_shape, np.nan, "float32"))
    result = run_schedules(SMALL, ["default"], device=opencl, seconds=0.01)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"][0]["error"] is None


def test_a_named_schedule_runs_with_default_before_it(opencl):
    assert names(run_schedules(SMALL, ["tiling"], device=opencl, seconds=0.01)) == ["default", "tiling"]


def test_a_knob_that_no_schedule_has_is_refused(opencl):
    with pytest.raises(KnobError, match=r"no knob 'colour' in tiling; there are: tile_c, "):
        run_schedules(SMALL, ["tiling"], device=opencl, config={"colour": 1})


@pytest.mark.usefixtures("with_broken")
def test_a_schedule_that_fails_is_a_row_and_the_others_go_on(opencl):
    result = run_schedules(SMALL, ["broken"], device=opencl, seconds=0.01)
    assert [(row.name, row.failure) for row in result.rows] == [("default", None), ("broken", "broken on purpose")]
    assert not result.has_all_times


def test_what_stops_every_schedule_is_raised():
    with pytest.raises(DeviceError, match="sm_90 is to compile for only"):
        run_schedules(SMALL, device=Arch("sm_90"))


@pytest.mark.usefixtures("cuda_only")
def test_a_schedule_for_other_devices_is_left_out(opencl):
    assert [schedule.name for schedule in select_schedules(SMALL, None, opencl)] == ALL
    assert [schedule.name for schedule in list_unsupported_schedules(SMALL, opencl)] == ["shuffle"]


def test_a_wrong_kernel_is_never_timed(opencl, monkeypatch):
    reference = Conv2d.reference
    monkeypatch.setattr(Conv2d, "reference", lambda w, x, k: reference(w, x, k) + 1)
    monkeypatch.setattr(Kernel, "time", lambda *args, **kwargs: pytest.fail("timed"))
    (row,) = run_schedules(SMALL, ["default"], device=opencl).rows
    assert (row.verified, row.timing) == (False, None)
    assert "wrong result" in row.failure


def test_the_cudnn_baseline_is_refused_before_anything_is_built(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "verify", lambda *args: pytest.fail("verified"))
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU"):
        run_schedules(SMALL, device=opencl, baselines=["cudnn"])


@pytest.fixture
def time_rounds(opencl, monkeypatch):
    """Return the rows of a schedule whose rounds take these seconds, and of a library, and the library's rounds."""

    def run(*seconds):
        times, calls = iter(seconds), []

        def time_again(round_seconds):
            calls.append("timed")
            return Timing((0.5e-3,), "by hand", cold=False)

        def library(w, inputs, *, device, cold, seconds):
            first = Timing((99.0,), "by hand", cold)
            return Baseline(first, w.reference(*inputs), "a library", time_again, lambda: calls.append("closed"))

        monkeypatch.setitem(REGISTRY, "library", library)
        monkeypatch.setattr(Kernel, "time", lambda kernel, problem, **how: Timing((next(times),), "by hand", False))
        result = run_schedules(SMALL, ["default"], device=opencl, seconds=0.3, baselines=["library"])
        return *result.rows, calls

    return run


@pytest.mark.parametrize(
    ("seconds", "median"),
    [((1.02e-3, 1.0e-3, 1.01e-3), 1.01e-3), ((58e-6, 28e-6, 29e-6, 30e-6), 29e-6)],
    ids=["stable", "one outlier, timed again alone"],
)
def test_schedules_and_libraries_are_timed_in_three_rounds(time_rounds, seconds, median):
    default, library, calls = time_rounds(*seconds)
    assert (default.rounds, default.timing.median, default.unstable) == (seconds, median, False)
    assert (library.timing.median, library.rounds) == (0.5e-3, (0.5e-3, 0.5e-3, 0.5e-3))
    assert calls == ["timed", "timed", "timed", "closed"]


@pytest.mark.parametrize("has_right_algorithm", [True, False])
def test_a_library_with_a_wrong_result_takes_its_fastest_right_algorithm(opencl, monkeypatch, has_right_algorithm):
    closed = []

    def library(w, inputs, *, device, cold, seconds, is_right=lambda y: True):
        right = w.reference(*inputs).astype("float32")
        for name, y in [("fast", right + 1), ("slow", right if has_right_algorithm else right + 2)]:
            if is_right(y):
                close = functools.partial(closed.append, name)
                return Baseline(Timing((1.0,), "by hand", cold), y, name, close=close)
        raise DeviceError("no algorithm is right")

    monkeypatch.setitem(REGISTRY, "library", library)
    monkeypatch.setattr(run, "CHECKING", {"library"})
    row = run_schedules(SMALL, ["default"], device=opencl, seconds=0.01, baselines=["library"]).rows[-1]
    if has_right_algorithm:
        assert (row.verified, row.library, row.failure) == (True, "slow", None)
        assert closed == ["fast", "slow"]
    else:
        assert (row.timing, row.failure) == (None, "no algorithm is right")
        assert closed == ["fast"]


def test_what_stays_unstable_is_flagged_in_the_table_and_in_json(time_rounds):
    default, other, _ = time_rounds(1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3)
    result = Result(SMALL, "opencl:0", "a device", 0, (default, other))
    assert default.unstable
    assert json.loads(json.dumps(result.to_json()))["rows"][0]["unstable"]
    text = format_result(result)
    assert "4,000 ± 0.0% unstable" in text
    assert "default: the rounds differ by more than 10 %: 1,000, 2,000, 4,000, 8,000, 16,000, 32,000 µs" in text


def slow(w, inputs, *, device, cold, seconds):
    return Baseline(Timing((1.0,), "by hand", cold), w.reference(*inputs), "slow 1.0")


def missing(w, inputs, **how):
    raise DeviceError("not installed")


def copying(w, inputs, **how):
    return Baseline(Timing((1.0,), "by hand", cold=False), None, "copy 1.0")


@pytest.fixture
def libraries(monkeypatch):
    """Libraries that need nothing installed."""
    for library_ in (slow, missing, copying):
        monkeypatch.setitem(REGISTRY, library_.__name__, library_)


@pytest.mark.usefixtures("libraries")
def test_libraries_are_the_last_rows_in_the_order_asked_for(opencl):
    names = ["missing", "slow", "copying"]
    default, *rows = run_schedules(SMALL, ["default"], device=opencl, seconds=0.01, baselines=names).rows
    assert (default.name, default.failure) == ("default", None)
    assert [(row.name, row.library, row.failure) for row in rows] == [
        ("missing", None, "not installed"),
        ("slow", "slow 1.0", None),
        ("copying", "copy 1.0", None),
    ]
    copying = rows[-1]  # computes something else than a convolution
    assert (copying.verified, copying.gflops, copying.bandwidth) == (False, None, SMALL.min_bytes)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("cache", "cold"), [(SMALL.min_bytes - 1, True), (SMALL.min_bytes, False), (None, False)])
def test_times_are_cold_where_the_arrays_exceed_the_cache(opencl, cache, cold):
    device = replace(opencl, l2_bytes=cache)
    row = run_schedules(SMALL, ["default"], device=device, seconds=0.01, baselines=["slow"], cold=None).rows[-1]
    assert row.timing.cold == cold


@pytest.mark.gpu
def test_rows_on_a_gpu_have_registers_and_a_share_of_the_peak(gpu):
    result = run_schedules(SMALL, device=gpu, seconds=0.01)
    assert all(row.registers and row.spills == 0 and 0 < row.peak_share < 1 for row in result.rows)


@pytest.mark.gpu
def test_cudnn_is_the_last_row(gpu):
    pytest.importorskip("torch")
    row = run_schedules(SMALL, ["default"], device=gpu, baselines=["cudnn"], seconds=0.01).rows[-1]
    assert (row.name, row.verified) == ("cudnn", True)
    assert row.library.startswith("cuDNN")


@pytest.mark.usefixtures("libraries")
def test_each_row_that_has_a_time_has_a_sustained_run(opencl, monkeypatch):
    def read():
        return PowerSample(time.monotonic(), 1.5e9, 200.0 * time.monotonic())

    monkeypatch.setattr(type(opencl), "open_sensors", lambda device: read)
    names = ["missing", "slow"]
    result = run_schedules(SMALL, ["default"], device=opencl, seconds=0.01, baselines=names, sustained=0.05)
    runs = {row.name: row.sustained for row in result.rows}
    assert runs["missing"] is None
    assert (runs["default"].clock_hz, runs["slow"].clock_hz) == (1.5e9, 1.5e9)
    assert runs["slow"].seconds == 1.0


def test_a_device_without_sensors_is_refused_before_anything_is_built(opencl, monkeypatch):
    monkeypatch.setattr(Kernel, "verify", lambda *args: pytest.fail("verified"))
    with pytest.raises(DeviceError, match="no sensors of clock and energy"):
        run_schedules(SMALL, ["default"], device=opencl, sustained=0.1)


class FakeTimer:
    """A timer of turns, which notes them."""

    def __init__(self, name, turns):
        self.name, self.turns = name, turns

    def take_turn(self, seconds, *, counts=True):
        self.turns.append(self.name if counts else "")

    def finish(self):
        return Timing((1.0,), "in turns", False)


def test_rows_are_timed_in_turns_if_all_of_them_can_be():
    turns = []

    def make_entry(name, has_timer=True):
        timer = nullcontext(FakeTimer(name, turns)) if has_timer else None
        return run._TimingEntry(ResultRow(name), open_timer=lambda: timer)

    benchmark = run._Benchmark(None, None, True, 0.01, lambda message: None)
    timings = benchmark._time_in_turns([make_entry("tuned"), make_entry("cudnn")], 1)
    assert [timing.method for timing in timings] == ["in turns"] * 2
    assert turns == [""] * 2 * timing_rounds.NUM_WARM_UP_TURNS + ["tuned", "cudnn"] * timing_rounds.NUM_TURNS
    turns.clear()
    benchmark._time_in_turns([make_entry("tuned"), make_entry("cudnn")], 2)
    assert turns.count("") == 2 * timing_rounds.NUM_LATER_WARM_UP_TURNS
    assert benchmark._time_in_turns([make_entry("tuned"), make_entry("copy", has_timer=False)], 1) is None
    assert benchmark._time_in_turns([make_entry("tuned")], 1) is None
