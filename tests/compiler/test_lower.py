"""Lowering reads launches and parameters off device functions; the executable runs where there is no TVM."""

import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from tvm.s_tir import Schedule

import tvmconv as tc
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.devices import find_device
from tvmconv.registry import find_schedule as find_schedule

W = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1")


def lowered(device):
    scheduled, _ = find_schedule(W, "tiling").apply(W)
    return lower_module(scheduled.mod, find_device(device).make_target())


@pytest.mark.parametrize("device", ["sm_90", "opencl:0"])
def test_parameters_are_matched_by_name_not_by_place(device):
    (step,) = lowered(device).kernels
    names = [parameter.name.removesuffix("_ptr") for parameter in step.function.params]
    assert [W.argument_names[i] for i in step.arguments] == names
    assert sorted(step.arguments) == [0, 1, 2]


def test_shared_memory_is_that_of_both_staged_operands():
    """By hand: 1 channel x 4 rows x (8 + 2) columns of the input, 8 channels x 3 taps of the weight."""
    assert lowered("sm_90").kernels[0].shared_bytes == 4 * (4 * 10 + 8 * 3)


def test_a_function_without_threads_is_refused_in_one_line():
    with pytest.raises(tc.CompileError) as caught:
        lower_module(Schedule(W.prim_func()).mod, find_device("sm_90").make_target())
    assert "\n" not in str(caught.value)


def test_shared_arrays_fill_their_alignment_in_cuda():
    """17 channels x 3 taps are 51 words: the compiler loads the 52nd with the 51st, and memcheck would object."""
    kernel = tc.build(tc.parse("conv2d:1x3x120x113,17x3x3x3,s1,p1"), "tiling", arch="sm_90")
    sizes = [int(size) for size in re.findall(r"__shared__ .*\[(\d+)\];", kernel.source)]
    assert len(sizes) == 2
    assert all(size % 16 == 0 for size in sizes)
    assert 4 * sum(sizes) >= kernel.shared_bytes


def test_it_runs_in_a_process_without_tvm(tmp_path):
    x, k = W.inputs(0)
    (tmp_path / "program").write_bytes(pickle.dumps((lowered("opencl:0").executable, x, k)))
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
