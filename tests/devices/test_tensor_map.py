"""Tensor maps are encoded where arrays are bound, and passed as a kernel takes them."""

import mapped
import numpy as np
import pytest
from fake_driver import FakeDriver

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.verification import Problem

pytest.importorskip("cuda.bindings.driver")
from tvmconv.devices.cuda.function import CudaFunction, encode_tensor_map
from tvmconv.devices.cuda.loaded_kernel import BoundKernel

pytestmark = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
POINTERS, SCRATCH = (0x10000, 0x20000, 0x30000), (0x40000,)


@pytest.fixture(scope="module")
def program():
    return tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90").executable


@pytest.fixture
def driver(monkeypatch, program):
    return FakeDriver(monkeypatch, program)


@pytest.fixture
def bind(driver, program):
    """The program's launches, on arrays that are nowhere."""
    functions = [CudaFunction(step.code, step.name, step.dynamic_shared_bytes) for step in program.kernels]
    return lambda **options: BoundKernel(program, functions, POINTERS, 0, SCRATCH, **options)


FLOAT16, NO_INTERLEAVE, SWIZZLE_128B, L2_256B, ZEROS = 6, 0, 3, 3, 0  # as cuda.h numbers them
TAIL = [NO_INTERLEAVE, SWIZZLE_128B, L2_256B, ZEROS]


def test_a_map_of_tiles_is_encoded_as_it_is_told(driver):
    encode_tensor_map(mapped.WEIGHT, 0x20000)
    layout = [[64, 9, 64], [2 * 64, 2 * 64 * 9]]
    assert driver.encoded == [("cuTensorMapEncodeTiled", [FLOAT16, 3, 0x20000, *layout, [64, 1, 64], [1, 1, 1], *TAIL])]


def test_a_map_of_pixels_is_encoded_with_its_corners(driver):
    encode_tensor_map(mapped.IMAGE, 0x10000)
    layout = [[64, 8, 8, 1], [2 * 64, 2 * 64 * 8, 2 * 64 * 64]]
    corners = [[-1, -1], [-1, -1]]
    assert driver.encoded == [
        ("cuTensorMapEncodeIm2col", [FLOAT16, 4, 0x10000, *layout, *corners, 64, 64, [1, 1, 1, 1], *TAIL])
    ]


def test_a_map_that_the_driver_refuses_is_told_by_its_name(driver, monkeypatch):
    from cuda.bindings import driver as real

    invalid = real.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(real, "cuTensorMapEncodeTiled", lambda *_: (invalid, None))
    monkeypatch.setattr(real, "cuGetErrorString", lambda _: (real.CUresult.CUDA_SUCCESS, b"invalid argument"))
    expected = "invalid argument: the tensor map of 64·9·64 float16, 64·1·64 at a time, over an array at 0x20008$"
    with pytest.raises(tc.DeviceError, match=expected):
        encode_tensor_map(mapped.WEIGHT, 0x20008)


def test_a_kernel_takes_maps_over_its_arrays(driver, bind):
    bind().launch()
    assert [arguments[2] for _, arguments in driver.encoded] == [POINTERS[1], POINTERS[0]]  # K's, then X's
    first, second = driver.launched
    shared = 2 * mapped.TILE_BYTES + 2048
    maps = [list(range(16)), list(range(1000, 1016))]
    assert first == ("main_kernel", (1, 1, 1), (128, 1, 1), shared, [*maps, SCRATCH[0]])
    assert second == ("main_kernel_1", (64, 1, 1), (64, 1, 1), 0, [POINTERS[2], SCRATCH[0]])
    assert driver.alignments == [0, 0]


def test_step_that_waits_by_itself_overlaps_unless_not_wanted(driver, bind):
    bind().launch()
    assert driver.overlapping == ["main_kernel_1"]
    overlapped, driver.launched = driver.launched, []
    bind(use_pdl=False).launch()
    assert driver.overlapping == ["main_kernel_1"]  # no more
    assert [launch[:4] for launch in driver.launched] == [launch[:4] for launch in overlapped]


@pytest.mark.gpu
@pytest.mark.parametrize("use_pdl", [False, True])
def test_what_tma_brings_is_multiplied(gpu, use_pdl):
    if gpu.arch != "sm_90":
        pytest.skip("wgmma is of sm_90 alone")
    from tvmconv.devices.cuda.loaded_kernel import DeviceArrays

    problem = Problem(mapped.WORKLOAD)
    loaded = gpu.load(tc.build(mapped.WORKLOAD, mapped.SCHEDULE, device=gpu).executable)
    output = np.empty(loaded.executable.output.shape, loaded.executable.output.dtype)
    with loaded.translate_errors(), DeviceArrays() as arrays:
        pointers = arrays.upload_all(problem.inputs, loaded.executable.output)
        with loaded.bind(pointers, 0, use_pdl=use_pdl) as bound:
            for _ in range(10):
                bound.launch()
            arrays.download(pointers[-1], output)
    assert problem.check(output).ok
