"""Encoding of tensor maps by the CUDA driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.tensor_map import TensorMap

_SWIZZLE_NAMES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def encode_tensor_map(tensor_map: TensorMap, pointer: int) -> tuple[int, ...]:
    """Return a `CUtensorMap` as 64-bit words; copies read zeros outside the array.

    `pointer`: address of the array, a multiple of 16 bytes.
    """
    from cuda.bindings import driver

    function = driver.cuTensorMapEncodeIm2col if tensor_map.is_im2col else driver.cuTensorMapEncodeTiled
    try:
        encoded = check_cuda(function(*_make_driver_arguments(driver, tensor_map, pointer)))
        return tuple(int(word) for word in encoded.opaque)
    except DeviceError as error:
        raise DeviceError(f"{error}: {tensor_map}, over an array at {pointer:#x}") from error


def _make_driver_arguments(driver: Any, tensor_map: TensorMap, pointer: int) -> tuple[Any, ...]:
    """Return the arguments of cuTensorMapEncodeTiled or cuTensorMapEncodeIm2col."""

    def to_uint64s(numbers: tuple[int, ...]) -> list[Any]:
        return [driver.cuuint64_t(number) for number in numbers]

    def to_uint32s(numbers: tuple[int, ...]) -> list[Any]:
        return [driver.cuuint32_t(number) for number in numbers]

    box_arguments = (
        (list(tensor_map.lower_corner), list(tensor_map.upper_corner), *to_uint32s(tensor_map.box))
        if tensor_map.is_im2col
        else (to_uint32s(tensor_map.box),)
    )
    return (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{tensor_map.dtype.upper()}"),
        len(tensor_map.extents),
        pointer,
        to_uint64s(tensor_map.extents),
        to_uint64s(tensor_map.strides),
        *box_arguments,
        to_uint32s(tensor_map.element_strides),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE_NAMES[tensor_map.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
