"""Texture objects over dense arrays in GPU memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvmconv.arithmetic import round_up
from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from tvmconv.compiler.executable import ArrayType

# Values of cudaDevAttrTextureAlignment and cudaDevAttrTexturePitchAlignment on all devices so far.
BASE_ALIGNMENT_BYTES, ROW_ALIGNMENT_BYTES = 512, 32


class TextureObject:
    """A texture object over a float32 array, with the first axis as height and all others as width.

    Fetches return single elements at unnormalized coordinates, and zero outside. The object uses the array's memory if
    it meets the alignment of texture units, and otherwise a copy with padded rows, on the current device.
    """

    def __init__(self, pointer: int, array: ArrayType, stream: int) -> None:
        """Create the object, and queue a copy of the array on the stream if the alignment requires one."""
        from cuda.bindings import runtime

        height, width = array.shape[0], math.prod(array.shape[1:])
        _check_size(width, height)
        pitch_bytes = row_bytes = array.nbytes // height
        self._copy: int | None = None
        if pointer % BASE_ALIGNMENT_BYTES or row_bytes % ROW_ALIGNMENT_BYTES:
            pitch_bytes = round_up(row_bytes, BASE_ALIGNMENT_BYTES)
            self._copy = int(check_cuda(runtime.cudaMalloc(height * pitch_bytes)))
        try:
            if self._copy is not None:
                target = self._copy, pitch_bytes
                kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
                check_cuda(runtime.cudaMemcpy2DAsync(*target, pointer, row_bytes, row_bytes, height, kind, stream))
            self.handle = _create_texture_object(self._copy or pointer, pitch_bytes, width, height)
        except DeviceError:
            self._free_copy()
            raise

    def __enter__(self) -> TextureObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the object and its copy, after all kernels that read them."""
        from cuda.bindings import runtime

        runtime.cudaDestroyTextureObject(self.handle)
        self._free_copy()

    def _free_copy(self) -> None:
        from cuda.bindings import runtime

        if self._copy is not None:
            runtime.cudaFree(self._copy)
            self._copy = None


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
