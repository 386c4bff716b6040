"""A child process says why it ended; one that cannot be started leaves nothing behind."""

import resource
import tempfile

import pytest

import tvmconv as tc
from tvmconv.measure.workers import pool
from tvmconv.measure.workers.process import WorkerProcess
from tvmconv.tempdir import ProcessTempDir


def ended(tmp_path, monkeypatch, text):
    """How a child ends that executes a text."""
    (tmp_path / "speaking.py").write_text(f"import os\ndef main(connection):\n    {text}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    child = WorkerProcess("speaking")
    child._process.wait()
    return child.kill()


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("os._exit(3)", "ended with exit status 3"),
        (r"os.write(2, b'warning\nLLVM ERROR: no space\nPLEASE report\n'); os.abort()",
         "was killed by SIGABRT: LLVM ERROR: no space"),
        ("raise MemoryError('too much')", "ended with exit status 1: MemoryError: too much"),
        ("import no_such_module", "ended with exit status 1: ModuleNotFoundError: No module named 'no_such_module'"),
        (r"os.write(2, b'\x1b[31mred error\n'); os._exit(1)", "ended with exit status 1:  [31mred error"),
        (r"os.write(2, b'x' * 10_000 + b'\n'); os._exit(1)", f"ended with exit status 1: {'x' * 300}"),
        ("import subprocess; subprocess.run(['/usr/bin/yes'], stdout=2)", "ended with exit status 0: y"),  # a full pipe
    ],
    ids=["silent", "abort", "exception", "import", "escapes", "long", "full"],
)  # fmt: skip
def test_a_child_tells_why_it_ended(tmp_path, monkeypatch, text, how):
    assert ended(tmp_path, monkeypatch, text) == how


def test_a_child_that_cannot_be_started_is_a_fault_of_the_host():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # no file descriptor is free
    try:
        with pytest.raises(tc.HostError, match="cannot start a process: Too many open files"):
            WorkerProcess("obedient")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_process_that_did_not_start_ahead_is_started_when_needed(monkeypatch):
    def fails(*_, **__):
        raise tc.HostError("cannot start a process: no memory")

    with pool.keep_workers_alive():
        monkeypatch.setattr(pool, "WorkerProcess", fails)
        pool.shared.prestart("obedient", "a kind", 1)
        assert pool.shared.acquire("a kind") is None
        pool.shared.prestart("obedient", "a kind", 1)  # nor is it in the way at the end


def test_no_place_for_temporary_files_is_a_fault_of_the_host(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(tc.HostError, match="cannot make a temporary directory: No such file or directory"):
        ProcessTempDir("test-")
