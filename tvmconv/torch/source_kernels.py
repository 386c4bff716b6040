"""Kernels of PyTorch operators that are written as CUDA source: their compilation, and launches on tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices.cuda.function import CudaFunction
from tvmconv.torch.launch import make_context_current

VECTOR_BYTES = 16  # largest access of a thread
MIN_PDL_CAPABILITY = (9, 0)  # of GPUs on which a kernel starts while the previous one ends


class SourceKernels:
    """The loaded kernels of one source.

    Args:
        source: CUDA source. It must not be loaded during a graph capture.
        device: PyTorch's device.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        self._device = device
        capability = torch.cuda.get_device_capability(device)
        cubin = nvrtc.compile_cubin(source, "sm_{}{}".format(*capability))
        with torch.cuda.device(device):
            make_context_current(torch.cuda.current_device())
            self._functions = {name: CudaFunction(cubin.image, name) for name in cubin.kernels}
        self._uses_pdl = capability >= MIN_PDL_CAPABILITY

    def launch(self, name: str, shape: LaunchConfig, parameters: Sequence[torch.Tensor | int | float | None]) -> None:
        """Queue a kernel on the current stream."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            make_context_current(torch.cuda.current_device())
            values = [_encode(parameter) for parameter in parameters]
            self._functions[name].prepare_launch(shape, values, stream, use_pdl=self._uses_pdl)()


def count_vector_elements(num_elements: int, *tensors: torch.Tensor | None) -> int:
    """Return the elements of the largest access that divides a number of them and suits the addresses of all tensors.

    The tensors have one data type.
    """
    found = [tensor for tensor in tensors if tensor is not None]
    itemsize = found[0].element_size()
    nbytes = math.gcd(VECTOR_BYTES, num_elements * itemsize, *(tensor.data_ptr() for tensor in found))
    return max(1, nbytes // itemsize)


def _encode(parameter: torch.Tensor | int | float | None) -> int:
    """Return the bits of a parameter: an address, an integer or a float32 number."""
    if isinstance(parameter, torch.Tensor):
        return parameter.data_ptr()
    if isinstance(parameter, float):
        return int.from_bytes(struct.pack("<f", parameter), "little")
    return parameter or 0
