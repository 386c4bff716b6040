import subprocess
import sys
import time
from pathlib import Path

from tvmconv.tempdir import ProcessTempDir


def test_closing_removes_the_directory_and_all_in_it():
    scratch = ProcessTempDir("test-")
    (scratch.path / "deep").mkdir()
    (scratch.path / "deep" / "file").write_text("content")
    scratch.close()
    assert not scratch.path.exists()
    scratch.close()


def test_the_directory_goes_with_a_process_that_is_killed():
    code = (
        "from tvmconv.tempdir import ProcessTempDir; print(ProcessTempDir('test-').path, flush=True)\n"
        "import time; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        path = Path(owner.stdout.readline().strip())
        assert path.is_dir()
        owner.kill()
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.exists()
