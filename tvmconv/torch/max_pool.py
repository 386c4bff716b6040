"""Maximum poolings of images, channels last, in graphs with gradients.

| operator | computes |
| --- | --- |
| `tvmconv::max_pool` | the maxima of all windows, and the number of each maximum's place in its window |
| `tvmconv::max_pool_backward` | the gradient of the input |

PyTorch stores places as 64-bit integers, which take four times the memory of results in 16 bits. Here they are bytes.
The gradient of a pixel is a sum over the windows that have it, so that nothing is added atomically. On the CPU, PyTorch
computes the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn.functional import max_pool2d

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.torch import norm_source
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.conv_site import Metadata
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.source_kernels import SourceKernels, count_vector_elements
from tvmconv.torch.tensor_layout import allocate_like, lay_out
from tvmconv.workloads.layout import CHANNELS_LAST

THREADS = 256
MAX_TAPS, MAX_VECTORS = 255, 1 << 31
NAMES = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
DEFAULTS = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
WINDOW = "int[] size, int[] stride, int[] padding"
KERNELS = """
struct alignas(VECTOR) Taps { unsigned char values[VECTOR]; };

extern "C" __global__ void __launch_bounds__(THREADS)
max_pool(const Element* x, Element* z, Taps* taps, unsigned total, int height, int width, int rows, int columns,
         int vectors) {
  begin();
  unsigned index = blockIdx.x * THREADS + threadIdx.x, pixel = index / vectors;
  if (index >= total) return;
  int first = (pixel / columns % rows) * STRIDE_H - PAD_H, left = (pixel % columns) * STRIDE_W - PAD_W;
  const Element* image = x + (size_t)(pixel / columns / rows) * height * width * vectors * VECTOR;
  float maxima[VECTOR];
  int places[VECTOR];
  for (int i = 0; i < VECTOR; ++i) places[i] = -1;
#pragma unroll
  for (int tap = 0; tap < SIZE_H * SIZE_W; ++tap) {
    int row = first + tap / SIZE_W, column = left + tap % SIZE_W;
    if (row < 0 || row >= height || column < 0 || column >= width) continue;
    Vector values = load(image, ((size_t)(row * width + column) * vectors + index % vectors) * VECTOR);
    for (int i = 0; i < VECTOR; ++i) {
      float value = widen(values.values[i]);
      if (places[i] < 0 || value > maxima[i] || value != value) maxima[i] = value, places[i] = tap;
    }
  }
  Vector result;
  Taps found;
  for (int i = 0; i < VECTOR; ++i) result.values[i] = narrow(maxima[i]), found.values[i] = places[i];
  store(z, (size_t)index * VECTOR, result);
  taps[index] = found;
}

extern "C" __global__ void __launch_bounds__(THREADS)
max_pool_backward(const Element* dz, const Taps* taps, Element* dx, unsigned total, int height, int width, int rows,
                  int columns, int vectors) {
  begin();
  unsigned index = blockIdx.x * THREADS + threadIdx.x, pixel = index / vectors;
  if (index >= total) return;
  int bottom = pixel / width % height + PAD_H, right = pixel % width + PAD_W;
  size_t image = (size_t)(pixel / width / height) * rows * columns;
  float sums[VECTOR] = {};
#pragma unroll
  for (int tap = 0; tap < SIZE_H * SIZE_W; ++tap) {
    int above = bottom - tap / SIZE_W, before = right - tap % SIZE_W;
    int row = above / STRIDE_H, column = before / STRIDE_W;
    if (above < 0 || before < 0 || above % STRIDE_H || before % STRIDE_W || row >= rows || column >= columns) continue;
    size_t offset = (image + row * columns + column) * vectors + index % vectors;
    Taps found = taps[offset];
    Vector gradient = load(dz, offset * VECTOR);
    for (int i = 0; i < VECTOR; ++i) sums[i] += found.values[i] == tap ? widen(gradient.values[i]) : 0.0f;
  }
  Vector result;
  for (int i = 0; i < VECTOR; ++i) result.values[i] = narrow(sums[i]);
  store(dx, (size_t)index * VECTOR, result);
}
"""


def pool_in_graph(x: torch.Tensor, *window: list[int]) -> torch.Tensor:
    """Return the maxima of windows of a size, stride and padding by the operator."""
    return max_pool(x, *window)[0]


def replace_poolings(copies: Mapping[fx.Node, Any], metadata: Metadata) -> None:
    """Have the operator compute maximum poolings in a copy of a graph, where its kernels can.

    Args:
        copies: Nodes of the copy by those of the graph.
        metadata: Metadata of the graph's nodes.
    """
    for node, node_copy in copies.items():
        if node.target is not max_pool2d:
            continue
        values = {**DEFAULTS, **dict(zip(NAMES, node.args, strict=False)), **node.kwargs}
        size, stride, padding, dilation = (
            [*each] if isinstance(each, Sequence) else [each, each] for each in (values[name] for name in NAMES[1:5])
        )
        stride = size if stride in ([None, None], []) else stride
        input_info = metadata.get(values["input"])
        if (
            input_info is not None
            and input_info.dtype in KERNEL_DTYPES
            and input_info.layout == CHANNELS_LAST
            and len(input_info.shape) == 4
            and all(type(each) is int for each in (*size, *stride, *padding))
            and (dilation, values["ceil_mode"], values["return_indices"]) == ([1, 1], False, False)
            and size[0] * size[1] <= MAX_TAPS
        ):
            node_copy.target = pool_in_graph
            node_copy.args, node_copy.kwargs = (copies[values["input"]], size, stride, padding), {}


def _count_windows(shape: Sequence[Any], size: Any, stride: Any, padding: Any) -> list[Any]:
    """Return the shape of the result."""
    sizes = zip(shape[2:], size, stride, padding, strict=True)
    return [*shape[:2], *((length + 2 * pad - taps) // step + 1 for length, taps, step, pad in sizes)]


def _make_fake(x: torch.Tensor, *window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _count_windows(x.shape, *window)
    return allocate_like(x, CHANNELS_LAST, shape), allocate_like(x, CHANNELS_LAST, shape, torch.uint8)


def _make_fake_gradient(dz: torch.Tensor, taps: torch.Tensor, shape: Sequence[Any], *_: Any) -> torch.Tensor:
    return allocate_like(dz, CHANNELS_LAST, shape)


def _compute_places(taps: torch.Tensor, width: int, size: Any, stride: Any, padding: Any) -> torch.Tensor:
    """Return the places of maxima in their images, as PyTorch counts them, without those in their windows."""
    rows, columns = (
        torch.arange(length, device=taps.device) * step - pad
        for length, step, pad in zip(taps.shape[2:], stride, padding, strict=True)
    )
    return (rows[:, None] + taps // size[1]) * width + columns + taps % size[1]


def _run_by_pytorch(x: torch.Tensor, *window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    maxima, places = max_pool2d(x, *window, return_indices=True)
    z, taps = _make_fake(x, *window)
    rest = places - _compute_places(torch.zeros_like(places), x.shape[3], *window)
    taps.copy_(rest // x.shape[3] * window[0][1] + rest % x.shape[3])
    return z.copy_(maxima), taps


def _differentiate_by_pytorch(dz: torch.Tensor, taps: torch.Tensor, shape: Sequence[int], *window: Any) -> torch.Tensor:
    places = _compute_places(taps.long(), shape[3], *window).flatten(2)
    sums = torch.zeros([*shape], device=dz.device).flatten(2).scatter_add_(2, places, dz.float().flatten(2))
    return allocate_like(dz, CHANNELS_LAST, shape).copy_(sums.view([*shape]))


def _run_on_gpu(x: torch.Tensor, *window: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, (z, taps) = lay_out(x, CHANNELS_LAST), _make_fake(x, *window)
    _launch("max_pool", [x, z, taps], z, x, window)
    return z, taps


def _differentiate_on_gpu(dz: torch.Tensor, taps: torch.Tensor, shape: Sequence[int], *window: Any) -> torch.Tensor:
    dz, dx = lay_out(dz, CHANNELS_LAST), allocate_like(dz, CHANNELS_LAST, shape)
    _launch("max_pool_backward", [dz, taps, dx], dx, dx, window, dz)
    return dx


def _launch(name: str, arrays: Any, result: torch.Tensor, x: torch.Tensor, window: Any, z: Any = None) -> None:
    """Launch a kernel with one thread for each vector of its result, given a tensor like the input and like z."""
    z = result if z is None else z
    vector = count_vector_elements(x.shape[1], x, z)
    total = result.numel() // vector
    if total >= MAX_VECTORS:
        raise RuntimeError(f"a maximum pooling of {result.numel()} numbers: expected fewer than {MAX_VECTORS * vector}")
    if total:
        kernels = _load_kernels(x.device, x.dtype, vector, tuple(map(tuple, window)))
        launch = LaunchConfig((ceil_div(total, THREADS), 1, 1), (THREADS, 1, 1))
        kernels.launch(name, launch, [*arrays, total, *x.shape[2:], *z.shape[2:], x.shape[1] // vector])


@functools.cache
def _load_kernels(device: torch.device, dtype: torch.dtype, vector: int, window: Any) -> SourceKernels:
    """Return the kernels on a device; they must not be loaded during a graph capture."""
    return SourceKernels(make_source(KERNEL_DTYPES[dtype], vector, window), device)


def make_source(dtype: str, vector: int, window: Sequence[Sequence[int]]) -> str:
    """Return the source of both kernels, for vectors of so many channels, and windows of a size, stride and padding."""
    macros = {"VECTOR": vector, "THREADS": THREADS, "STATS_ROWS_IN_FLIGHT": 1}
    for name, pair in zip(("SIZE", "STRIDE", "PAD"), window, strict=True):
        macros |= {f"{name}_H": pair[0], f"{name}_W": pair[1]}
    lines = [f"#define {name} {value}\n" for name, value in macros.items()]
    return "".join(lines) + norm_source.make_common(dtype) + KERNELS


def _set_up(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.shape, ctx.window = inputs[0].shape, inputs[1:]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, dz: torch.Tensor, _: Any) -> tuple[Any, ...]:
    return max_pool_backward(dz, *ctx.saved_tensors, ctx.shape, *ctx.window), None, None, None


max_pool = define_operator(
    f"max_pool(Tensor x, {WINDOW}) -> (Tensor, Tensor)",
    cpu=_run_by_pytorch,
    cuda=_run_on_gpu,
    fake=_make_fake,
    backward=_differentiate,
    setup_context=_set_up,
)
max_pool_backward = define_operator(
    f"max_pool_backward(Tensor dz, Tensor taps, SymInt[] shape, {WINDOW}) -> Tensor",
    cpu=_differentiate_by_pytorch,
    cuda=_differentiate_on_gpu,
    fake=_make_fake_gradient,
)
