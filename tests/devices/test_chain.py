"""Kernels one after another: what each reads, which begin early, and what is timed of them together."""

from dataclasses import replace
from itertools import count

import mapped
import pytest
from fake_driver import FakeDriver

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import ArrayType
from tvmconv.devices.cuda.device import CudaDevice
from tvmconv.devices.cuda.kernel_chain import KernelChain, find_linked_inputs

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
A, B = ArrayType((1, 8, 8, 64), "float16"), ArrayType((1, 4, 4, 64), "float16")
IN_BFLOAT16 = ArrayType(A.shape, "bfloat16")


def test_kernel_reads_what_the_one_before_it_wrote_if_it_fits():
    assert find_linked_inputs([A, A, A, B], [A, B, B, B]) == [False, True, False, True]
    assert find_linked_inputs([A, A], [IN_BFLOAT16, A]) == [False, False]
    assert find_linked_inputs([A], [A]) == [False]


@pytest.fixture(scope="module")
def program():
    """Two steps, of which the second waits by itself for the first; Y is as X is."""
    return tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90").executable


@pytest.fixture
def driver(monkeypatch, program):
    """A driver and a runtime that launch nothing; the runtime hands out addresses from 100 on."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    addresses = count(100)
    nothing = ("SetDevice", "StreamSynchronize", "StreamDestroy", "Memcpy", "MemsetAsync", "Free", "GraphDestroy")
    nothing += ("StreamBeginCapture", "GraphExecDestroy", "GraphLaunch", "DeviceSynchronize")
    answers = {f"cuda{name}": lambda *_: () for name in nothing}
    answers["cudaMalloc"] = lambda nbytes: (next(addresses),)
    for name in ("StreamCreateWithFlags", "StreamEndCapture", "GraphInstantiate"):
        answers[f"cuda{name}"] = lambda *_: (0,)
    for name, answer in answers.items():
        monkeypatch.setattr(runtime, name, lambda *a, answer=answer: (runtime.cudaError_t.cudaSuccess, *answer(*a)))
    return FakeDriver(monkeypatch, program)


@pytest.fixture
def device():
    return CudaDevice(
        "cuda:0", "a GPU", "sm_90", 1 << 40, 132, 1024, 49152, None, None, None, 0, opt_in_shared_bytes_per_block=232448
    )


def arrays(driver, launches):
    """Addresses of X, K and Y of each kernel, of the maps over X and K, and of the second step's output."""
    maps = [arguments[2] for _, arguments in driver.encoded]
    found = []
    for first, second in zip(launches[::2], launches[1::2], strict=True):
        k, x = (maps[words[0] // 1000] for words in first[4][:2])
        found.append((x, k, second[4][0]))
    return found


@needs_nvrtc
def test_each_kernel_has_weights_and_an_output_of_its_own(driver, device, program):
    with KernelChain(device, [program] * 3, [mapped.WORKLOAD.inputs(0)] * 3) as chain:
        chain.run()
        (x, k0, y0), (x1, k1, y1), (x2, k2, y2) = arrays(driver, driver.launched)
    assert chain.reads_previous_output == [False, True, True]
    assert (x1, x2) == (y0, y1)
    assert len({x, k0, k1, k2, y0, y1, y2}) == 7


@needs_nvrtc
def test_steps_that_wait_overlap_where_that_is_asked_for(driver, device, program):
    with KernelChain(device, [program] * 2, [mapped.WORKLOAD.inputs(0)] * 2) as chain:
        chain.run()
        assert driver.overlapping == []
        chain.run(use_pdl=True)
        assert driver.overlapping == ["main_kernel_1"] * 2
    assert chain.overlaps_previous == [False, False]  # their first steps do not wait


@needs_nvrtc
def test_a_first_step_that_waits_overlaps_the_kernel_before_it(driver, device, program):
    waiting = replace(program, kernels=tuple(replace(step, uses_pdl=True) for step in program.kernels))
    with KernelChain(device, [waiting] * 2, [mapped.WORKLOAD.inputs(0)] * 2) as chain:
        chain.run(use_pdl=True)
    assert chain.overlaps_previous == [False, True]
    assert driver.overlapping == ["main_kernel_1", "main_kernel", "main_kernel_1"]


@pytest.mark.gpu
def test_a_chain_computes_what_its_kernels_do_one_by_one(gpu):
    w = tc.parse("conv2d:1x16x12x12,16x16x3x3,s1,p1")
    kernel = tc.build(w, "tiling", device=gpu)
    given = [w.inputs(seed) for seed in range(3)]
    with KernelChain(gpu, [kernel.executable] * 3, given) as chain:
        outputs = chain.run()
        assert chain.time(seconds=0.01).median > 0
    x = given[0][0]
    for (_, k), output in zip(given, outputs, strict=True):
        x = kernel(x, k)
        assert (x == output).all()
