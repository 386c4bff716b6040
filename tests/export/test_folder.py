import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mapped
import numpy as np
import pytest
import steps
from fake_driver import FakeDriver

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.devices.cuda.function import encode_tensor_map
from tvmconv.export import export
from tvmconv.logs.record import Record
from tvmconv.tensor_map import TensorMap

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))
SMALL = tc.parse("conv2d:1x4x6x6,8x4x3x3,p1")
ROOT = Path(tc.__file__).parents[1]
FILTER = tc.parse("filter2d:13x11x3,5x3")

# Run before an example: PoCL knows the processor, and then nothing of this project can be imported.
WITHOUT_TVMCONV = """
import sys
from tvmconv.devices.pocl import patch_cpu_name
patch_cpu_name()
for name in [name for name in sys.modules if name.startswith("tvmconv.")]:
    del sys.modules[name]
sys.modules.update(dict.fromkeys(("tvmconv", "schedules")))
"""
SAVE_OUTPUT = "\nnp.save('output.npy', Y)\n"


def examples(folder):
    """The Python examples of a README."""
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def read_facts(folder):
    return json.loads((folder / "kernel.json").read_text(encoding="utf-8"))


def run_example(text, folder):
    """The output of an example, run as it stands in a fresh process without tvmconv."""
    command = [sys.executable, "-c", WITHOUT_TVMCONV + text + SAVE_OUTPUT]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "POCL_EXTRA_BUILD_FLAGS": "-cl-opt-disable", "PYTHONPATH": path}
    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    return np.load(folder / "output.npy")


def error_of(output, workload):
    """Relative error of an example's output: its inputs are drawn as here."""
    random = np.random.default_rng(0)
    *shapes, _ = workload.argument_shapes
    reference = workload.reference(*(random.standard_normal(shape).astype(workload.dtype) for shape in shapes))
    return np.linalg.norm(output - reference) / np.linalg.norm(reference)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("workload", "schedule"), [(SMALL, "vthread"), (FILTER, "constant")])
def test_the_opencl_example_runs_without_tvmconv(tmp_path, workload, schedule):
    export(tc.build(workload, schedule, device="opencl:0"), tmp_path)
    (example,) = examples(tmp_path)
    assert error_of(run_example(example, tmp_path), workload) < 1e-5


def test_the_opencl_example_takes_bfloat16(tmp_path):
    export(tc.build(steps.WORKLOAD, steps.BFLOAT16, device="opencl:0"), tmp_path)
    (example,) = examples(tmp_path)
    assert "import ml_dtypes" in example
    output = run_example(example, tmp_path).view("bfloat16")  # which NumPy's files do not know
    assert error_of(output.astype("float64"), steps.WORKLOAD) < 1e-2


def test_the_json_tells_all_steps_and_the_memory_between_them(tmp_path):
    kernel = tc.build(steps.WORKLOAD, steps.SCHEDULE, arch="sm_90")
    export(kernel, tmp_path)
    facts = read_facts(tmp_path)
    assert [step["function"] for step in facts["kernels"]] == [step.name for step in kernel.kernels]
    assert [sorted(step["parameters"]) for step in facts["kernels"]] == [["K", "X", "scratch0"], ["Y", "scratch0"]]
    assert [tuple(step["grid"]) for step in facts["kernels"]] == [step.launch.grid for step in kernel.kernels]
    assert facts["workspace"] == [{"name": "scratch0", "bytes": 4 * 4 * 64}]
    assert "function" not in facts


def test_the_json_and_the_readme_tell_dynamic_shared_memory(tmp_path):
    export(tc.build(steps.WORKLOAD, steps.DYNAMIC, arch="sm_90"), tmp_path)
    facts = read_facts(tmp_path)
    assert (facts["shared_bytes"], facts["dynamic_shared_bytes"]) == (0, 60 << 10)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "61,440 bytes of dynamic shared memory" in page
    assert "', (1, 1, 1), (64, 1, 1), 61440, [" in examples(tmp_path)[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("which", [0, 1], ids=["tvm", "driver"])
@pytest.mark.parametrize(
    ("workload", "schedule"),
    [
        (steps.WORKLOAD, steps.SCHEDULE),
        (steps.WORKLOAD, steps.DYNAMIC),
        (tc.parse("conv2d:1x64x28x28,64x64x3x3,p1"), "vthread"),
    ],
    ids=["steps", "dynamic", "convolution"],
)
def test_the_cuda_examples_run_without_tvmconv(tmp_path, gpu, which, workload, schedule):
    exported = export(tc.build(workload, schedule, arch=gpu.arch), tmp_path)
    assert exported.library_error is None
    assert error_of(run_example(examples(tmp_path)[which], tmp_path), workload) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["constant", "texture"])
def test_driver_example_brings_arguments_to_where_they_are_read(tmp_path, gpu, schedule):
    export(tc.build(FILTER, schedule, arch=gpu.arch), tmp_path)
    (example,) = examples(tmp_path)
    assert error_of(run_example(example, tmp_path), FILTER) < 1e-5


def test_the_readme_tells_where_arguments_lie(tmp_path):
    export(tc.build(FILTER, "texture", arch="sm_90"), tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "K is not a parameter: it is copied to the symbol `K_ptr` before a launch." in page
    assert "X's texture object, Y's address" in page


def test_the_json_tells_all_that_a_call_needs(tmp_path):
    kernel = tc.build(SMALL, "tiling", arch="sm_90")
    export(kernel, tmp_path)
    facts = read_facts(tmp_path)
    assert tuple(facts["grid"]) == kernel.launch.grid
    assert tuple(facts["block"]) == kernel.launch.block
    assert sorted(facts["parameters"]) == ["K", "X", "Y"]
    assert [argument["shape"] for argument in facts["arguments"]] == [[1, 4, 6, 6], [8, 4, 3, 3], [1, 8, 6, 6]]
    assert f"{facts['function']}(" in (tmp_path / "kernel.cu").read_text(encoding="utf-8")


def test_the_readme_tells_where_the_time_is_from(tmp_path):
    record = Record(
        SMALL, "tiling", {}, "NVIDIA H200", "cuda -arch=sm_90", times=(4e-6, 5e-6, 6e-6), relative_error=3e-7
    )
    kernel = tc.build(SMALL, "tiling", arch="sm_90")
    kernel.record = record
    export(kernel, tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "5 µs" in page
    assert "NVIDIA H200, 1970-01-01" in page
    assert "3e-07" in page


def test_an_export_replaces_all_of_an_earlier_one(tmp_path):
    export(tc.build(SMALL, "tiling", arch="sm_90"), tmp_path)
    exported = export(tc.build(FILTER, "constant", arch="sm_90"), tmp_path)  # which has no shared library
    assert sorted(tmp_path.iterdir()) == sorted(exported.files)


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(tc.Error, match=r"README\.md does not belong to an exported kernel"):
        export(tc.build(SMALL, "tiling", arch="sm_90"), tmp_path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
    folder = tmp_path / "kernel"
    export(tc.build(SMALL, "tiling", arch="sm_90"), folder)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(tc.Error, match="holds a kernel for cuda, not for opencl: expected another folder"):
        export(tc.build(SMALL, "tiling", device="opencl:0"), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == files


def test_without_a_compiler_to_link_with_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    exported = export(tc.build(SMALL, "tiling", arch="sm_90"), tmp_path)
    assert "no C++ compiler" in exported.library_error
    assert {"kernel.cu", "kernel.cubin"} <= {file.name for file in exported.files}
    assert len(examples(tmp_path)) == 1  # the driver's; the one with TVM would need the library


def test_a_compiler_that_fails_costs_the_library_alone(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho ld: cannot find -lstdc++\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    exported = export(tc.build(SMALL, "tiling", arch="sm_90"), tmp_path)
    assert exported.library_error == f"{compiler} does not link kernel.so: ld: cannot find -lstdc++"
    assert not (tmp_path / "kernel.so").exists()


@needs_nvrtc
def test_tensor_maps_are_told_as_data(tmp_path):
    export(tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90"), tmp_path)
    facts = read_facts(tmp_path)
    assert facts["target"] == {"kind": "cuda", "arch": "sm_90", "code": "sm_90a"}
    first, second = facts["kernels"]
    assert first["parameters"] == ["K", "X", "scratch0"]
    assert [(told.pop("parameter"), TensorMap.from_dict(told)) for told in first["tensor_maps"]] == [
        (0, mapped.WEIGHT),
        (1, mapped.IMAGE),
    ]
    assert second["tensor_maps"] == []
    assert "K's tensor map, X's tensor map, scratch0's address" in (tmp_path / "README.md").read_text(encoding="utf-8")


@needs_nvrtc
def test_driver_example_encodes_and_launches_as_tvmconv_does(tmp_path, monkeypatch):
    kernel = tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90")
    export(kernel, tmp_path)
    monkeypatch.chdir(tmp_path)
    driver = FakeDriver(monkeypatch, kernel.executable)
    (example,) = examples(tmp_path)
    left = {}
    exec(compile(example, "example", "exec"), left)
    there = {name: int(array[0]) for name, array in left["memory"].items() if len(array) == 1}
    by_example, driver.encoded = driver.encoded, []
    encode_tensor_map(mapped.WEIGHT, there["K"])
    encode_tensor_map(mapped.IMAGE, there["X"])
    assert by_example == driver.encoded
    shared = kernel.executable.kernels[0].dynamic_shared_bytes
    maps = [list(range(16)), list(range(1000, 1016))]
    assert driver.launched == [
        ("main_kernel", (1, 1, 1), (128, 1, 1), shared, [*maps, there["scratch0"]]),
        ("main_kernel_1", (64, 1, 1), (64, 1, 1), 0, [there["Y"], there["scratch0"]]),
    ]
    assert driver.alignments == [0, 0]


@pytest.mark.gpu
def test_the_driver_example_encodes_tensor_maps(tmp_path, gpu):
    if gpu.arch != "sm_90":
        pytest.skip("wgmma is of sm_90 alone")
    export(tc.build(mapped.WORKLOAD, mapped.SCHEDULE, device=gpu), tmp_path)
    (example,) = examples(tmp_path)
    assert error_of(run_example(example, tmp_path).astype("float64"), mapped.WORKLOAD) < 1e-2


@needs_nvrtc
def test_clusters_are_told_of_and_need_no_launch_of_their_own(tmp_path):
    w = tc.parse("conv2d:1x64x5x5,16x64x3x3,s1,p1,f16,nhwc")
    tiles = {"block_m": 16, "block_n": 16, "block_k": 64, "warps_m": 1, "warps_n": 1, "warps_k": 2, "stages": 2}
    kernel = tc.build(w, "mma_sync", arch="sm_90", config={**tiles, "split_k": 2, "split_k_reduction": "cluster"})
    export(kernel, tmp_path)
    assert "in clusters of 1·1·2 blocks" in (tmp_path / "README.md").read_text()
    assert json.loads((tmp_path / "kernel.json").read_text())["kernels"][0]["cluster"] == [1, 1, 2]
    assert "__cluster_dims__(1, 1, 2)" in (tmp_path / "kernel.cu").read_text()
