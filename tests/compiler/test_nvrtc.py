"""CUDA text to cubin and PTX without a GPU."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tvmconv.compiler import nvrtc, sass
from tvmconv.errors import CompileError

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

SHARED = """extern "C" __global__ void main_kernel(float* x) {
  __shared__ float tile[256];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[255 - threadIdx.x];
}"""

# 128 live values a thread, where 1,024 threads a block leave each 64 registers.
SPILLING = """extern "C" __global__ void __launch_bounds__(1024) main_kernel(const float* x, float* y) {
  float a[128], sum = 0;
  #pragma unroll
  for (int i = 0; i < 128; i++) a[i] = x[i * 1024 + threadIdx.x];
  #pragma unroll
  for (int i = 0; i < 128; i++) sum += a[i] * a[(i * 37 + 5) % 128];
  #pragma unroll
  for (int i = 0; i < 128; i++) y[i * 1024 + threadIdx.x] = a[i] * sum;
}"""

TOO_MUCH_SHARED = SHARED.replace("256", "65536")

# The stand-in for this header declares is_same without a definition.
TYPE_TRAITS = """#include <cuda/std/type_traits>
extern "C" __global__ void main_kernel(int* x) { x[threadIdx.x] = cuda::std::is_same<float, float>::value; }"""


@pytest.fixture(scope="module")
def cuda_text():
    """What TVM generates for Y = X * K + X, by dtype."""
    import tvm
    from tvm import s_tir, te

    def generate(dtype):
        X, K = (te.placeholder((1024,), dtype, name) for name in "XK")
        s = s_tir.Schedule(te.create_prim_func([X, K, te.compute((1024,), lambda i: X[i] * K[i] + X[i], "Y")]))
        block, thread = s.split(s.get_loops(s.get_sblock("Y"))[0], [None, 128])
        s.bind(block, "blockIdx.x")
        s.bind(thread, "threadIdx.x")
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024})
        return tvm.compile(s.mod, target).mod.imports[0].inspect_source()

    hook = "tvm_callback_cuda_compile"  # the text alone is wanted, so nothing needs to be compiled
    original = tvm.get_global_func(hook)
    tvm.register_global_func(hook, lambda text: b"", override=True)
    try:
        return {dtype: generate(dtype) for dtype in ("float32", "float16")}.__getitem__
    finally:
        tvm.register_global_func(hook, original, override=True)


@pytest.fixture
def attempts(monkeypatch):
    """The in-memory headers of each run of NVRTC, in order."""
    seen = []
    attempt = nvrtc._run_nvrtc

    def record(module, source, options, headers, kind):
        seen.append(headers)
        return attempt(module, source, options, headers, kind)

    monkeypatch.setattr(nvrtc, "_run_nvrtc", record)
    return seen


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_reports_registers(cuda_text, arch):
    assert 0 < nvrtc.compile_cubin(cuda_text("float32"), arch).resources.registers <= 255


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_text_of_tvm_needs_no_more_than_the_stand_in_headers(cuda_text, dtype, attempts):
    nvrtc.compile_cubin(cuda_text(dtype), "sm_80")
    assert attempts == [nvrtc._STAND_IN_HEADERS]


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_instructions_are_those_of_tvms_own_nvrtc_call(cuda_text, dtype, tmp_path, monkeypatch):
    from cuda.pathfinder import find_nvidia_header_directory
    from tvm.support.nvcc import _find_cuda_target_include, compile_cuda

    # TVM looks for headers as an installed toolkit lays them out, with those of libcu++ under targets/…/include/cccl.
    (tmp_path / "include").symlink_to(find_nvidia_header_directory("cudart"))
    for triple in ("x86_64-linux", "sbsa-linux"):
        target = tmp_path / "targets" / triple / "include"
        target.mkdir(parents=True)
        (target / "cccl").symlink_to(find_nvidia_header_directory("cccl"))
    assert _find_cuda_target_include(str(tmp_path))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    theirs = compile_cuda(cuda_text(dtype), target_format="cubin", arch="sm_90")
    ours = nvrtc.compile_cubin(cuda_text(dtype), "sm_90").image
    assert sass.disassemble(ours) == sass.disassemble(bytes(theirs))


@needs_nvrtc
def test_a_kernel_that_needs_the_real_headers_gets_them(attempts):
    nvrtc.compile_cubin(TYPE_TRAITS, "sm_90")
    assert attempts == [nvrtc._STAND_IN_HEADERS, {}]


@needs_nvrtc
def test_spills_are_reported_with_their_stack():
    resources = nvrtc.compile_cubin(SPILLING, "sm_90").resources
    assert resources.registers <= 64
    assert resources.spills > 0
    assert resources.stack_bytes > 0


@needs_nvrtc
@pytest.mark.parametrize(("arch", "known"), [("sm_80", True), ("sm_90", False)])
def test_constant_bytes_are_none_where_ptxas_does_not_tell(arch, known):
    assert (nvrtc.compile_cubin(SHARED, arch).resources.constant_bytes is not None) is known


@needs_nvrtc
def test_threads_compile_side_by_side_what_one_compiles(cuda_text):
    text = cuda_text("float32")
    alone = nvrtc.compile_cubin(text, "sm_90").image
    with ThreadPoolExecutor(4) as pool:
        images = pool.map(lambda _: nvrtc.compile_cubin(text, "sm_90").image, range(8))
        assert all(image == alone for image in images)


@needs_nvrtc
def test_broken_text_is_refused_with_its_first_error_in_one_line():
    with pytest.raises(CompileError, match=r'error: identifier "oops" is undefined$') as caught:
        nvrtc.compile_cubin('extern "C" __global__ void main_kernel(float* x) { x[0] = oops; x[1] = again; }', "sm_90")
    assert "\n" not in str(caught.value)


@needs_nvrtc
def test_an_error_of_ptxas_is_told_and_not_tried_again(attempts):
    with pytest.raises(CompileError, match="uses too much shared data"):
        nvrtc.compile_cubin(TOO_MUCH_SHARED, "sm_90")
    assert len(attempts) == 1


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_52", "sm_9", "compute_90", "90", "sm_90 ", ""])
def test_an_unknown_architecture_is_quoted_beside_the_known_ones(arch):
    with pytest.raises(CompileError, match=rf"{arch!r}: expected one of sm_75, sm_80, .*sm_90"):
        nvrtc.compile_cubin(SHARED, arch)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r'pip install "cuda-bindings==13\.\*"'):
        nvrtc.compile_cubin(SHARED, "sm_90")


@needs_nvrtc
def test_without_the_library_the_remedy_is_named(monkeypatch):
    from cuda.bindings import nvrtc as bindings

    def fail():
        raise RuntimeError("Failure finding libnvrtc.so\nsearched: everywhere")

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    assert nvrtc.explain_unavailability() == (
        'NVRTC is not available (Failure finding libnvrtc.so); pip install "nvidia-cuda-nvrtc==13.*" '
        "(in a clone of tvmconv: pip install -e '.[cuda]')"
    )
