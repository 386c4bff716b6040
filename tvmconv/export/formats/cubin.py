"""Format `kernel.cubin`: machine code, with an example of a call through the CUDA driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.export.formats.base import ExportFormat, fill_example, format_dict_lines

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel

_EXAMPLE = """\
import numpy as np
from cuda.bindings import driver
{imports}

def check(result):
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.cuGetErrorName(status)[1].decode())
    return values[0] if values else None


def allocate(nbytes):
    return np.array([int(check(driver.cuMemAlloc(nbytes)))], "uint64")


def upload(array):
    address = allocate(array.nbytes)
    check(driver.cuMemcpyHtoD(int(address[0]), array.ctypes.data, array.nbytes))
    return address

{texture}{tensor_map}
random = np.random.default_rng(0)
{inputs}
{output} = np.empty({output_shape}, "{dtype}")

check(driver.cuInit(0))
gpu = check(driver.cuDeviceGet(0))
check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(gpu))))
with open("kernel.cubin", "rb") as cubin:
    module = check(driver.cuModuleLoadData(cubin.read()))
{constants}
memory = {{
{memory}
}}
{maps}steps = [  # function, grid, block, bytes of dynamic shared memory, parameters in order
{steps}
]
for name, grid, block, shared, parameters in steps:
    function = check(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, shared))
    addresses = np.array([memory[parameter].ctypes.data for parameter in parameters], "uint64")
    check(driver.cuLaunchKernel(function, *grid, *block, shared, 0, addresses.ctypes.data, 0))
check(driver.cuMemcpyDtoH({output}.ctypes.data, int(memory["{output}"][0]), {output}.nbytes))  # waits
print({output}.shape, np.linalg.norm({output}.astype("float64")))
"""
_TEXTURE = """
def texture(array):
    rows = array.reshape(len(array), -1)
    pitched = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 128)))  # aligns each row to 512 bytes
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
_TENSOR_MAP = """
def tensor_map(array, dtype, extents, strides, box, element_strides, swizzle, lower_corner, upper_corner):
    many, few = driver.cuuint64_t, driver.cuuint32_t
    kind = getattr(driver.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_" + dtype.upper())
    swizzled = f"{swizzle}B" if swizzle else "NONE"
    lies = kind, len(extents), int(array[0]), [many(n) for n in extents], [many(n) for n in strides]
    read = (
        [few(n) for n in element_strides],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_" + swizzled),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if lower_corner:  # pixels under a filter tap, channels × pixels per copy
        channels, pixels = (few(n) for n in box)
        corners = list(lower_corner), list(upper_corner)
        encoded = check(driver.cuTensorMapEncodeIm2col(*lies, *corners, channels, pixels, *read))
    else:
        encoded = check(driver.cuTensorMapEncodeTiled(*lies, [few(n) for n in box], *read))
    words = np.zeros(16 + 8, "uint64")
    start = -words.ctypes.data % 64 // 8  # aligned to 64 bytes
    words[start : start + 16] = [int(word) for word in encoded.opaque]
    return words[start : start + 16]

"""
_MAPS = """\
memory |= {{
{maps}
}}
"""
_CONSTANT = """
address = check(driver.cuModuleGetGlobal(module, b"{symbol}"))  # constant memory
check(driver.cuMemcpyHtoD(address, {name}.ctypes.data, {name}.nbytes))
"""


def write_file(kernel: Kernel, path: Path) -> None:
    """Write the machine code; raises `CompileError` if NVRTC rejects the kernel."""
    path.write_bytes(kernel.cubin.image)


def format_example(description: Mapping[str, Any]) -> list[str]:
    """Return the example of a call through the CUDA driver."""
    arguments = description["arguments"]
    memory = {
        argument["name"]: f"{'texture' if argument['space'] == 'texture' else 'upload'}({argument['name']})"
        for argument in arguments
        if not argument["symbol"]
    }
    memory |= {buffer["name"]: f"allocate({buffer['bytes']})" for buffer in description["workspace"]}
    steps, maps = [], {}
    for number, kernel in enumerate(description["kernels"]):
        parameters = list(kernel["parameters"])
        for tensor_map in kernel["tensor_maps"]:
            index = tensor_map["parameter"]
            values = ", ".join(f"{key}={value!r}" for key, value in tensor_map.items() if key != "parameter")
            maps[f"map{number}_{index}"] = f'tensor_map(memory["{parameters[index]}"], {values})'
            parameters[index] = f"map{number}_{index}"
        shape = tuple(kernel["grid"]), tuple(kernel["block"]), kernel["dynamic_shared_bytes"]
        steps.append((kernel["function"], *shape, parameters))
    text = fill_example(
        _EXAMPLE,
        description,
        memory=memory,
        steps=steps,
        constants="".join(_CONSTANT.format(**argument) for argument in arguments if argument["symbol"]),
        texture=_TEXTURE if any(argument["space"] == "texture" for argument in arguments) else "",
        tensor_map=_TENSOR_MAP if maps else "",
        maps=_MAPS.format(maps=format_dict_lines(maps)) if maps else "",
    )
    return ["With the CUDA driver alone (`pip install cuda-bindings`):", text]


FORMAT = ExportFormat(
    "kernel.cubin", "its machine code, as the CUDA driver loads it", ("cuda",), write_file, format_example, order=1
)
