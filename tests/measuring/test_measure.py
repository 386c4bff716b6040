"""Every config that goes in comes back as one record, whatever it does, and nothing stays behind."""

import dataclasses
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import steps
from faulty_schedules import EXPECTED, SCHEDULE, WORKLOAD
from measuring import DEADLINE, collect, measure, measurer
from processes import GONE_SECONDS, abandoned, children, shared_memory, wait_for

import tvmconv as tc
from tvmconv.devices import find_device
from tvmconv.measure.measurer import Measurer
from tvmconv.measure.results import NUM_FINALISTS, ErrorKind
from tvmconv.registry import find_schedule as find_schedule

CONV = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder for temporary files, of this test alone."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.usefixtures("shared_processes")
def test_a_record_says_what_was_measured_where_and_how(opencl):
    schedule = find_schedule(CONV, "tiling")
    with measurer(schedule=schedule, workload=CONV) as m:
        assert m.collect_results(timeout=60.0) == []  # as nothing is pending
        m.submit([schedule.space(CONV).default])
        (record,) = collect(m)
        assert list(m.phase_means) == ["apply", "lower", "codegen", "compile", "queue", "load", "verify", "time"]
        assert all(milliseconds > 0 for milliseconds in m.phase_means.values())
    assert (record.workload, record.schedule, record.device) == (CONV, "tiling", opencl.name)
    assert (record.target, record.error, record.ok) == ("opencl", ErrorKind.NONE, True)
    assert record.relative_error < record.workload.tolerance
    assert record.resources == {"shared_bytes": 256, "threads": 64, "blocks": 2}
    assert set(record.versions) == {"tvmconv", "tvm", "pyopencl"}
    assert abs(record.timestamp - time.time()) < 60
    assert record.cost_seconds > record.cost > 0


@pytest.mark.usefixtures("shared_processes")
def test_fastest_are_kept_as_built_and_timed_again():
    schedule = find_schedule(CONV, "tiling")
    space = schedule.space(CONV)
    configs = [
        space.config_from_point(point) for point in space.sample_legal(NUM_FINALISTS + 1, np.random.default_rng(0))
    ]
    with measurer(schedule=schedule, workload=CONV) as m:
        m.submit(configs)
        records = collect(m)
        fastest = m.fastest_candidates
    assert all(record.ok and not record.final for record in records)
    wanted = sorted(records, key=lambda record: record.cost)[:NUM_FINALISTS]
    assert [trial.config for trial in fastest] == [record.config for record in wanted]
    assert all(trial.is_final and trial.executable for trial in fastest)
    with measurer(schedule=schedule, workload=CONV, workers=0) as m:
        assert m.num_workers == 0
        m.submit_candidates(fastest)
        finals = collect(m)
        assert m.fastest_candidates == []
        assert "compile" not in m.phase_means
    assert {record.identity for record in finals} == {record.identity for record in wanted}
    assert all(record.ok and record.final for record in finals)
    assert all(len(record.times) > 1 and record.relative_error < CONV.tolerance for record in finals)


def test_without_workers_what_has_to_be_built_is_refused():
    before = children()
    with measurer(workers=0) as m:
        assert children() <= before
        with pytest.raises(tc.Error, match="with 0 workers, expected candidates"):
            m.submit([{"fault": "none"}])
        assert m.num_pending == 0


@pytest.mark.usefixtures("shared_processes")
def test_faulty_config_is_one_record_and_the_others_are_measured():
    faults = [fault for fault in EXPECTED if fault not in ("none", "hang", "endless")]
    wanted = ["none", *(name for fault in faults for name in (fault, "none")), "none"]
    records = measure([{"fault": name, "number": i} for i, name in enumerate(wanted)])
    assert sorted(record.config["number"] for record in records) == list(range(len(wanted)))
    errors = {(record.config["fault"], record.error) for record in records}
    assert errors == {(fault, EXPECTED[fault]) for fault in ("none", *faults)}
    assert all("\n" not in record.message for record in records)


@pytest.mark.usefixtures("shared_processes")
def test_a_build_and_a_kernel_that_hang_are_ended():
    limits = {"build_timeout": 6.0, "run_timeout": 6.0}  # a build takes seconds under load
    records = measure([{"fault": "endless"}, {"fault": "hang"}, {"fault": "none", "number": 1}], **limits)
    by_fault = {record.config["fault"]: (record.error, record.message) for record in records}
    assert by_fault == {
        "none": (ErrorKind.NONE, ""),
        "hang": (ErrorKind.BUILD_TIMEOUT, "the build takes longer than 6 s"),
        "endless": (ErrorKind.RUN_TIMEOUT, "the kernel runs longer than 6 s"),
    }


@pytest.mark.slow
def test_nothing_is_left_behind(temporary):
    before, shared = children(), shared_memory()
    with measurer() as m:
        m.submit([{"fault": fault} for fault in ("none", "abort", "out_of_bounds")])
        collect(m)
        assert len(children() - before) >= 2
    wait_for(lambda: children() <= before and not list(temporary.iterdir()), GONE_SECONDS)
    wait_for(lambda: not abandoned(shared), GONE_SECONDS)


def test_closing_ends_what_is_under_way_and_waits_for_nothing(temporary):
    before = children()
    m = measurer(build_timeout=60.0)
    m.submit([{"fault": "none"}, {"fault": "endless", "number": 1}, {"fault": "hang", "number": 2}])
    assert len(m.collect_results(timeout=DEADLINE)) == 1
    start = time.monotonic()
    m.close()
    assert time.monotonic() - start < 10.0  # what is under way would take a minute to time out
    wait_for(lambda: children() <= before and not list(temporary.iterdir()), GONE_SECONDS)


@pytest.mark.slow
def test_killed_script_without_a_guard_leaves_nothing_behind(temporary):
    script = f"""
import sys
sys.path[:] = {sys.path!r}
from faulty_schedules import SCHEDULE, WORKLOAD
from tvmconv.measure.measurer import Measurer
from tvmconv.measure.results import ErrorKind
m = Measurer(WORKLOAD, SCHEDULE, ["opencl:0"], workers=1, build_timeout=60.0)
m.submit([{{"fault": "none"}}, {{"fault": "endless"}}, {{"fault": "hang", "number": 1}}])
print(len(m.collect_results(timeout={DEADLINE})), flush=True)
while True:
    m.collect_results(timeout=1.0)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"1\n"
        started = children(parent.pid)
        assert len(started) >= 2
        parent.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), GONE_SECONDS)
    wait_for(lambda: not list(temporary.iterdir()), GONE_SECONDS)


def test_schedule_whose_module_does_not_import_is_an_error(monkeypatch):
    module = types.ModuleType("only_here")
    exec("def function(s, w, k): ...", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with measurer(schedule=dataclasses.replace(SCHEDULE, function=module.function)) as m:
        m.submit([{"fault": "none"}])
        with pytest.raises(tc.Error, match="cannot load schedule faulty: ModuleNotFoundError"):
            collect(m)


@pytest.mark.parametrize("module", ["__main__", "faulty_schedules"])
def test_schedule_that_is_not_at_the_top_of_a_module_is_refused(module):
    def function(s, w, k): ...

    function.__module__ = module
    with pytest.raises(tc.ScheduleError, match="faulty is not at the top level of a module that can be imported"):
        measurer(schedule=dataclasses.replace(SCHEDULE, function=function))


def test_devices_that_do_not_compare_are_refused(opencl):
    """A search would wait for records that it does not count."""
    with pytest.raises(tc.DeviceError, match="take different programs"):
        Measurer(WORKLOAD, SCHEDULE, [opencl, find_device("sm_90")])
    with pytest.raises(tc.DeviceError, match="do not compare: measure on devices of one name"):
        Measurer(WORKLOAD, SCHEDULE, [opencl, dataclasses.replace(opencl, name="another GPU")])


@pytest.mark.usefixtures("shared_processes")
def test_unwritten_scratch_makes_a_kernel_of_several_steps_wrong():
    right, wrong = measure([{"written": 4}, {"written": 3}], schedule=steps.SCHEDULE, workload=steps.WORKLOAD)
    assert right.ok
    assert (right.resources["steps"], right.resources["threads"], right.resources["blocks"]) == (2, 64, 4)
    assert wrong.error is ErrorKind.WRONG_ANSWER


def test_closing_does_not_wait_for_a_reference(monkeypatch):
    monkeypatch.setattr("tvmconv.measure.measurer.CLOSE_SECONDS", 0.05)
    asked, release = threading.Event(), threading.Event()

    def problem():
        asked.set()
        release.wait(30.0)
        return tc.Problem(WORKLOAD)

    m = measurer(problem=problem)
    m.submit([{"fault": "none"}])
    assert asked.wait(DEADLINE)
    m.close()
    assert not release.is_set()
    release.set()
    m._thread.join(DEADLINE)
    assert not m._thread.is_alive()
