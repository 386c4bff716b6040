"""Launchers of executables for the operator: through the CUDA driver on NVIDIA GPUs, through OpenCL on the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from tvmconv.baselines.torch_calls import to_tensor
from tvmconv.compiler.executable import CompiledKernel, Executable
from tvmconv.devices import Device, cuda
from tvmconv.devices.cuda.function import CudaFunction, PackedParams, encode_tensor_map
from tvmconv.devices.cuda.graphs import check_cuda
from tvmconv.devices.cuda.loaded_kernel import translate_errors
from tvmconv.errors import DeviceError
from tvmconv.torch import operator
from tvmconv.torch.signature import SLOPE_OP, ConvSignature
from tvmconv.workloads.dtypes import FLOAT8_DTYPES
from tvmconv.workloads.epilogue import STATS
from tvmconv.workloads.layout import CHANNELS_LAST

MAX_TENSOR_MAPS = 64  # cached tensor maps per kernel, by the address of their arrays


def make_launcher(
    signature: ConvSignature, program: Executable, device: Device, torch_device: torch.device
) -> operator.Launcher:
    """Return a launcher of an executable on tvmconv's device, for tensors on the same GPU, or on the CPU for OpenCL.

    Raises DeviceError if the executable cannot be loaded, or reads constant memory or a texture, which tensors of
    PyTorch cannot be.
    """
    if any(kernel.constants or kernel.textures for kernel in program.kernels):
        raise DeviceError(
            f"{signature.workload.text}: its kernel reads constant memory or a texture: expected global memory only"
        )
    if torch_device.type == "cuda":
        return CudaLauncher(signature, program, device, torch_device)
    return OpenclLauncher(signature, program, device)


class OpenclLauncher:
    """A launcher on an OpenCL device for tensors on the CPU."""

    def __init__(self, signature: ConvSignature, program: Executable, device: Device) -> None:
        self._signature, self.program, self.device = signature, program, device
        self._loaded = device.load(program)
        self._epilogue_order = signature.workload.argument_names[2:-1]

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        add: torch.Tensor | None,
        slope: torch.Tensor | None = None,
        quantization: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run the executable on tensors in the signature's layouts and return the output.

        `quantization` are the arguments of the operations of `QUANTIZATION_OPS`.
        """
        tensors: dict[str, Any] = {"bias": bias, "add": add, SLOPE_OP: slope, **(quantization or {})}
        signature = self._signature
        arrays = [self._to_array(tensor, signature.input_layout) for tensor in (x, weight)]
        arrays += [self._to_array(tensors[name], signature.output_layout) for name in self._epilogue_order]
        result = to_tensor(self._loaded.run(arrays))
        if self._signature.output_layout == CHANNELS_LAST:
            result = result.movedim(-1, 1)  # to the axes N, C and space
        return self._signature.allocate_output(x.device).copy_(result)

    def _to_array(self, tensor: torch.Tensor, layout: str) -> np.ndarray:
        """Return a tensor as an array whose axes are in memory order; the tensor's memory can still be resized."""
        if tensor.dim() > 1 and layout == CHANNELS_LAST:
            tensor = tensor.movedim(1, -1)
        tensor = tensor.detach().contiguous()
        name = str(tensor.dtype).removeprefix("torch.")
        if name == "bfloat16" or name in FLOAT8_DTYPES:
            bits = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}"))
            return np.from_dlpack(bits).view(getattr(ml_dtypes, name))
        return np.from_dlpack(tensor)


class CudaLauncher:
    """A launcher on an NVIDIA GPU, on PyTorch's current stream and in memory that PyTorch allocates.

    A launch has read its parameters when it returns. Several threads may launch at once, so each takes parameters of
    its own.
    """

    def __init__(self, signature: ConvSignature, program: Executable, device: Any, torch_device: torch.device) -> None:
        self._signature, self.program, self.device = signature, program, device
        self._torch_device, self._index = torch_device, int(device.index)
        self._workspace_bytes = [array.nbytes for array in program.workspace]
        num_arrays = len(program.arrays)
        prepack_arguments = {i for kernel in program.kernels[: program.num_prepack_kernels] for i in kernel.arguments}
        self._packed_workspaces = sorted(i - num_arrays for i in prepack_arguments if i >= num_arrays)
        self._epilogue_order = signature.workload.argument_names[2:-1]
        torch.cuda.init()
        with torch.cuda.device(torch_device), translate_errors(device):
            self._functions = [_LoadedFunction(kernel) for kernel in program.kernels]

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        add: torch.Tensor | None,
        slope: torch.Tensor | None = None,
        stats: torch.Tensor | None = None,
        quantization: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Queue the kernels on tensors in the signature's layouts and return the output.

        The kernels write the statistics of the output to `stats`, if their workload has them. `quantization` are the
        arguments of the operations of `QUANTIZATION_OPS`.
        """
        output = self._signature.allocate_output(self._torch_device)
        packed = self._pack_weight(weight) if self._packed_workspaces else {}
        # PyTorch frees this memory when the function returns; its next user is queued after these launches.
        workspaces = [
            packed[workspace_index] if workspace_index in packed else self._allocate(nbytes)
            for workspace_index, nbytes in enumerate(self._workspace_bytes)
        ]
        pointers = [x.data_ptr(), weight.data_ptr()]
        tensors: dict[str, Any] = {"bias": bias, "add": add, SLOPE_OP: slope, STATS: stats, **(quantization or {})}
        pointers += [tensors[name].data_ptr() for name in self._epilogue_order]
        pointers.append(output.data_ptr())
        pointers += [tensor.data_ptr() for tensor in workspaces]
        functions = self._functions[self.program.num_prepack_kernels :] if packed else self._functions
        if torch.cuda.current_device() == self._index:
            self._enqueue(functions, pointers)
        else:
            with torch.cuda.device(self._index):
                self._enqueue(functions, pointers)
        return output

    def _enqueue(self, functions: Sequence[_LoadedFunction], pointers: Sequence[int]) -> None:
        make_context_current(self._index)
        stream = get_current_stream(self._index)
        for function in functions:
            function.enqueue(pointers, stream)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._torch_device)

    def _pack_weight(self, weight: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """Return the workspaces that the prepack kernels fill from a weight, by index.

        They are filled once, and again in the same memory when the weight is written to. The result is empty for a
        weight whose lifetime is unknown.
        """
        weight_cache = operator.packed_weight_cache(weight)
        if weight_cache is None:
            return {}
        version, packed = weight_cache.get(self, (None, {}))
        if version == weight._version:
            return packed
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return {}  # a captured kernel runs at each replay, but not now
            packed = packed or {
                workspace_index: self._allocate(self._workspace_bytes[workspace_index])
                for workspace_index in self._packed_workspaces
            }
            num_arrays = len(self.program.arrays)
            pointers = [0] * (num_arrays + len(self._workspace_bytes))
            pointers[1] = weight.data_ptr()
            for workspace_index, tensor in packed.items():
                pointers[num_arrays + workspace_index] = tensor.data_ptr()
            self._enqueue(self._functions[: self.program.num_prepack_kernels], pointers)
            torch.cuda.current_stream().synchronize()  # other streams will read the workspaces
        weight_cache[self] = weight._version, packed
        return packed


_thread_contexts = threading.local()  # of each thread, the devices that have a current context


def make_context_current(index: int) -> None:
    """Make the context of the current device current in this thread, if this is its first launch.

    Launches by the driver need it. PyTorch's autograd threads have a device, but no context before their first call of
    the runtime, which a kernel of ours may precede.
    """
    indices = _thread_contexts.__dict__.setdefault("indices", set())
    if index not in indices:
        check_cuda(cuda.runtime.cudaSetDevice(index))
        indices.add(index)


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# PyTorch's generated code uses this function, which takes a fifth of the time.
get_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


class _LoadedFunction:
    """A loaded kernel function with reusable sets of parameters."""

    def __init__(self, kernel: CompiledKernel) -> None:
        self._function = CudaFunction(kernel.code, kernel.name, kernel.dynamic_shared_bytes)
        self._launch_shape = kernel.launch
        self._tensor_maps = dict(kernel.tensor_maps)
        self._arguments = kernel.arguments
        self._free_params: list[PackedParams] = []
        self._overlaps = kernel.uses_pdl  # the kernel itself waits for the end of its predecessor on the stream
        self._stream_launchers: dict[int, Callable[[PackedParams], None]] = {}  # by stream handle
        self._encode_map = functools.lru_cache(MAX_TENSOR_MAPS)(
            lambda parameter_index, pointer: encode_tensor_map(self._tensor_maps[parameter_index], pointer)
        )

    def enqueue(self, pointers: Sequence[int], stream: int) -> None:
        """Queue one launch on arrays at these addresses."""
        try:
            params = self._free_params.pop()
        except IndexError:
            params = PackedParams(len(self._arguments))
        for parameter_index, pointer_index in enumerate(self._arguments):
            pointer = pointers[pointer_index]
            is_map = parameter_index in self._tensor_maps
            params.set_param(parameter_index, self._encode_map(parameter_index, pointer) if is_map else pointer)
        launch_on_stream = self._stream_launchers.get(stream)
        if launch_on_stream is None:
            launch_on_stream = self._stream_launchers[stream] = self._function.make_launcher(
                self._launch_shape, stream, use_pdl=self._overlaps
            )
        launch_on_stream(params)
        self._free_params.append(params)
