"""Programs as launchers of the operator: on NVIDIA GPUs by CUDA's driver, on the CPU through OpenCL."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from tvmconv.devices.cuda.function import Function, Laid
from tvmconv.devices.cuda.kernel import border
from tvmconv.devices.cuda.tensor_map import encode
from tvmconv.errors import DeviceError
from tvmconv.torch import operator
from tvmconv.torch.form import Form

if TYPE_CHECKING:
    from tvmconv.compiler.program import Program, Step
    from tvmconv.devices import Device

MOST_MAPS = 64  # tensor maps that are kept, by the address of their arrays


def launcher_of(form: Form, program: Program, device: Device, place: torch.device) -> operator.Launcher:
    """What runs a program.

    Args:
        form: of the workload's tensors.
        program: of the workload, for the device.
        device: ours.
        place: PyTorch's for its tensors: the same GPU, or the CPU for a device of OpenCL.

    Raises:
        DeviceError: it does not load, or takes what tensors of PyTorch cannot be: constant memory or a texture.
    """
    if any(step.constants or step.textures for step in program.steps):
        raise DeviceError(
            f"{form.workload.text}: its kernel reads constant memory or a texture, which PyTorch has none of"
        )
    if place.type == "cuda":
        return CudaLauncher(form, program, device, place)
    return HostLauncher(form, program, device)


class HostLauncher:
    """Runs a program on a device of OpenCL, for tensors of the CPU."""

    def __init__(self, form: Form, program: Program, device: Device) -> None:
        self._form, self.program, self.device = form, program, device
        self._loaded = device.load(program)
        self._order = tuple(name for name in form.workload.argument_names[2:-1])

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
    ) -> torch.Tensor:
        """Run it; the tensors lie as the form says."""
        others = {"bias": bias, "add": add}
        given = [x, weight, *(others[name] for name in self._order)]
        result = self._loaded.run([self._array(tensor) for tensor in given if tensor is not None])
        output = self._form.output(x.device)
        output.copy_(self._tensor(result))
        return output

    def _array(self, tensor: torch.Tensor) -> np.ndarray:
        """A tensor's memory, as an array of the axes in the order in which they lie."""
        if tensor.dim() > 1 and self._form.memory_format is not torch.contiguous_format:
            tensor = tensor.movedim(1, -1)
        tensor = tensor.detach().contiguous()
        if tensor.dtype is torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """An array as a tensor of N, C and space."""
        if array.dtype == ml_dtypes.bfloat16:
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor if self._form.memory_format is torch.contiguous_format else tensor.movedim(-1, 1)


class CudaLauncher:
    """Runs a program on an NVIDIA GPU: on PyTorch's current stream, in memory of PyTorch's.

    A launch reads its parameters before it returns, but another thread may be in one, too: each takes a set of its own.
    """

    def __init__(self, form: Form, program: Program, device: Any, place: torch.device) -> None:
        self._form, self.program, self.device = form, program, device
        self._place, self._index = place, int(device.index)
        self._scratch = [array.nbytes for array in program.scratch]
        arrays, first = len(program.arrays), program.steps[: program.prepared]
        self._of_weight = sorted({i - arrays for step in first for i in step.arguments if i >= arrays})
        self._order = tuple(name for name in form.workload.argument_names[2:-1])
        torch.cuda.init()
        with torch.cuda.device(place), border(device):
            self._steps = [_Step(step) for step in program.steps]

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add: torch.Tensor | None
    ) -> torch.Tensor:
        """Queue it; the tensors lie as the form says."""
        output = self._form.output(self._place)
        made = self._prepared(weight) if self._of_weight else {}
        # PyTorch has it back when this returns: who takes the memory next, queues behind these launches.
        scratch = [made[i] if i in made else self._fresh(nbytes) for i, nbytes in enumerate(self._scratch)]
        pointers = [x.data_ptr(), weight.data_ptr()]
        pointers += [(bias if name == "bias" else add).data_ptr() for name in self._order]  # type: ignore[union-attr]
        pointers.append(output.data_ptr())
        pointers += [tensor.data_ptr() for tensor in scratch]
        steps = self._steps[self.program.prepared :] if made else self._steps
        if torch.cuda.current_device() == self._index:
            self._queue(steps, pointers)
        else:
            with torch.cuda.device(self._index):
                self._queue(steps, pointers)
        return output

    def _queue(self, steps: Sequence[_Step], pointers: Sequence[int]) -> None:
        stream = _stream(self._index)
        for step in steps:
            step.launch(pointers, stream)

    def _fresh(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._place)

    def _prepared(self, weight: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """The scratch memory that the first steps have filled from a weight, once, by its number.

        It is made anew, in the same memory, when the weight was written to. Of a weight that may end without a word
        there is none.
        """
        kept = operator.kept(weight)
        if kept is None:
            return {}
        version, made = kept.get(self, (None, {}))
        if version == weight._version:
            return made
        with torch.cuda.device(self._index):
            if torch.cuda.is_current_stream_capturing():
                return {}  # a graph of these steps makes it with every replay, but not now
            made = made or {i: self._fresh(self._scratch[i]) for i in self._of_weight}
            arrays = len(self.program.arrays)
            pointers = [0] * (arrays + len(self._scratch))
            pointers[1] = weight.data_ptr()
            for i, tensor in made.items():
                pointers[arrays + i] = tensor.data_ptr()
            self._queue(self._steps[: self.program.prepared], pointers)
            torch.cuda.current_stream().synchronize()  # other streams will read it
        kept[self] = weight._version, made
        return made


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


# PyTorch's own generated code asks for its stream so, in a fifth of the time.
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)


class _Step:
    """A kernel function, and sets of parameters for it."""

    def __init__(self, step: Step) -> None:
        self._function = Function(step.code, step.name, step.dynamic_shared_bytes)
        self._shape = step.launch
        self._maps = dict(step.tensor_maps)
        self._arguments = step.arguments
        self._free: list[Laid] = []
        self._overlaps = step.overlaps  # with whatever is before it on the stream: it waits for its end by itself
        self._queues: dict[int, Callable[[Laid], None]] = {}  # by the stream; PyTorch has but some of them
        self._encoded: OrderedDict[tuple[int, int], tuple[int, ...]] = OrderedDict()

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Queue one launch on arrays at these addresses."""
        try:
            laid = self._free.pop()
        except IndexError:
            laid = Laid(len(self._arguments))
        for place, index in enumerate(self._arguments):
            laid.put(place, self._map(place, pointers[index]) if place in self._maps else pointers[index])
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = self._function.launcher(self._shape, stream, overlap=self._overlaps)
        queue(laid)
        self._free.append(laid)

    def _map(self, place: int, pointer: int) -> tuple[int, ...]:
        """The words of a tensor map over the array at an address; the latest are kept."""
        found = self._encoded.get((place, pointer))
        if found is None:
            found = self._encoded[place, pointer] = encode(self._maps[place], pointer)
            if len(self._encoded) > MOST_MAPS:
                self._encoded.popitem(last=False)
        return found
