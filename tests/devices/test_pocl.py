"""PoCL on a processor that its LLVM does not know: here it is told that the one it runs on is such a one."""

import os
import subprocess
import sys

import pytest

from tvmconv.devices import pocl

KERNEL = "kernel void add(global float *y) { y[get_global_id(0)] += 1; }"
SCRIPT = f"""
import ctypes
import numpy as np
from tvmconv.devices import pocl
tells = ctypes.CDLL(str(pocl._find_libraries()[0])).pocl_get_llvm_cpu_name
tells.restype = ctypes.c_char_p
pocl.patch_cpu_name(unknown_name=tells())
print(tells().decode())
import pyopencl as cl
(device,) = [d for p in cl.get_platforms() if "Portable" in p.name for d in p.get_devices()]
context = cl.Context([device])
queue = cl.CommandQueue(context)
y = np.arange(64, dtype=np.float32)
there = cl.Buffer(context, cl.mem_flags.COPY_HOST_PTR, hostbuf=y)
cl.Program(context, {KERNEL!r}).build().add(queue, y.shape, (32,), there)
cl.enqueue_copy(queue, y, there)
print((y == np.arange(64) + 1).all())
"""


@pytest.mark.skipif(not pocl._find_libraries(), reason="PoCL is not the one that comes from PyPI")
@pytest.mark.skipif(not pocl._read_cpu_features() >= pocl._REQUIRED_FEATURES, reason="the processor has no AVX2")
def test_kernels_are_right_on_a_cpu_that_llvm_does_not_know():
    environment = {**os.environ, "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable"}  # with the header of PoCL
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [pocl.SUBSTITUTE_CPU.decode(), "True"], done.stderr
