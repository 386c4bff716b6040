"""Kernels inside a library that TVM exports are launched as tvmconv's own loader launches them, in a process without
TVM and tvmconv, on a driver that only writes down what it is asked for.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mapped
import pytest
from fake_driver import FakeDriver

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.relax.launcher import make_launcher_module

HERE, STREAM = Path(__file__).parent, 77
CXX = shutil.which("g++") or shutil.which("clang++")
REASON = nvrtc.explain_unavailability() or ("" if CXX else "no C++ compiler")
pytestmark = pytest.mark.skipif(bool(REASON), reason=str(REASON))
ARRAYS = ["float16:1x8x8x64", "float16:64x3x3x64", "float16:1x8x8x64", "float32:4096"]  # X, K, Y, sums


@pytest.fixture(scope="module")
def executable():
    return tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90").executable


@pytest.fixture(scope="module")
def folder(tmp_path_factory, executable):
    """A folder with the library model.so and, in cuda/, the driver."""
    folder = tmp_path_factory.mktemp("launcher")
    make_launcher_module({"mapped": executable}, "sm_90").export_library(str(folder / "model.so"))
    (folder / "cuda").mkdir()
    subprocess.run(
        [CXX, "-shared", "-fPIC", str(HERE / "fake_cuda.c"), "-o", str(folder / "cuda/libcuda.so.1")], check=True
    )
    return folder


def call(folder, *calls, cuda="cuda", **environment):
    """What the process printed for each call with a list of arrays, and what the driver wrote."""
    log = folder / "log.txt"
    log.write_text("")
    variables = {"LD_LIBRARY_PATH": str(folder / cuda), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_PARAMS": "2"}
    variables["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # PyTorch takes seconds to import
    command = [sys.executable, str(HERE / "call_library.py"), str(folder / "model.so"), "mapped", str(STREAM)]
    command += [",".join(arrays) for arrays in calls]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables, **environment})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], log.read_text().splitlines()


def test_maps_and_launches_are_those_of_our_own_loader(folder, executable, monkeypatch):
    pytest.importorskip("cuda.bindings.driver")
    from tvmconv.devices.cuda.function import CudaFunction
    from tvmconv.devices.cuda.loaded_kernel import BoundKernel

    (addresses,), lines = call(folder, ARRAYS)
    driver = FakeDriver(monkeypatch, executable)
    functions = [CudaFunction(each.code, each.name, each.dynamic_shared_bytes) for each in executable.kernels]
    BoundKernel(executable, functions, addresses[:3], STREAM, addresses[3:]).launch()

    encoded = [line for line in lines if line.startswith("cuTensorMap")]
    assert encoded == 2 * [f"{name} {' '.join(map(_join, numbers))}" for name, numbers in _grouped(driver.encoded)]
    shared = driver.launched[0][3]
    assert [line for line in lines if not line.startswith("cuTensorMap")] == [
        "context 101",
        f"attribute main_kernel 8 {shared}",
        f"launch main_kernel 1,1,1,128,1,1,{shared} stream {STREAM} 0 1000",
        f"launch main_kernel_1 64,1,1,64,1,1,0 stream {STREAM} attribute 6 1 {addresses[2]} {addresses[3]}",
        "context 101",
        f"launch main_kernel 1,1,1,128,1,1,{shared} stream {STREAM} 2000 3000",
        f"launch main_kernel_1 64,1,1,64,1,1,0 stream {STREAM} attribute 6 1 {addresses[2]} {addresses[3]}",
        "unload 1",
    ]
    assert driver.overlapping == ["main_kernel_1"]  # attribute 6: programmatic stream serialization


def _grouped(encoded):
    """The calls of the driver with the last four numbers as one list, as the log has them."""
    return [(name, [*arguments[:-4], arguments[-4:]]) for name, arguments in encoded]


def _join(numbers):
    return ",".join(map(str, numbers)) if isinstance(numbers, list) else str(numbers)


@pytest.mark.slow
def test_other_arguments_are_refused(folder):
    refused = {
        (0, "float32:1x8x8x64"): "argument 0: the shape or dtype differs from the kernel's",
        (1, "float16:64x3x3x32"): "argument 1: the shape or dtype differs from the kernel's",
        (2, "float16:1x8x8x64:4096x1x8x64"): "argument 2: expected a tensor without gaps, in C order",
    }
    calls = [[*ARRAYS[:index], text, *ARRAYS[index + 1 :]] for index, text in refused]
    errors, lines = call(folder, ARRAYS[:3], *calls)
    assert errors == [f"tvmconv: mapped: {text}" for text in ("wrong number of arguments", *refused.values())]
    assert not lines


@pytest.mark.slow
def test_errors_of_the_driver_name_the_function_and_the_architecture(folder):
    (error,), _ = call(folder, ARRAYS, FAKE_CUDA_REFUSES="1")
    assert error == "tvmconv: mapped: the kernel for sm_90 cannot be loaded: no binary"
    (folder / "none").mkdir()
    (folder / "none/libcuda.so.1").write_text("")
    (error,), _ = call(folder, ARRAYS, cuda="none")
    assert error.startswith("tvmconv: mapped: no CUDA driver: ")


def test_library_contains_the_machine_code(folder, executable):
    assert executable.kernels[0].code in (folder / "model.so").read_bytes()
