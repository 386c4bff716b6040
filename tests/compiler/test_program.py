"""A program is plain data: it goes through a pipe, and runs where there is no TVM."""

import pickle
import subprocess
import sys

import numpy as np

import tvmconv as tc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.devices import find_device
from tvmconv.registry import find_schedule as find_schedule

W = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1")


def program(device):
    scheduled, _ = find_schedule(W, "tiling").apply(W)
    return lower_module(scheduled.mod, find_device(device).make_target()).executable


def test_it_runs_in_a_process_without_tvm(tmp_path):
    x, k = W.inputs(0)
    (tmp_path / "program").write_bytes(pickle.dumps((program("opencl:0"), x, k)))
    code = f"""
import pickle, sys
from pathlib import Path
from tvmconv.devices import find_device
folder = Path({str(tmp_path)!r})
program, x, k = pickle.loads((folder / "program").read_bytes())
(folder / "output").write_bytes(pickle.dumps(find_device("opencl:0").load(program).run((x, k))))
sys.exit("tvm" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    np.testing.assert_allclose(pickle.loads((tmp_path / "output").read_bytes()), W.reference(x, k), atol=1e-5)
