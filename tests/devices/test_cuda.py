import subprocess
import sys

import numpy as np
import pytest

from tvmconv.baselines.cudnn import time_cudnn
from tvmconv.devices import find_device
from tvmconv.errors import DeviceError
from tvmconv.verification import Problem
from tvmconv.workloads import parse


@pytest.fixture(scope="module")
def loaded(gpu, lower_difference):
    return gpu.load(lower_difference(gpu).executable)


@pytest.mark.gpu
def test_torch_tensors_are_taken_and_given_without_a_copy(loaded, vectors):
    torch = pytest.importorskip("torch")
    inputs, expected = vectors
    with torch.cuda.stream(torch.cuda.Stream()):
        y = loaded.call_dlpack([torch.from_numpy(array).cuda() for array in inputs])
        np.testing.assert_allclose(y.cpu().numpy(), expected, rtol=1e-6)


@pytest.mark.gpu
def test_tensors_on_the_host_are_refused(loaded, vectors):
    import tvm

    with pytest.raises(DeviceError, match="input 0 is on cpu:0: expected cuda:0"):
        loaded.call_dlpack([tvm.runtime.tensor(array) for array in vectors[0]])


@pytest.mark.gpu
@pytest.mark.parametrize("cold", [False, True])
def test_time_is_taken_from_a_cuda_graph(loaded, vectors, cold):
    timing = loaded.time(vectors[0], cold=cold, seconds=0.02)
    assert timing.method.startswith("CUDA graph of")
    assert ("cold L2" if cold else "hot L2") in timing.method
    assert 0 < timing.best <= timing.median < 1e-3


@pytest.mark.gpu
def test_an_illegal_address_is_one_line_and_no_abort(tmp_path):
    script = tmp_path / "illegal_address.py"  # TVMScript reads a function's source from its file
    script.write_text("""
import numpy as np
from tvmconv.devices import find_device
from tvmconv.errors import DeviceError
import tvm
from tvm.script import tirx as T

from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module

@tvm_script.prim_func(s_tir=True)
def main(X: T.Buffer((1000,), "float32"), Y: T.Buffer((1000,), "float32")):
    for thread in T.thread_binding(64, thread="threadIdx.x"):
        Y[thread + 1500000000] = X[thread]

gpu = find_device("cuda:0")
try:
    gpu.load(lower_module(tvm.IRModule({"main": main}), gpu.make_target()).executable).run([np.ones(1000, "float32")])
except DeviceError as error:
    print(error)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("cuda:0: ")
    assert done.stdout.count("\n") == 1


@pytest.mark.gpu
def test_an_index_past_the_last_gpu_tells_which_there_are():
    with pytest.raises(DeviceError, match=r"no device 'cuda:99': there (is|are) cuda:0"):
        find_device("cuda:99")


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["conv2d:1x16x32x32,16x16x3x3,p1", "conv2d:1x16x32x32,16x16x3x3,p0x1x1x0"])
def test_cudnn_is_right_and_timed_from_a_cuda_graph(gpu, text):
    pytest.importorskip("torch")
    problem = Problem(parse(text))
    baseline = time_cudnn(problem.workload, problem.inputs, device=gpu, seconds=0.02)
    assert problem.check(baseline.output).ok  # with TF32 the error would be about 1e-3
    assert baseline.timing.method.startswith("CUDA graph of")


def test_cudnn_on_opencl_is_refused(opencl):
    w = parse("conv2d:1x16x32x32,16x16x3x3,p1")
    with pytest.raises(DeviceError, match="needs an NVIDIA GPU: expected cuda:N instead of opencl:0"):
        time_cudnn(w, w.inputs(0), device=opencl)
