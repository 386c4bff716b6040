"""Examples of the call of an exported kernel, each complete: with TVM, with the CUDA driver alone, with pyopencl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

{texture}
random = np.random.default_rng(0)
{inputs}
{output} = np.empty({output_shape}, "{dtype}")

check(driver.cuInit(0))
gpu = check(driver.cuDeviceGet(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu))))
with open("kernel.cubin", "rb") as cubin:
    module = check(driver.cuModuleLoadData(cubin.read()))
function = check(driver.cuModuleGetFunction(module, b"{function}"))
{constants}
parameters = [{brought}]  # in the device function's own order
addresses = np.array([parameter.ctypes.data for parameter in parameters], "uint64")
grid, block = {grid}, {block}
check(driver.cuLaunchKernel(function, *grid, *block, 0, 0, addresses.ctypes.data, 0))
check(driver.cuMemcpyDtoH({output}.ctypes.data, int(parameters[{output_place}][0]), {output}.nbytes))  # waits
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""
_TEXTURE = """
def texture(array):
    rows = array.reshape(len(array), -1)
    pitched = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 128)))  # each row begins at a multiple of 512 bytes
    resource, reading = driver.CUDA_RESOURCE_DESC(), driver.CUDA_TEXTURE_DESC()
    resource.resType = driver.CUresourcetype.CU_RESOURCE_TYPE_PITCH2D
    image = resource.res.pitch2D
    image.devPtr, image.pitchInBytes = int(upload(pitched)[0]), pitched.strides[0]
    image.width, image.height = rows.shape[1], rows.shape[0]
    image.format, image.numChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
    reading.addressMode = [driver.CUaddress_mode.CU_TR_ADDRESS_MODE_BORDER] * 3  # zero outside
    reading.filterMode = driver.CUfilter_mode.CU_TR_FILTER_MODE_POINT  # single elements
    return np.array([int(check(driver.cuTexObjectCreate(resource, reading, None)))], "uint64")

"""

_CONSTANT = """
address = check(driver.cuModuleGetGlobal(module, b"{symbol}"))  # constant memory
check(driver.cuMemcpyHtoD(address, {name}.ctypes.data, {name}.nbytes))
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


def examples(facts: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """The examples that these files allow, each in a fence and after what it needs.

    Args:
        facts: as `kernel.json` has them.
        files: names of the files that were written.
    """
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
    spaces = {argument["name"]: argument["space"] for argument in facts["arguments"]}
    text = example.format(
        inputs="\n".join(lines),
        output=output["name"],
        output_shape=tuple(output["shape"]),
        output_place=facts["parameters"].index(output["name"]),
        dtype=output["dtype"],
        arguments=", ".join(argument["name"] for argument in facts["arguments"]),
        parameters=", ".join(facts["parameters"]),
        brought=", ".join(_brought(spaces[name], name) for name in facts["parameters"]),
        constants="".join(_CONSTANT.format(**a) for a in facts["arguments"] if a["symbol"]),
        texture=_TEXTURE if "texture" in spaces.values() else "",
        function=facts["function"],
        grid=tuple(facts["grid"]),
        block=tuple(facts["block"]),
        work_items=tuple(grid * block for grid, block in zip(facts["grid"], facts["block"], strict=True)),
    )
    return f"```python\n{text}```"


def _brought(space: str, name: str) -> str:
    """How the driver's example brings an argument to the GPU."""
    return f"texture({name})" if space == "texture" else f"upload({name})"
