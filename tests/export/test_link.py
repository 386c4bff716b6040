import subprocess

from steps import SCHEDULE, WORKLOAD

import tvmconv as tc
from tvmconv.export.formats.library import link_library

# Stands in for the loader that TVM's CUDA runtime registers, and writes down what it is given.
LOAD = """
import os, sys, tvm, tvm_ffi

def load(payload):
    with open(sys.argv[2], "wb") as file:
        file.write(payload)
    os._exit(0)

tvm_ffi.register_global_func("ffi.Module.load_from_bytes.cuda", load, override=True)
tvm.runtime.load_module(sys.argv[1])
"""


def test_the_library_holds_the_machine_code_of_all_steps(tmp_path, python):
    lowered = tc.build(WORKLOAD, SCHEDULE, arch="sm_90").lowered_module
    link_library(lowered, tmp_path / "kernel.so")
    path = tmp_path / "payload"
    subprocess.run([*python, "-c", LOAD, tmp_path / "kernel.so", path], check=True)
    payload = path.read_bytes()
    assert payload.startswith(b"\5\0\0\0\0\0\0\0cubin")
    assert payload.endswith(lowered.cubin.image)
    assert all(step.name.encode() in payload for step in lowered.kernels)
