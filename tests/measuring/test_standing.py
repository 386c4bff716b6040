"""Within a block of `keep_workers_alive` processes go from one search to the next; after it, or without it, none is
left.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from measuring import DEADLINE, collect, measure, measurer
from processes import children, wait_for

import tvmconv as tc
from tvmconv.measure.results import ErrorKind
from tvmconv.measure.workers import pool, supervisor
from tvmconv.measure.workers.pool import BUILDER_MODULE, keep_workers_alive, prestart_workers
from tvmconv.measure.workers.supervisor import Job, SupervisedWorker, WorkerLimits
from tvmconv.registry import find_schedule as find_schedule

OTHER = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1")
TILING = find_schedule(OTHER, "tiling")
DEFAULT = TILING.space(OTHER).default


@pytest.fixture
def ours():
    """The child processes that were started in this test and are alive."""
    before = children()
    yield lambda: children() - before
    assert children() <= before  # what an earlier test left to a compiler may have ended meanwhile


def right(number=0, **options):
    (record,) = measure([{"fault": "none", "number": number}], **options)
    return record.error is ErrorKind.NONE


@pytest.fixture
def serving(ours):
    """The processes that build and measure, without the one that builders are forked from."""

    def pids():
        found = {pid: Path(f"/proc/{pid}") for pid in ours()}
        served = {pid for pid, path in found.items() if b"import serve" in (path / "cmdline").read_bytes()}
        parents = {int((found[pid] / "stat").read_text().rpartition(")")[2].split()[1]) for pid in served}
        return served - parents

    return pids


@pytest.mark.slow
def test_the_same_processes_serve_whatever_is_searched_next(serving):
    """Another workload and schedule; from a thread that has ended; where the search before left builds in its queue."""
    with keep_workers_alive():
        thread = threading.Thread(target=right)
        thread.start()
        thread.join()
        first = serving()
        assert len(first) == 2
        assert right(1)
        with measurer(workers=1) as m:
            m.submit([{"fault": "none", "number": number} for number in range(50)])
            m.collect_results(timeout=DEADLINE)
        (record,) = measure([DEFAULT], schedule=TILING, workload=OTHER)
        assert (record.ok, record.workload, record.schedule) == (True, OTHER, "tiling")
        assert record.config == DEFAULT
        assert record.relative_error < OTHER.tolerance
        assert right(2)
        assert serving() == first
    assert serving() == set()


@pytest.mark.slow
def test_last_of_several_blocks_ends_the_processes(serving):
    with measurer() as m:
        m.submit([{"fault": "none"}])
        collect(m)
        own = serving()
    assert serving() == set()
    with keep_workers_alive():
        with keep_workers_alive():
            assert right()
            first = serving()
        assert serving() == first
        assert not first & own
        with pytest.raises(ZeroDivisionError), keep_workers_alive():
            raise ZeroDivisionError
        assert serving() == first
    assert serving() == set()


@pytest.mark.slow
def test_processes_killed_while_they_stood_are_replaced(serving):
    with keep_workers_alive():
        assert right()
        first = serving()
        for pid in first:
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
        records = measure([{"fault": "none", "number": number} for number in range(3)])
        assert all(record.ok for record in records)
        assert not serving() & first


@pytest.mark.slow
def test_hanging_build_and_kernel_do_not_block_the_next_search(serving, monkeypatch):
    monkeypatch.setattr(supervisor, "REUSE_TIMEOUT_SECONDS", 0.5)
    with keep_workers_alive():
        with measurer(build_timeout=1000.0, run_timeout=1000.0) as m:
            m.submit([{"fault": "none"}, {"fault": "endless", "number": 1}, {"fault": "hang", "number": 2}])
            assert len(m.collect_results(timeout=DEADLINE)) == 1
            time.sleep(1.0)  # both are at it
            hung = serving()
        start = time.monotonic()
        assert right()
        assert time.monotonic() - start < 30.0
        assert not serving() & hung


def obedient(**limits):
    """A process that does as it is told, and that is ready."""
    limits = WorkerLimits(**{"start_seconds": 60.0, "job_seconds": 60.0, **limits})
    process = SupervisedWorker("obedient", lambda: None, limits, {}, pool_key="obedient")
    wait_for(lambda: process.poll() or process.is_ready)
    return process


@pytest.mark.parametrize(("held", "kept"), [(1 << 20, True), (1 << 39, False)])
def test_a_process_that_holds_much_memory_is_not_handed_on(held, kept, monkeypatch, ours):
    with keep_workers_alive():
        process = obedient(memory_bytes=1 << 40)
        monkeypatch.setattr("tvmconv.measure.workers.process.WorkerProcess.resident_bytes", held)
        process.close()
        assert bool(ours()) == kept


def test_answers_that_were_for_another_are_for_nobody():
    with keep_workers_alive():
        first = obedient()
        first.submit(Job(0, ("say", "old")))
        first.close()
        second = obedient()
        assert second.worker_process is first.worker_process
        second.submit(Job(1, ("say", "new")))
        assert [(job.tag, answer) for job, answer in wait_for(second.poll)] == [(1, ["new"])]
        second.close()


@pytest.mark.slow
def test_processes_that_stand_early_are_not_begun_twice(serving, opencl):
    with keep_workers_alive():
        prestart_workers(2, [opencl])
        first = wait_for(lambda: len(serving()) == 2 and serving())
        prestart_workers(2, [opencl])
        prestart_workers(1, [opencl])
        assert serving() == first
        assert right()  # by one that builds, beside a new one that measures
        assert first < serving()
        assert len(serving()) == 3
    assert serving() == set()


def test_process_that_began_early_gets_its_own_message_first(ours):
    with keep_workers_alive():
        pool.shared.prestart("obedient", "obedient", 1, ("say", "awake"))
        process = SupervisedWorker(
            "obedient", lambda: ("say", "hello"), WorkerLimits(60.0, 60.0), {}, pool_key="obedient"
        )
        answered = []
        wait_for(lambda: answered.extend(process.worker_process.receive_messages()) or len(answered) == 2)
        assert answered == [["awake"], ["hello"]]
        process.close()
        pool.shared.prestart("obedient", "obedient", 3)  # these are never taken, and end with the block


def test_process_of_a_gpu_of_this_host_alone_begins_early(opencl, monkeypatch):
    begun = []
    monkeypatch.setattr(pool.shared, "prestart", lambda *what: begun.append(what))
    gpu, far = (SimpleNamespace(kind="cuda", text=text) for text in ("cuda:1", "rpc:k"))
    prestart_workers(3, [opencl, gpu, far])
    assert begun == [(pool.RUNNER_MODULE, "cuda:1", 1, "cuda:1"), (BUILDER_MODULE, BUILDER_MODULE, 3)]


def test_the_end_does_not_wait_for_what_still_loads(monkeypatch):
    """The last block ends as soon as a process that would take seconds to load was stopped."""
    forking, stopped = threading.Event(), threading.Event()

    class Loading:
        def fork(self, descriptor):
            forking.set()
            stopped.wait(30.0)
            raise tc.Error("it has ended")

        def stop_loading(self):
            stopped.set()

        def close(self):
            assert stopped.is_set()

    monkeypatch.setattr("tvmconv.measure.workers.pool.BuilderForkServer", Loading)
    with keep_workers_alive():
        pool.shared.prestart(BUILDER_MODULE, BUILDER_MODULE, 3)
        assert forking.wait(DEADLINE)
        start = time.monotonic()
    assert stopped.is_set()
    assert time.monotonic() - start < 20.0


def test_loading_compilers_leaves_no_thread_that_a_fork_loses():
    program = (
        "import os, numpy; threads = lambda: len(os.listdir('/proc/self/task')); before = threads()\n"
        "from tvmconv.measure.builder import preload_compilers; preload_compilers(); print(threads() - before)\n"
        "import sys; from tvmconv.compiler import nvrtc; print('tvm' in sys.modules, nvrtc.explain_unavailability())"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[:2] == ["0", "True None"]
