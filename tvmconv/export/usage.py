"""The README of an exported kernel: what it computes, and how to call it, with examples that run as they are."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.knobs import format_value

if TYPE_CHECKING:
    from tvmconv.workloads import Workload

FILES = {
    "kernel.cu": "the device function, CUDA C++",
    "kernel.cubin": "its machine code, as the CUDA driver loads it",
    "kernel.so": "the machine code, and host code that checks arguments and launches, for TVM's runtime",
    "kernel.cl": "the device function, OpenCL C",
    "kernel.json": "all that this page says, for programs",
    "README.md": "this page",
}

_TVM = """\
import numpy as np
from cuda.pathfinder import load_nvidia_dynamic_lib

load_nvidia_dynamic_lib("cudart")  # before TVM, which leaves out its CUDA runtime where it does not find this library
import tvm

random = np.random.default_rng(0)
gpu = tvm.cuda(0)
{inputs}
{output} = tvm.runtime.empty({output_shape}, "{dtype}", gpu)

kernel = tvm.runtime.load_module("./kernel.so")["main"]
kernel({arguments})

{output} = {output}.numpy()
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""

_DRIVER = """\
import numpy as np
from cuda.bindings import driver


def check(result):
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.cuGetErrorName(status)[1].decode())
    return values[0] if values else None


def upload(array):
    address = check(driver.cuMemAlloc(array.nbytes))
    check(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
    return np.array([int(address)], "uint64")


random = np.random.default_rng(0)
{inputs}
{output} = np.empty({output_shape}, "{dtype}")

check(driver.cuInit(0))
gpu = check(driver.cuDeviceGet(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu))))
with open("kernel.cubin", "rb") as cubin:
    module = check(driver.cuModuleLoadData(cubin.read()))
function = check(driver.cuModuleGetFunction(module, b"{function}"))

parameters = [upload(array) for array in ({parameters})]  # in the device function's own order
addresses = np.array([parameter.ctypes.data for parameter in parameters], "uint64")
grid, block = {grid}, {block}
check(driver.cuLaunchKernel(function, *grid, *block, 0, 0, addresses.ctypes.data, 0))
check(driver.cuMemcpyDtoH({output}.ctypes.data, int(parameters[{output_place}][0]), {output}.nbytes))  # waits
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""

_OPENCL = """\
import numpy as np
import pyopencl as cl

random = np.random.default_rng(0)
{inputs}
{output} = np.empty({output_shape}, "{dtype}")

context = cl.create_some_context(interactive=False)
queue = cl.CommandQueue(context)
with open("kernel.cl") as source:
    function = cl.Kernel(cl.Program(context, source.read()).build(), "{function}")

flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
parameters = [cl.Buffer(context, flags, hostbuf=array) for array in ({parameters})]  # in the function's own order
function.set_args(*parameters)
cl.enqueue_nd_range_kernel(queue, function, {work_items}, {block})  # work-items in all, and of a group
cl.enqueue_copy(queue, {output}, parameters[{output_place}])
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""


def readme(workload: Workload, facts: Mapping[str, Any], files: Sequence[str]) -> str:
    """The page as Markdown.

    Args:
        workload: what the kernel computes.
        facts: as `kernel.json` has them.
        files: names of the files beside the page, without `kernel.json`.
    """
    target = facts["target"]
    place = f"CUDA, {target['arch']}" if target["kind"] == "cuda" else "OpenCL"
    sections = [
        f"# {workload.text}",
        f"Schedule `{facts['schedule']}` of tvmconv {facts['versions']['tvmconv']}, compiled for {place}.",
        _meaning(workload),
        "## Arguments",
        _arguments(facts),
        "## Launch",
        _launch(facts),
        "## Measured",
        _measured(facts),
        "## Files",
        "\n".join(f"* `{name}`: {FILES[name]}" for name in (*files, "kernel.json")),
        "## Call",
        "Each example is complete and runs in this folder.",
    ]
    return "\n\n".join([*sections, *_examples(facts, files)]) + "\n"


def _meaning(workload: Workload) -> str:
    """The workload's own words on what it computes: its docstring up to the attributes."""
    return (inspect.getdoc(type(workload)) or "").partition("\nAttributes:")[0].strip()


def _arguments(facts: Mapping[str, Any]) -> str:
    rows = ["| argument | dtype | shape | |", "| --- | --- | --- | --- |"]
    output = facts["arguments"][-1]
    for argument in facts["arguments"]:
        role = "written, every element" if argument is output else "read"
        shape = " × ".join(map(str, argument["shape"]))
        rows.append(f"| {argument['name']} | {argument['dtype']} | {shape} | {role} |")
    return "\n".join(rows) + "\n\nAll are C-contiguous, without gaps, on the device."


def _launch(facts: Mapping[str, Any]) -> str:
    grid, block = ("·".join(map(str, facts[name])) for name in ("grid", "block"))
    registers = "" if facts["registers"] is None else f", {facts['registers']} registers a thread"
    knobs = ", ".join(f"`{name}={format_value(value)}`" for name, value in facts["config"].items())
    return (
        f"Grid {grid}, block {block}; {facts['shared_bytes']:,} bytes of static shared memory a block{registers}; no "
        f"dynamic shared memory. The device function is `{facts['function']}`; its parameters are the addresses of "
        f"{', '.join(facts['parameters'])}, in this order." + (f" Knobs: {knobs}." if knobs else "")
    )


def _measured(facts: Mapping[str, Any]) -> str:
    measured, verified = facts["measured"], facts["verified"]
    said = ["The time of this kernel was not measured."]
    if measured:
        said = [
            f"{measured['seconds'] * 1e6:,.4g} µs ({measured['gflops']:,.4g} GFLOP/s), the median on "
            f"{measured['device']}, {_date(measured['timestamp'])}: from the tuning log that chose this kernel."
        ]
        if measured["relative_error"] is not None:
            said.append(f"Its relative L2 error then, against a float64 reference: {measured['relative_error']:.2g}.")
    if verified:
        error = f"{verified['relative_error']:.2g}"
        said.append(f"Run and compared with a float64 reference on {verified['device']}: relative L2 error {error}.")
    else:
        said.append("These files were compiled without being run.")
    return " ".join(said)


def _date(timestamp: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc).date().isoformat()
    except (OverflowError, OSError, ValueError):  # somebody else's log
        return "at an unknown date"


def _examples(facts: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    if "kernel.cl" in files:
        return ["With pyopencl (`pip install pyopencl`):", _fill(_OPENCL, facts, "{}")]
    driver = ["With the CUDA driver alone (`pip install cuda-bindings`):", _fill(_DRIVER, facts, "{}")]
    if "kernel.so" not in files:
        return driver
    versions = facts["versions"]
    install = (
        f'`pip install "apache-tvm=={versions["apache-tvm"]}" "apache-tvm-ffi>=0.1.14.post0,<0.1.15" cuda-pathfinder '
        '"cuda-toolkit[cudart]>=13,<14"`'
    )
    dlpack = "A tensor of another library goes in without a copy through `tvm.runtime.from_dlpack`."
    return [
        f"With TVM ({install}):",
        _fill(_TVM, facts, "tvm.runtime.tensor({}, gpu)"),
        dlpack,
        *driver,
    ]


def _fill(example: str, facts: Mapping[str, Any], wrap: str) -> str:
    """An example for this kernel, in a fence; `wrap` takes an input from NumPy to where the example wants it."""
    *inputs, output = facts["arguments"]
    lines = [
        f"{argument['name']} = "
        + wrap.format(f'random.standard_normal({tuple(argument["shape"])}).astype("{argument["dtype"]}")')
        for argument in inputs
    ]
    text = example.format(
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        output_place=facts["parameters"].index(output["name"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in facts["arguments"]),
        parameters=", ".join(facts["parameters"]),
        function=facts["function"],
        grid=tuple(facts["grid"]),
        block=tuple(facts["block"]),
        work_items=tuple(grid * block for grid, block in zip(facts["grid"], facts["block"], strict=True)),
    )
    return f"```python\n{text}```"
