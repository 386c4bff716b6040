"""TVM's tensor intrinsics are imported without what makes their import slow."""

import subprocess
import sys

import pytest

COUNT = """
import sys, tvm
from tvm.s_tir import TensorIntrin
from tvmconv.compiler.tensor_intrinsics import import_tensor_intrinsics

slow, names, register = 0, [], TensorIntrin.register
def count(name, *args, **kwargs):
    global slow
    names.append(name)
    frame = sys._getframe(1)
    while frame:
        slow += frame.f_code.co_filename.startswith("<frozen importlib")
        frame = frame.f_back
    return register(name, *args, **kwargs)
TensorIntrin.register = staticmethod(count)
import_tensor_intrinsics()
import tvm.s_tir.tensor_intrin
from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group
from tvm.s_tir.tensor_intrin import x86
assert tvm.s_tir.tensor_intrin.cuda.get_wmma_intrin_group is get_wmma_intrin_group
assert all(TensorIntrin.get(name) for name in names)
print(len(names), len(set(names)), slow)
"""


@pytest.mark.slow  # it starts a process that imports TVM and its tensor intrinsics
def test_no_frame_of_the_import_system_is_on_the_stack_of_an_intrinsic():
    output = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True).stdout
    number, distinct, slow = map(int, output.split())
    assert number == distinct > 100
    assert slow == 0
