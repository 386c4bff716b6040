"""What MetaSchedule's files tell, and how its process ends; a search of its own takes minutes and a GPU."""

import json
import os
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest

from tvmconv.baselines import metaschedule_sampling
from tvmconv.baselines.metaschedule import MetaScheduleResult, check_device, read_search, run_bounded
from tvmconv.baselines.metaschedule_model import count_trials
from tvmconv.baselines.metaschedule_sampling import read_candidates
from tvmconv.compiler import metaschedule_builder
from tvmconv.errors import DeviceError, Error
from tvmconv.workloads import parse

FAILED = 10000000000  # what MetaSchedule writes for a trial without a time


def write(folder, clock, *times):
    """A folder as MetaSchedule leaves it: a line of its database for each trial."""
    (folder / "clock").write_text("\n".join(map(str, clock)))
    lines = [json.dumps([0, [[[], []], seconds, {"kind": "cuda"}, []]]) + "\n" for seconds in times]
    (folder / "database_tuning_record.json").write_text("".join(lines))


def test_failed_trials_count_as_trials_and_not_as_successes(tmp_path):
    write(tmp_path, [10.0, 14.0], [3e-5, 5e-5], [FAILED], [2e-5])
    assert read_search(tmp_path, stopped_at=99.0) == MetaScheduleResult(3, 2, 4.0, 2e-5)


def test_trials_are_counted_for_each_task(tmp_path):
    write(tmp_path, [10.0, 14.0], [3e-5], [FAILED])
    with (tmp_path / "database_tuning_record.json").open("a") as database:
        database.write(json.dumps([2, [[[], []], [1e-5], {"kind": "cuda"}, []]]) + "\n")
    assert count_trials(tmp_path) == ((2, 1), (1, 1))


def test_a_search_that_was_ended_took_until_then(tmp_path):
    write(tmp_path, [10.0], [3e-5])
    with (tmp_path / "database_tuning_record.json").open("a") as database:
        database.write("[0, [[")
    assert read_search(tmp_path, stopped_at=40.0) == MetaScheduleResult(1, 1, 30.0, 3e-5)


def test_a_search_that_never_began_is_an_error(tmp_path):
    with pytest.raises(Error, match="before it began"):
        read_search(tmp_path, stopped_at=40.0)


# Prints the process number of a child that would outlive it.
PARENT = "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"


@pytest.mark.parametrize(("more", "status"), [("", 0), ("; sys.exit(3)", 3), ("; child.wait()", None)])
def test_processes_that_a_command_started_end_with_it(tmp_path, more, status):
    log = tmp_path / "log"
    assert (
        run_bounded([sys.executable, "-c", PARENT + more], log, {}, seconds=60.0 if status is not None else 5.0)
        == status
    )
    assert ends(int(log.read_text()))


def ends(process, patience=30.0):
    """Whether a process is gone, or at least dead, soon."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":  # dead; nobody has asked how it ended
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        os.sched_yield()
    return False


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [("opencl", "opencl:0", "no OpenCL runtime"), ("cuda", "cuda:1", "measures on cuda:0, not on cuda:1")],
)
def test_it_measures_on_the_first_gpu_only(kind, text, said):
    with pytest.raises(DeviceError, match=said):
        check_device(SimpleNamespace(kind=kind, text=text))


def test_modules_that_it_needs_are_named(monkeypatch):
    monkeypatch.setattr("tvmconv.baselines.metaschedule.importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="pip install psutil cloudpickle xgboost"):
        check_device(SimpleNamespace(kind="cuda", text="cuda:0"))


def test_candidates_of_all_processes_come_in_rounds(tmp_path):
    for rank, workloads, candidates in [(0, ["a", "c"], [(0, 0, 0), (0, 2, 1), (1, 0, 0)]), (1, ["b"], [(0, 1, 0)])]:
        own = tmp_path / f"built-{rank}"
        own.mkdir()
        own.joinpath("database_workload.json").write_text("".join(f"{name}\n" for name in workloads))
        lines = [json.dumps({"round": number, "task": task, "file": "x"}) for number, task, _ in candidates]
        records = [json.dumps([index, [f"trace{task}.{number}"]]) for number, task, index in candidates]
        own.joinpath("candidates.jsonl").write_text("\n".join([*lines, '{"rou']))
        own.joinpath("database_tuning_record.json").write_text("\n".join([*records, "[0, ["]))
    tmp_path.joinpath("built-2").mkdir()  # its process was ended before it had built any
    workloads, candidates = read_candidates(tmp_path)
    assert [each["record"] for each in candidates] == [["trace0.0"], ["trace1.0"], ["trace2.0"], ["trace0.1"]]
    assert [workloads[each["workload"]] for each in candidates] == ["a", "b", "c", "a"]


def test_a_candidate_is_timed_with_arguments_of_its_task(tmp_path):
    tvm = pytest.importorskip("tvm")
    workload = parse("conv2d:1x4x6x6,4x4x3x3,s1,p1,relu")
    tvm.compile(workload.prim_func(), "llvm").export_library(str(tmp_path / "candidate.so"))
    shapes = [(1, 4, 6, 6), (4, 4, 3, 3), (1, 4, 6, 6)]
    arguments = [metaschedule_sampling.make_argument(tvm.cpu(), "float32", shape) for shape in shapes]
    (seconds,) = metaschedule_sampling.time_library(tmp_path / "candidate.so", tvm.cpu(), arguments)
    assert 1e-8 < seconds < 1
    assert arguments[2].numpy().min() >= 0  # the kernel has written it


def test_a_candidate_that_breaks_the_device_costs_itself_alone(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tvm")
    own = tmp_path / "built-0"
    own.mkdir()
    tmp_path.joinpath("search-timed").mkdir()
    own.joinpath("database_workload.json").write_text("workload\n")
    candidates = [{"round": 0, "task": 0, "file": str(index), "error": None} for index in range(3)]
    own.joinpath("candidates.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in candidates))
    record = json.dumps([0, ["trace", [FAILED], {}, [["TENSOR", "float32", [1]]]]])
    own.joinpath("database_tuning_record.json").write_text(f"{record}\n" * 3)

    def time_library(path, device, arguments):
        if path.name == "1":
            raise RuntimeError("illegal address")
        return [2e-6]

    def execv(path, words):
        raise SystemExit(words)

    target = SimpleNamespace(kind=SimpleNamespace(name="cpu"))
    cpu = SimpleNamespace(make_target=lambda: target)
    monkeypatch.setattr(metaschedule_sampling.devices, "find_device", lambda text: cpu)
    monkeypatch.setattr(metaschedule_sampling, "time_library", time_library)
    monkeypatch.setattr(metaschedule_sampling, "is_usable", lambda device: False)
    monkeypatch.setattr(metaschedule_sampling.os, "execv", execv)
    with pytest.raises(SystemExit) as ended:
        metaschedule_sampling.time_candidates(["cuda:0", str(tmp_path), "0"])
    metaschedule_sampling.time_candidates(["cuda:0", str(tmp_path), ended.value.code[-1]])
    records = (tmp_path / "search-timed/database_tuning_record.json").read_text().splitlines()
    assert [json.loads(line)[1][1] for line in records] == [[2e-6], [FAILED], [2e-6]]
    assert len((tmp_path / "search-timed/clock").read_text().split()) == 2
    assert "illegal address" in capsys.readouterr().err


def test_a_task_for_which_rules_fail_has_no_candidates(capsys):
    class Context:
        def __init__(self, error=None):
            self.error = error

        def pre_tuning(self, *_numbers):
            if self.error:
                raise self.error

        def generate_measure_candidates(self):
            return ["candidate"]

    contexts = [Context(), Context(ValueError("not a stage pipeline")), Context()]
    found = [(each.number, each.task) for each in metaschedule_sampling._sample([4, 5, 6], contexts, 2)]
    assert found == [(0, 4), (0, 6), (1, 4), (1, 6)]
    assert "task 5: " in capsys.readouterr().err


class FakePool:
    """A pool whose processes end if one of its jobs is the text "ends"; the job "hangs" takes too long."""

    def __init__(self, *_, **options):
        self.jobs, self._processes = [], {}

    def submit(self, function, job, target):
        self.jobs.append(job)
        return SimpleNamespace(result=lambda seconds: self.compute(job))

    def compute(self, job):
        if "ends" in self.jobs:
            raise BrokenProcessPool("ended")
        if job == "hangs":
            raise TimeoutError
        return job

    def shutdown(self, **options):
        self.jobs = []


def test_a_build_that_fails_costs_no_other_candidate(monkeypatch):
    monkeypatch.setattr(metaschedule_builder, "ProcessPoolExecutor", FakePool)
    builder = metaschedule_builder.PersistentBuilder(2)
    jobs = ["a", "hangs", "b", "ends", "c"]
    results = builder._inst.build([SimpleNamespace(mod=job, target=None) for job in jobs])
    assert [result.artifact_path for result in results] == ["a", None, "b", None, "c"]
    assert "more than" in str(results[1].error_msg)
    assert "ended" in str(results[3].error_msg)
