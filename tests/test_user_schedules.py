"""A schedule's own code may raise anything: it fails in one line, and everything else goes on."""

import json
import sys

import pytest
import raising
from raising import line_of

import tvmconv as tc
from tvmconv import registry
from tvmconv.cli import main
from tvmconv.devices import find_device
from tvmconv.measure.builder import BuilderSetup, build_executable
from tvmconv.measure.results import ErrorKind
from tvmconv.space.search_space import ResourceUsage

TEXT = "conv2d:1x4x6x6,4x4x3x3,s1,p1"
W = tc.parse(TEXT)
MISTAKE = f"ValueError: my own mistake ({line_of(raising.bad)})"
MISSING = f"AttributeError: 'Conv2d' object has no attribute 'nothing' ({line_of(raising.raising_predicate)})"


@pytest.fixture
def few(schedule_registry, monkeypatch):
    """The schedules of conv2d are `default` and `tiling`, and what a test adds."""
    for key in [key for key in schedule_registry if key[0] == "conv2d" and key[1] not in ("default", "tiling")]:
        del schedule_registry[key]
    monkeypatch.setattr(registry, "_reported_messages", set())


@pytest.fixture
def command(capsys):
    """Runs a command line: its exit status, stdout and stderr."""

    def run(*words):
        status = main([*words])
        return status, *capsys.readouterr()

    return run


def add(function, **options):
    tc.schedule("conv2d", **options)(function)


def recurse():
    recurse()


def fail_assertion():
    assert not W


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda s: {}["tile"], r"KeyError: 'tile'"),
        (lambda s: 1 / 0, r"ZeroDivisionError: division by zero"),
        (lambda s: recurse(), r"RecursionError: maximum recursion depth exceeded.*"),
        (lambda s: fail_assertion(), r"AssertionError.*"),
        (lambda s: sys.exit(3), r"SystemExit: 3"),
        (lambda s: s.bind(5, "blockIdx.x"), r"TypeError: In \"Schedule.bind\".*"),
        (lambda s: s.work_on("nothing"), r"ValueError: Cannot find .*"),
    ],
)
def test_whatever_a_schedule_raises_is_one_line_with_the_place(few, action, reason):
    def raises(s, w, k):
        action(s)

    add(raises)
    with pytest.raises(tc.ScheduleError, match=rf"^schedule raises failed: {reason} \(test_user_schedules\.py:\d+\)$"):
        tc.build(W, "raises", arch="sm_90")


def test_an_interrupt_in_a_schedule_passes(few):
    def interrupted(s, w, k):
        raise KeyboardInterrupt

    add(interrupted)
    with pytest.raises(KeyboardInterrupt):
        tc.build(W, "interrupted", arch="sm_90")


def of_other_arguments(s, w, k):
    from tvm.s_tir import Schedule

    return Schedule(tc.parse("conv2d:1x1x2x2,1x1x1x1").prim_func())


def without_main(s, w, k):
    import tvm
    from tvm.s_tir import Schedule

    return Schedule(tvm.IRModule({"other": s.mod["main"]}))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s, w, k: 5, r"function returned int, expected None or a tvm\.s_tir\.Schedule"),
        (of_other_arguments, r"TypeError: the function that it returned takes .*, expected .*"),
        (without_main, r"ValueError: Cannot find global var \"main\" in the Module"),
    ],
)
def test_what_is_no_schedule_of_the_workload_is_refused(few, function, reason):
    function.__name__ = "function"
    add(function)
    with pytest.raises(tc.ScheduleError, match=f"^schedule function failed: {reason}"):
        tc.build(W, "function", arch="sm_90")


@pytest.mark.parametrize(
    ("usage", "reason"),
    [
        (raising.raising_usage, rf"KeyError: 'tile' \({line_of(raising.raising_usage)}\)"),
        (lambda w, c: None, r"<lambda> returned NoneType, expected a tvmconv.space.search_space.ResourceUsage"),
    ],
)
def test_a_usage_that_fails_is_one_line(few, usage, reason):
    add(raising.working, usage=usage)
    space = registry.find_schedule(W, "working").space(W)
    with pytest.raises(tc.ScheduleError, match=f"^schedule working failed: {reason}"):
        space.is_legal(space.slice_points(0, 2))


def test_a_condition_of_knobs_that_fails_is_one_line(few):
    def searched(s, w, k):
        k.prune("odd", lambda c: c["nothing"] % 2)

    add(searched)
    space = registry.find_schedule(W, "searched").space(W)
    with pytest.raises(tc.ScheduleError, match=r"^schedule searched failed: KeyError: 'nothing' \(test_user"):
        space.is_legal(space.slice_points(0, 1))


def test_a_condition_that_fails_is_reported_at_its_use(few):
    add(raising.working, condition=raising.raising_predicate)
    assert "working" in [s.name for s in tc.schedules(W)]
    with pytest.raises(tc.ScheduleError) as caught:
        tc.build(W, "working", arch="sm_90")
    assert str(caught.value) == f"schedule working failed: {MISSING}"


@pytest.mark.parametrize("option", ["condition", "search_if", "defers_when"])
def test_a_search_leaves_out_a_schedule_that_fails_when_asked(few, caplog, option):
    add(lambda s, w, k: None, search_if=lambda w: True)
    add(raising.working, **{"search_if": lambda w: True, option: raising.raising_predicate})
    for _ in range(2):
        first = registry.schedules_to_tune(W, "opencl")
        assert "working" not in [s.name for s in (*first, *registry.low_priority_schedules(W, "opencl"))]
    assert [r.getMessage() for r in caplog.records] == [
        f"schedule working failed: {MISSING}; the search goes on without it"
    ]


def test_run_has_a_failed_row_and_goes_on(few, command):
    add(raising.bad)
    status, out, err = command("run", TEXT, "--device", "opencl:0", "--seconds", "0.001")
    assert (status, out.splitlines()[-1]) == (1, f"bad failed: {MISTAKE}")
    assert "tiling" in out
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "options", [{"usage": raising.raising_usage}, {"condition": raising.raising_predicate}], ids=["usage", "condition"]
)
def test_run_of_others_is_not_touched_by_a_schedule_that_fails(few, command, options):
    add(raising.working, **options)
    status, out, _ = command("run", TEXT, "default", "--device", "opencl:0", "--seconds", "0.001")
    assert status == 0
    assert "failed" not in out


def test_verbose_prints_the_traceback(few, command):
    add(raising.bad)
    status, out, err = command("run", TEXT, "bad", "--device", "opencl:0", "--seconds", "0.001", "--verbose")
    assert (status, out.splitlines()[-1]) == (1, f"bad failed: {MISTAKE}")
    assert "Traceback (most recent call last)" in err
    assert 'raise ValueError("my own mistake")' in err
    assert "Traceback" not in command("show", TEXT, "bad", "--arch", "sm_90")[2]


def test_schedules_lists_a_schedule_that_fails(few, command):
    add(raising.bad)
    status, out, _ = command("schedules", TEXT)
    assert status == 0
    assert out.splitlines()[3].split()[:2] == ["bad", "failed"]
    assert out.splitlines()[-1] == f"bad failed: {MISTAKE}"
    (entry,) = [each for each in json.loads(command("schedules", TEXT, "--json")[1]) if each["schedule"] == "bad"]
    assert (entry["configs"], entry["failure"]) == (None, MISTAKE)


def test_tune_goes_on_without_a_schedule_that_fails(few, command, instant, tmp_path):
    add(raising.bad, search_if=lambda w: True)
    words = ("--device", "opencl:0", "--trials", "3", "--log", str(tmp_path / "log.jsonl"))
    status, _, err = command("tune", TEXT, "--schedule", "bad", "--schedule", "tiling", *words)
    assert (status, {name for name, _ in instant.measured}) == (0, {"default", "tiling"})
    assert err.count(f"tvmconv: schedule bad failed: {MISTAKE}; the search goes on without it\n") == 1
    assert command("tune", TEXT, "--schedule", "bad", *words)[0] == 2


def test_tune_goes_on_where_a_usage_fails_later(few, command, instant, tmp_path):
    def usage(w, columns):
        number = columns["number"]
        return ResourceUsage(number, number, number, number) if len(number) == 1 else 1 / 0

    add(raising.working, usage=usage)
    words = ("--device", "opencl:0", "--trials", "12", "--log", str(tmp_path / "log.jsonl"), "--tuner", "random")
    status, _, err = command("tune", TEXT, "--schedule", "working", "--schedule", "tiling", *words)
    assert (status, "tiling" in {name for name, _ in instant.measured}) == (0, True)
    assert err.count("schedule working failed: ZeroDivisionError: division by zero (test_user") == 1


@pytest.mark.parametrize("function", [raising.bad, raising.second_fails])
def test_a_config_that_fails_to_build_is_a_record(few, function):
    add(function)
    task = BuilderSetup(W, {"it": registry.find_schedule(W, function.__name__)}, find_device("sm_90"), 1 << 30)
    built = build_executable(task, "it", {"number": 1} if function is raising.second_fails else {})
    expected = MISTAKE if function is raising.bad else f"AssertionError ({line_of(function)})"
    assert (built.error, built.message) == (ErrorKind.INSTANTIATION, expected)


def test_a_build_that_runs_out_of_memory_stays_a_memory_error(few):
    def hungry(s, w, k):
        raise MemoryError

    add(hungry)
    with pytest.raises(MemoryError):
        build_executable(
            BuilderSetup(W, {"it": registry.find_schedule(W, "hungry")}, find_device("sm_90"), 1 << 30), "it", {}
        )


def test_explain_goes_on_without_a_schedule_that_fails(few, command):
    add(raising.bad)
    status, out, err = command("explain", TEXT, "bad", "default", "--arch", "sm_90")
    assert (status, err) == (1, f"tvmconv: schedule bad failed: {MISTAKE}\n")
    assert out.startswith(f"{TEXT} by default on sm_90")


def test_report_goes_on_without_a_schedule_that_fails(few, command, tmp_path):
    add(raising.bad)
    page = tmp_path / "page.html"
    status, _, err = command("report", TEXT, "--arch", "sm_90", "--schedules", "bad,default", "-o", str(page))
    assert status == 0
    assert f"tvmconv: schedule bad failed: {MISTAKE}; the page goes on without it\n" in err
    assert "my own mistake" in page.read_text()
