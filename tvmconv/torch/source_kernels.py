"""Kernels of PyTorch operators that are written as CUDA source: their compilation, and launches on tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

import torch

from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices.cuda.function import CudaFunction, PackedParams
from tvmconv.torch.launch import get_current_stream, make_context_current

VECTOR_BYTES = 16  # largest access of a thread
MIN_PDL_CAPABILITY = (9, 0)  # of GPUs on which a kernel starts while the previous one ends
MAX_LAUNCHERS = 256  # kept launchers of a source, by kernel, launch shape and stream


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
            self._index = torch.cuda.current_device()
            make_context_current(self._index)
            self._functions = {name: CudaFunction(cubin.image, name) for name in cubin.kernels}
        self._uses_pdl = capability >= MIN_PDL_CAPABILITY
        self._launchers: dict[tuple[str, LaunchConfig, int], Callable[[PackedParams], None]] = {}
        self._free_params: dict[str, list[PackedParams]] = {name: [] for name in self._functions}

    def launch(self, name: str, shape: LaunchConfig, parameters: Sequence[torch.Tensor | int | float | None]) -> None:
        """Queue a kernel on the current stream."""
        if torch.cuda.current_device() == self._index:
            self._enqueue(name, shape, parameters)
        else:
            with torch.cuda.device(self._device):
                self._enqueue(name, shape, parameters)

    def _enqueue(self, name: str, shape: LaunchConfig, parameters: Sequence[torch.Tensor | int | float | None]) -> None:
        """Queue a kernel of the current device; launchers and memory of parameters are kept for further calls."""
        make_context_current(self._index)
        stream = get_current_stream(self._index)
        try:
            params = self._free_params[name].pop()
        except IndexError:
            params = PackedParams(len(parameters))
        for index, parameter in enumerate(parameters):
            params.set_param(index, _encode(parameter))
        launch = self._launchers.get((name, shape, stream))
        if launch is None:
            if len(self._launchers) >= MAX_LAUNCHERS:
                self._launchers.clear()
            launch = self._functions[name].make_launcher(shape, stream, use_pdl=self._uses_pdl)
            self._launchers[name, shape, stream] = launch
        launch(params)
        self._free_params[name].append(params)


def count_vector_elements(num_elements: int, *tensors: torch.Tensor | None) -> int:
    """Return the number of neighbouring elements that a thread accesses at once in all tensors.

    It divides a number of elements. Accesses are aligned, and have up to 16 bytes of the tensor with the smallest data
    type.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    vector = math.gcd(num_elements, VECTOR_BYTES // min(tensor.element_size() for tensor in present))
    while any(tensor.data_ptr() % min(VECTOR_BYTES, vector * tensor.element_size()) for tensor in present):
        vector //= 2
    return vector


def _encode(parameter: torch.Tensor | int | float | None) -> int:
    """Return the bits of a parameter: an address, an integer or a float32 number."""
    if isinstance(parameter, torch.Tensor):
        return parameter.data_ptr()
    if isinstance(parameter, float):
        return int.from_bytes(struct.pack("<f", parameter), "little")
    return parameter or 0
