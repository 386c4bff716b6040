"""Kernel functions of a cubin, and their parameters: addresses, tensor maps and texture objects."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tvmconv.arithmetic import round_up
from tvmconv.compiler.executable import ArrayType, LaunchConfig
from tvmconv.devices import cuda
from tvmconv.devices.cuda.graphs import check_cuda, query_attribute
from tvmconv.errors import DeviceError
from tvmconv.tensor_map import MAP_ALIGNMENT_BYTES, MAP_BYTES, TensorMap

ParameterValue = int | Sequence[int]  # a 64-bit value such as an address, or the words of a tensor map
_Slot = ctypes.c_uint64 * (MAP_BYTES // 8)
_SWIZZLE_NAMES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}

# Values of cudaDevAttrTextureAlignment and cudaDevAttrTexturePitchAlignment on all devices so far.
BASE_ALIGNMENT_BYTES, ROW_ALIGNMENT_BYTES = 512, 32


class CudaFunction:
    """A kernel function of a cubin on the current device, which is unloaded with this object.

    `dynamic_shared_bytes`: dynamic shared memory per block of every launch.
    """

    def __init__(self, cubin: bytes, name: str, dynamic_shared_bytes: int = 0) -> None:
        library = check_cuda(cuda.driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        weakref.finalize(self, cuda.driver.cuLibraryUnload, library)
        self._library = library
        kernel = check_cuda(cuda.driver.cuLibraryGetKernel(library, name.encode()))
        # This call loads the function, which is not allowed during a graph capture.
        self._function = check_cuda(cuda.driver.cuKernelGetFunction(kernel))
        self._dynamic_shared_bytes = dynamic_shared_bytes
        if dynamic_shared_bytes:  # required beyond 48 KiB of static and dynamic memory
            attribute = cuda.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check_cuda(cuda.driver.cuFuncSetAttribute(self._function, attribute, dynamic_shared_bytes))

    def copy_to_symbol(self, symbol: str, pointer: int, nbytes: int, stream: int) -> None:
        """Queue the copy of an array to a `__constant__` symbol of the cubin."""
        address = check_cuda(cuda.driver.cuLibraryGetGlobal(self._library, symbol.encode()))  # (address, size)
        kind = cuda.runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        check_cuda(cuda.runtime.cudaMemcpyAsync(int(address), pointer, nbytes, kind, stream))

    def launch(self, shape: LaunchConfig, parameters: Sequence[ParameterValue], stream: int) -> None:
        """Queue one launch; see `prepare_launch`."""
        self.prepare_launch(shape, parameters, stream)()

    def prepare_launch(
        self, shape: LaunchConfig, parameters: Sequence[ParameterValue], stream: int, *, use_pdl: bool = False
    ) -> Callable[[], None]:
        """Return a function that queues a launch on each call.

        `use_pdl`: allow the kernel to begin before its predecessor on the stream has ended; the kernel waits for it by
            itself. Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization".
        """
        params = PackedParams(len(parameters))
        for index, parameter in enumerate(parameters):
            params.set_param(index, parameter)
        launch = self.make_launcher(shape, stream, use_pdl=use_pdl)
        return lambda: launch(params)

    def make_launcher(
        self, shape: LaunchConfig, stream: int, *, use_pdl: bool = False
    ) -> Callable[[PackedParams], None]:
        """Return a function that queues a launch with given parameters, which are copied before it returns.

        The arguments are those of `prepare_launch`.
        """
        driver = cuda.driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
        config.sharedMemBytes, config.hStream = self._dynamic_shared_bytes, stream
        if use_pdl:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        launch_kernel, success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS

        def queue_launch(parameters: PackedParams) -> None:
            result = launch_kernel(config, self._function, parameters.address, 0)  # `self` keeps the function loaded
            if result[0] != success:
                check_cuda(result)

        return queue_launch


class PackedParams:
    """Launch parameters in memory, with the array of their addresses that the driver reads."""

    def __init__(self, num_params: int) -> None:
        memory = ctypes.create_string_buffer(MAP_ALIGNMENT_BYTES + MAP_BYTES * num_params)
        offset = -ctypes.addressof(memory) % MAP_ALIGNMENT_BYTES
        # The slots keep `memory` alive.
        self._slots = [_Slot.from_buffer(memory, offset + MAP_BYTES * index) for index in range(num_params)]
        self._addresses = (ctypes.c_uint64 * num_params)(*map(ctypes.addressof, self._slots))
        self.address = ctypes.addressof(self._addresses)

    def set_param(self, index: int, parameter: ParameterValue) -> None:
        """Set the value of a parameter."""
        if isinstance(parameter, int):
            self._slots[index][0] = parameter
        else:
            self._slots[index][: len(parameter)] = list(parameter)


def encode_tensor_map(tensor_map: TensorMap, pointer: int) -> tuple[int, ...]:
    """Return a `CUtensorMap` as 64-bit words; copies read zeros outside the array.

    `pointer`: address of the array, a multiple of 16 bytes.
    """
    driver = cuda.driver
    box, element_strides = (list(map(driver.cuuint32_t, n)) for n in (tensor_map.box, tensor_map.element_strides))
    extents, strides = (list(map(driver.cuuint64_t, n)) for n in (tensor_map.extents, tensor_map.strides))
    encode, copied = driver.cuTensorMapEncodeTiled, [box]
    if tensor_map.is_im2col:
        encode = driver.cuTensorMapEncodeIm2col
        copied = [list(tensor_map.lower_corner), list(tensor_map.upper_corner), *box]
    result = encode(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{tensor_map.dtype.upper()}"),
        len(extents),
        pointer,
        extents,
        strides,
        *copied,
        element_strides,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE_NAMES[tensor_map.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    try:
        return tuple(int(word) for word in check_cuda(result).opaque)
    except DeviceError as error:
        raise DeviceError(f"{error}: {tensor_map}, over an array at {pointer:#x}") from error


@contextmanager
def create_texture(pointer: int, array: ArrayType, stream: int) -> Iterator[int]:
    """Yield the handle of a texture object over a float32 array, with the first axis as height, the others as width.

    Fetches return single elements at unnormalized coordinates, and zero outside. The object uses the array's memory if
    it meets the alignment of texture units, and otherwise a copy with padded rows, which is queued on the stream. Leave
    the block after all kernels that read it.
    """
    runtime = cuda.runtime
    height, width = array.shape[0], math.prod(array.shape[1:])
    device = check_cuda(runtime.cudaGetDevice())
    max_width, max_height = (query_attribute(f"MaxTexture2DLinear{side}", device) for side in ("Width", "Height"))
    if width > max_width or height > max_height:
        raise DeviceError(
            f"a texture is at most {max_width} × {max_height} elements wide and high, not {width} × {height}"
        )
    pitch_bytes = row_bytes = array.nbytes // height
    with ExitStack() as resources:
        if pointer % BASE_ALIGNMENT_BYTES or row_bytes % ROW_ALIGNMENT_BYTES:
            pitch_bytes = round_up(row_bytes, BASE_ALIGNMENT_BYTES)
            target = int(check_cuda(runtime.cudaMalloc(height * pitch_bytes)))
            resources.callback(runtime.cudaFree, target)
            kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
            copy = target, pitch_bytes, pointer, row_bytes, row_bytes, height, kind, stream
            check_cuda(runtime.cudaMemcpy2DAsync(*copy))
            pointer = target
        resource_desc, texture_desc = runtime.cudaResourceDesc(), runtime.cudaTextureDesc()
        resource_desc.resType = runtime.cudaResourceType.cudaResourceTypePitch2D
        image = resource_desc.res.pitch2D
        image.devPtr, image.pitchInBytes, image.width, image.height = pointer, pitch_bytes, width, height
        channel_kind = runtime.cudaChannelFormatKind.cudaChannelFormatKindFloat
        image.desc = check_cuda(runtime.cudaCreateChannelDesc(32, 0, 0, 0, channel_kind))
        texture_desc.addressMode = [runtime.cudaTextureAddressMode.cudaAddressModeBorder] * 3
        texture_desc.filterMode = runtime.cudaTextureFilterMode.cudaFilterModePoint
        texture_desc.readMode = runtime.cudaTextureReadMode.cudaReadModeElementType
        texture_desc.normalizedCoords = 0
        handle = int(check_cuda(runtime.cudaCreateTextureObject(resource_desc, texture_desc, None)))
        resources.callback(runtime.cudaDestroyTextureObject, handle)
        yield handle
