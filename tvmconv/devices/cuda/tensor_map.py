"""Tensor maps as a kernel takes them, encoded by CUDA's driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvmconv.devices.cuda.graphs import check
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.tensor_map import TensorMap

_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


def encode(told: TensorMap, pointer: int) -> tuple[int, ...]:
    """The structure's words of 64 bits.

    Nothing is read through the map outside the array but zeros.

    Args:
        told: the map.
        pointer: where its array lies: at a multiple of 16 bytes.

    Raises:
        DeviceError: the driver does not take it.
    """
    from cuda.bindings import driver

    function = driver.cuTensorMapEncodeIm2col if told.is_im2col else driver.cuTensorMapEncodeTiled
    try:
        return tuple(int(word) for word in check(function(*_arguments(driver, told, pointer))).opaque)
    except DeviceError as error:
        raise DeviceError(f"{error}: {told}, over an array at {pointer:#x}") from error


def _arguments(driver: Any, told: TensorMap, pointer: int) -> tuple[Any, ...]:
    """What the driver's function for such a map is called with."""

    def longs(numbers: tuple[int, ...]) -> list[Any]:
        return [driver.cuuint64_t(number) for number in numbers]

    def ints(numbers: tuple[int, ...]) -> list[Any]:
        return [driver.cuuint32_t(number) for number in numbers]

    taken = (list(told.lower), list(told.upper), *ints(told.box)) if told.is_im2col else (ints(told.box),)
    return (
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{told.dtype.upper()}"),
        len(told.extents),
        pointer,
        longs(told.extents),
        longs(told.strides),
        *taken,
        ints(told.steps),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[told.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
