import dataclasses
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from steps import with_step

import tvmconv as tc
from tvmconv.devices.opencl import upload_arrays, use_writable_caches
from tvmconv.errors import CompileError, DeviceError


@pytest.fixture(scope="module")
def loaded(opencl, lower_difference):
    return opencl.load(lower_difference(opencl).executable)


def test_what_the_device_cannot_run_is_refused_in_one_line(opencl, lower_difference, vectors):
    executable = lower_difference(opencl).executable
    with pytest.raises(DeviceError, match=r"opencl:0 runs at most 32 threads a block and the kernel has 64"):
        dataclasses.replace(opencl, max_threads_per_block=32).load(executable)
    with pytest.raises(DeviceError, match=r"opencl:0 has \d+ bytes of static shared memory a block"):
        opencl.load(with_step(executable, shared_bytes=opencl.shared_bytes_per_block + 1))
    with pytest.raises(CompileError, match=r"^opencl:0 rejects the kernel: error: .*undeclared identifier") as caught:
        opencl.load(with_step(executable, code=b"__kernel void main_kernel() { undeclared = 1; }"))
    assert "\n" not in str(caught.value)
    boundless = dataclasses.replace(opencl, max_threads_per_block=10**6)
    kernel = boundless.load(lower_difference(opencl, threads=opencl.max_threads_per_block + 1).executable)
    with pytest.raises(DeviceError, match=r"opencl:0: .*INVALID_WORK_GROUP_SIZE, launched as 1·1·1 × \d+·1·1$"):
        kernel.run(vectors[0])


@pytest.mark.usefixtures("optimised")
def test_work_items_outside_of_the_output_store_nothing():
    """They round a residual that they have not loaded, from which LLVM would conclude that no guard is needed."""
    w = tc.parse("conv2d:1x18x5x9,18x1x3x1,s1,p1,g18,i8,nhwc,add,quantize")
    kernel, num_elements = tc.build(w, "depthwise_nhwc", device="opencl:0").loaded_kernel, math.prod(w.output_shape)
    memory = np.full(2 * num_elements, 99, np.int8)
    kernel.run_on_buffers(upload_arrays(kernel._queue, [*w.inputs(seed=0), memory]), memory)
    assert (memory[num_elements:] == 99).all()


@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_caches_are_replaced_where_no_file_can_be_written(fault, tmp_path, monkeypatch):
    def fail(dir):
        raise OSError(30 if fault == "read-only" else 28, fault)

    for name in ("POCL_CACHE_DIR", "PYOPENCL_NO_CACHE"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_writable_caches()
    assert "POCL_CACHE_DIR" not in os.environ
    assert "PYOPENCL_NO_CACHE" not in os.environ
    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    use_writable_caches()
    assert os.access(os.environ["POCL_CACHE_DIR"], os.W_OK)
    assert os.environ["PYOPENCL_NO_CACHE"] == "1"


def test_pyopencl_runs_a_kernel_without_a_writable_home():
    code = (
        "from tvmconv.devices import opencl\n"
        "queue = opencl._get_queue(0)\n"
        "import pyopencl as cl\n"
        "text = 'kernel void one(global float *y) { y[get_global_id(0)] = 1; }'\n"
        "program = cl.Program(queue.context, opencl.read_source_header() + text).build(cache_dir=False)\n"
        "one, y = cl.Kernel(program, 'one'), cl.Buffer(queue.context, cl.mem_flags.READ_WRITE, 64)\n"
        "one.set_args(y)\n"
        "cl.enqueue_nd_range_kernel(queue, one, (16,), (16,)).wait()\n"
    )
    kept = {name: value for name, value in os.environ.items() if name not in ("POCL_CACHE_DIR", "XDG_CACHE_HOME")}
    subprocess.run([sys.executable, "-c", code], env={**kept, "HOME": "/proc/nowhere"}, check=True)


def test_float16_is_refused_where_the_device_has_none(opencl, tmp_path):
    """Its compiler would say no more than that it knows no such type."""
    w = tc.parse("conv2d:1x4x8x8,8x4x3x3,s1,p1,f16")
    lacking = dataclasses.replace(opencl, has_float16=False)
    with pytest.raises(DeviceError, match="opencl:0 has no float16"):
        tc.build(w, "default", device=lacking)
    with pytest.raises(DeviceError, match="opencl:0 has no float16"):
        tc.tune(w, "direct", trials=1, log=tmp_path / "log.jsonl", device=lacking)
    assert "half" in tc.build(w, "default", device=dataclasses.replace(opencl, has_float16=True)).source


@pytest.mark.parametrize(("launch_seconds", "launches"), [(0.49, 4), (0.5, 2), (7.0, 2)])
def test_a_launch_of_half_a_second_is_sampled_once(opencl, loaded, vectors, monkeypatch, launch_seconds, launches):
    """One launch more compiles for the work-group's size."""
    inputs, expected = vectors
    launched, launch = [], type(loaded)._launch_kernels
    monkeypatch.setattr(type(loaded), "_launch_kernels", lambda *args: launched.append(0) or launch(*args))
    sample = type(loaded).time_launch
    monkeypatch.setattr(type(loaded), "time_launch", lambda *args: sample(*args) and launch_seconds)
    launched.clear()
    samples = loaded.time(inputs, seconds=0.01).seconds
    assert len(samples) == launches - 1
    bench = opencl.create_benchmark(inputs, expected.astype(np.float64))
    launched.clear()
    assert len(bench.time(loaded, math.inf)) == (1 if launches == 2 else 4)
    bench.close()


def test_clock_that_does_not_tick_in_between_gives_times(opencl, loaded, vectors, monkeypatch):
    still = SimpleNamespace(wait=lambda: None, profile=SimpleNamespace(start=5, end=5))
    monkeypatch.setattr(loaded, "_launch_kernels", lambda *_: [still])
    inputs, expected = vectors
    assert min(opencl.create_benchmark(inputs, expected).time(loaded, math.inf)) > 0
    assert "±" in str(loaded.time(inputs, seconds=0))
