"""`scripts/generated_code.py`: hashes that do not depend on names, and two checkouts side by side."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tvmconv.compiler import nvrtc

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts/generated_code.py"


def test_renamed_identifiers_hash_the_same():
    rename = runpy.run_path(str(FILE))["rename"]
    assert rename("a[i] = x * 1e5f + a[j];") == rename("b[k] = y * 1e5f + b[m];")
    assert rename("a[i] = b[i];") != rename("a[i] = b[j];")


@pytest.mark.slow
@pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason="needs NVRTC")
def test_a_checkout_does_not_differ_from_itself(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text((ROOT / "tuning_logs/nvidia-h200/d2l/d2l.jsonl").read_text().splitlines()[0] + "\n")
    words = ["--against", ROOT, "--suite", "filter1d", "--jobs", "1", log]
    done = subprocess.run([sys.executable, FILE, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("0 of ")


def test_a_folder_without_a_package_is_refused(tmp_path):
    done = subprocess.run([sys.executable, FILE, "--checkout", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "expected a checkout" in done.stderr
