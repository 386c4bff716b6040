"""The operator `tvmconv::concatenate`: images joined along their channels, and dense copies of views of images.

In either layout, an image is an array of rows with a constant distance: channels first, the elements of one sample, and
channels last, the channels of one pixel. Views of some of the channels are such arrays, too. The kernel copies rows to
rows in accesses of up to 16 bytes, whatever the data type. PyTorch's kernels do so only for contiguous tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.source_kernels import VECTOR_BYTES, SourceKernels
from tvmconv.torch.tensor_layout import allocate_like, find_layout, lay_out
from tvmconv.workloads.layout import CHANNELS_LAST, UNIFORM_LAYOUTS

MAX_INPUTS = 8
MAX_VECTORS = 1 << 31  # of the result
THREADS, VECTORS_IN_FLIGHT = 256, 4  # threads of a CTA, and vectors that a thread loads before it stores
VECTOR_TYPES = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}  # by bytes
SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS)
concatenate(Vector* z, unsigned total, unsigned width, PARAMETERS) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  unsigned first = blockIdx.x * (THREADS * VECTORS_IN_FLIGHT) + threadIdx.x;
  Vector vectors[VECTORS_IN_FLIGHT];
#pragma unroll
  for (int j = 0; j < VECTORS_IN_FLIGHT; ++j) {
    unsigned index = min(first + j * THREADS, total - 1), row = index / width, column = index % width;
    const Vector* x = x0;
    unsigned begin = 0, pitch = pitch0;
    SELECT
    vectors[j] = x[(size_t)row * pitch + column - begin];
  }
#pragma unroll
  for (int j = 0; j < VECTORS_IN_FLIGHT; ++j)
    if (first + j * THREADS < total) z[first + j * THREADS] = vectors[j];
}
"""


@dataclass(frozen=True)
class _Rows:
    """Rows of elements in memory with a constant distance."""

    width: int  # elements of a row
    pitch: int  # elements from a row to the next one


def _find_rows(x: Any, layout: str) -> _Rows | None:
    """Return the rows of a tensor (N, C, space), or of its metadata, in a layout; None if it has none."""
    is_last = layout == CHANNELS_LAST
    shape, stride = [*x.shape], [*(x.stride() if isinstance(x, torch.Tensor) else x.stride)]
    if is_last:
        shape, stride = [shape[0], *shape[2:], shape[1]], [stride[0], *stride[2:], stride[1]]
    num_outer = len(shape) - 1 if is_last else 1
    expected = 1
    for size, step in zip(shape[: num_outer - 1 : -1], stride[: num_outer - 1 : -1], strict=True):
        if size > 1 and step != expected:
            return None
        expected *= size
    outer = [(size, step) for size, step in zip(shape[:num_outer], stride[:num_outer], strict=True) if size > 1]
    pitch = outer[-1][1] if outer else expected
    distance = pitch
    for size, step in reversed(outer):
        if step != distance or pitch < expected:
            return None
        distance *= size
    return _Rows(expected, pitch)


def find_common_layout(images: Sequence[Any]) -> str | None:
    """Return the layout in which all tensors, or their metadata, are rows; None if there is none.

    It is channels first if they are rows in both.
    """
    return next((layout for layout in UNIFORM_LAYOUTS if all(_find_rows(x, layout) for x in images)), None)


def make_dense(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor in a uniform layout, as `lay_out` does; a view of some channels is copied by the kernel."""
    is_known = x.is_cuda and x.dim() > 2 and x.dtype in KERNEL_DTYPES and not torch.compiler.is_compiling()
    if not is_known or find_layout(x.shape, x.stride()) or find_common_layout([x]) != layout:
        return lay_out(x, layout)
    copy: torch.Tensor = concatenate([x])
    return lay_out(copy, layout)


def _allocate(images: Sequence[torch.Tensor], layout: str) -> torch.Tensor:
    shape = [images[0].shape[0], sum(x.shape[1] for x in images), *images[0].shape[2:]]
    return allocate_like(images[0], layout, shape)


def _run_by_pytorch(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenation by PyTorch, in the layout of the inputs if they have a common one."""
    layout, z = find_common_layout(images), torch.cat([*images], 1)
    return z if layout is None else _allocate(images, layout).copy_(z)


def _run_on_gpu(images: Sequence[torch.Tensor]) -> torch.Tensor:
    layout = find_common_layout(images)
    if layout is None or len(images) > MAX_INPUTS:
        return _run_by_pytorch(images)
    z = _allocate(images, layout)
    itemsize = z.element_size()
    arrays = [rows for x in images if (rows := _find_rows(x, layout))]
    sizes = [size * itemsize for rows in arrays for size in (rows.width, rows.pitch)]
    vector_bytes = math.gcd(VECTOR_BYTES, *sizes, *(x.data_ptr() for x in (*images, z)))
    total = z.numel() * itemsize // vector_bytes
    if not 0 < total < MAX_VECTORS:
        return _run_by_pytorch(images)
    ends, end = list[int](), 0
    for rows in arrays:
        end += rows.width * itemsize // vector_bytes
        ends.append(end)
    pitches = [rows.pitch * itemsize // vector_bytes for rows in arrays]
    kernels = _load_kernels(z.device, vector_bytes, len(images))
    launch = LaunchConfig((ceil_div(total, THREADS * VECTORS_IN_FLIGHT), 1, 1), (THREADS, 1, 1))
    kernels.launch("concatenate", launch, [z, total, end, *images, *ends, *pitches])
    return z


@functools.cache
def _load_kernels(device: torch.device, vector_bytes: int, num_inputs: int) -> SourceKernels:
    """Return the kernel on a device; it must not be loaded during a graph capture."""
    return SourceKernels(make_source(vector_bytes, num_inputs), device)


def make_source(vector_bytes: int, num_inputs: int) -> str:
    """Return the source of the kernel for a number of inputs."""
    numbers = range(num_inputs)
    parameters = [f"const Vector* x{number}" for number in numbers]
    parameters += [f"unsigned {name}{number}" for name in ("end", "pitch") for number in numbers]
    choices = [
        f"if (column >= end{number - 1}) {{ x = x{number}; begin = end{number - 1}; pitch = pitch{number}; }}\n    "
        for number in numbers[1:]
    ]
    source = SOURCE.replace("PARAMETERS", ", ".join(parameters)).replace("SELECT", "".join(choices))
    defines = {"THREADS": THREADS, "VECTORS_IN_FLIGHT": VECTORS_IN_FLIGHT}
    lines = [f"#define {name} {value}\n" for name, value in defines.items()]
    return "".join(lines) + f"typedef {VECTOR_TYPES[vector_bytes]} Vector;\n" + source


def _make_fake(images: Sequence[torch.Tensor]) -> torch.Tensor:
    layout = find_common_layout(images)
    return torch.cat([*images], 1) if layout is None else _allocate(images, layout)


def _set_up(ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
    ctx.sizes = [x.shape[1] for x in inputs[0]]


def _differentiate(ctx: Any, dz: torch.Tensor) -> list[torch.Tensor]:
    return [*dz.split(ctx.sizes, 1)]


concatenate = define_operator(
    "concatenate(Tensor[] images) -> Tensor",
    cpu=_run_by_pytorch,
    cuda=_run_on_gpu,
    fake=_make_fake,
    backward=_differentiate,
    setup_context=_set_up,
    needs_fixed_strides=False,
)
