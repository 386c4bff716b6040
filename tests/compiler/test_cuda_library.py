"""Libraries that TVM exports without CUDA's runtime contain machine code in place of CUDA source."""

import subprocess

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tvmconv.compiler import cuda_library, nvrtc
from tvmconv.compiler.cuda_library import PrecompiledExecutable, compile_cuda_modules, export_library
from tvmconv.errors import CompileError

TREE = [(0, 1, 2, 3, 3), (1, 2, 3)]  # a library with two further modules, one of which imports the last
TABLE = b"\1\0\0\0\0\0\0\0" + b"\6\0\0\0\0\0\0\0kernel" + bytes(20)
SOURCE = "__global__ void kernel() {}" * 9


def number(n):
    return n.to_bytes(8, "little")


def string(content):
    return number(len(content)) + content


def pack(*cuda_modules):
    """The array of a library, a module of weights, and modules for CUDA."""
    tree = b"".join(number(len(numbers)) + b"".join(map(number, numbers)) for numbers in TREE)
    modules = b"".join(string(b"cuda") + string(module) for module in cuda_modules)
    return string(tree + string(b"_lib") + string(b"weights") + string(b"1.5, 2.5") + modules)


def test_source_becomes_machine_code_and_all_else_stays():
    source = string(b"cuda") + TABLE + string(SOURCE.encode())
    binary = string(b"cubin") + TABLE + string(b"\x7fELF code")
    compiled = []
    assert compile_cuda_modules(pack(source, binary), lambda text: compiled.append(text) or b"code") == pack(
        string(b"cubin") + TABLE + string(b"code"), binary
    )
    assert compiled == [SOURCE]


@pytest.mark.parametrize("change", [lambda blob: blob[:-3], lambda blob: blob + b"more", lambda blob: number(99)])
def test_unknown_formats_are_refused(change):
    with pytest.raises(CompileError, match="imported modules of TVM's library"):
        compile_cuda_modules(change(pack(string(b"cubin"), string(b"cubin"))), lambda text: b"")


# Stands in for the loader that TVM's CUDA runtime registers, and writes down the format of each module.
LOAD = """
import sys, tvm, tvm_ffi

def load(payload):
    print(bytes(payload)[8:13].decode())
    return tvm_ffi.get_global_func("runtime.CSourceModuleCreate")("", "c", [], [])

tvm_ffi.register_global_func("ffi.Module.load_from_bytes.cuda", load, override=True)
for path in sys.argv[1:]:
    tvm.runtime.load_module(path)
"""


@pytest.mark.skipif(bool(nvrtc.explain_unavailability()), reason="no NVRTC")
def test_exported_libraries_have_machine_code(tmp_path, python):
    x = relax.Var("x", relax.TensorType((1, 4, 8, 8), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.max_pool2d(x, (2, 2))))
    executable = tvm.compile(builder.get(), tvm.target.Target({"kind": "cuda", "arch": "sm_90"}))
    paths = [str(tmp_path / name) for name in ("a.so", "b.so")]
    export_library(executable, paths[0], "sm_90")
    PrecompiledExecutable(executable.mod, "sm_90").export_library(paths[1])
    done = subprocess.run([*python, "-c", LOAD, *paths], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["cubin", "cubin"]


def test_executable_of_a_cuda_runtime_is_exported_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_library, "has_cuda_runtime", lambda: True)
    x = relax.Var("x", relax.TensorType((1, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.tanh(x)))
    executable = PrecompiledExecutable(tvm.compile(builder.get(), "llvm").mod, "sm_90")
    executable.export_library(tmp_path / "model.so")
    for library in (executable, tvm.runtime.load_module(str(tmp_path / "model.so"))):
        y = relax.VirtualMachine(library, tvm.cpu())["main"](tvm.runtime.tensor(np.ones((1, 4), np.float32)))
        np.testing.assert_allclose(y.numpy(), np.tanh(1), rtol=1e-6)


def test_libraries_without_kernels_of_tvm_are_exported(tmp_path):
    code = "int __tvm_ffi_f(void* self, void* arguments, int number, void* result) { return 0; }"
    module = tvm_ffi.get_global_func("runtime.CSourceModuleCreate")(code, "c", ["f"], [])
    export_library(module, tmp_path / "f.so", "sm_90")
    assert (tmp_path / "f.so").exists()
