"""Texture objects over dense arrays in GPU memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tvmconv.arithmetic import round_up
from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.compiler.executable import ArrayType

# Values of cudaDevAttrTextureAlignment and cudaDevAttrTexturePitchAlignment on all devices so far.
BASE_ALIGNMENT_BYTES, ROW_ALIGNMENT_BYTES = 512, 32


@contextmanager
def create_texture(pointer: int, array: ArrayType, stream: int) -> Iterator[int]:
    """Yield the handle of a texture object over a float32 array, with the first axis as height, the others as width.

    Fetches return single elements at unnormalized coordinates, and zero outside. The object uses the array's memory if
    it meets the alignment of texture units, and otherwise a copy with padded rows, which is queued on the stream. Leave
    the block after all kernels that read it.
    """
    from cuda.bindings import runtime

    height, width = array.shape[0], math.prod(array.shape[1:])
    _check_size(width, height)
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
        handle = _create_texture_object(pointer, pitch_bytes, width, height)
        resources.callback(runtime.cudaDestroyTextureObject, handle)
        yield handle


def _check_size(width: int, height: int) -> None:
    """Raise DeviceError if a texture exceeds the limits of the current device."""
    from cuda.bindings import runtime

    device = check_cuda(runtime.cudaGetDevice())
    attributes = runtime.cudaDeviceAttr
    limits = (attributes.cudaDevAttrMaxTexture2DLinearWidth, attributes.cudaDevAttrMaxTexture2DLinearHeight)
    max_width, max_height = (check_cuda(runtime.cudaDeviceGetAttribute(limit, device)) for limit in limits)
    if width > max_width or height > max_height:
        raise DeviceError(
            f"a texture is at most {max_width} × {max_height} elements wide and high, not {width} × {height}"
        )


def _create_texture_object(pointer: int, pitch_bytes: int, width: int, height: int) -> int:
    from cuda.bindings import runtime

    resource_desc = runtime.cudaResourceDesc()
    resource_desc.resType = runtime.cudaResourceType.cudaResourceTypePitch2D
    image = resource_desc.res.pitch2D
    image.devPtr, image.pitchInBytes, image.width, image.height = pointer, pitch_bytes, width, height
    channel_kind = runtime.cudaChannelFormatKind.cudaChannelFormatKindFloat
    image.desc = check_cuda(runtime.cudaCreateChannelDesc(32, 0, 0, 0, channel_kind))
    texture_desc = runtime.cudaTextureDesc()
    texture_desc.addressMode = [runtime.cudaTextureAddressMode.cudaAddressModeBorder] * 3
    texture_desc.filterMode = runtime.cudaTextureFilterMode.cudaFilterModePoint
    texture_desc.readMode = runtime.cudaTextureReadMode.cudaReadModeElementType
    texture_desc.normalizedCoords = 0
    return int(check_cuda(runtime.cudaCreateTextureObject(resource_desc, texture_desc, None)))
