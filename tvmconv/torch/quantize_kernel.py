"""The kernels that round an activation to 8 bits on an NVIDIA GPU, in one pass over it.

One of them multiplies the activation by a number for each image and channel first, as squeeze-and-excitation does.
"""

from __future__ import annotations

import functools

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices.cuda.function import CudaFunction
from tvmconv.torch.conv_call import KERNEL_DTYPES
from tvmconv.torch.launch import make_context_current

THREADS = 256  # per CTA
ELEMENTS = 16  # per thread: a store of 16 bytes
KERNEL_NAME, GATED_KERNEL_NAME = "quantize", "quantize_gated"
TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
CONVERSIONS = {
    # Two results of a pair of instructions in the lower 16 bits, the first one in the lower 8 (PTX ISA, cvt).
    torch.int8: """
  int a, b;
  if (zero_point == 0) {
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(a) : "f"(low));
    asm("cvt.rni.sat.s8.f32 %0, %1;" : "=r"(b) : "f"(high));
  } else {  // a float beyond int32 saturates, and NaN becomes 0
    a = max(-128, min(127, max(-512, min(512, __float2int_rn(low))) + zero_point));
    b = max(-128, min(127, max(-512, min(512, __float2int_rn(high))) + zero_point));
  }
  return (a & 255) | ((b & 255) << 8);""",
    torch.float8_e4m3fn: """
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;""",
}
SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>

__device__ unsigned int round_pair(float low, float high, int zero_point) {{{conversion}
}}

struct Values {{
  {type} values[{elements}];
  __device__ void load(const {type}* x) {{
    for (int i = 0; i < (int)({elements} * sizeof({type}) / 16); ++i)
      reinterpret_cast<uint4*>(values)[i] = reinterpret_cast<const uint4*>(x)[i];
  }}
}};

template <typename Read>
__device__ void round_and_store(Read read, unsigned char* y, int zero_point) {{
  unsigned int words[{elements} / 4];
  for (int i = 0; i < {elements} / 4; ++i) {{
    unsigned int low = round_pair(read(4 * i), read(4 * i + 1), zero_point);
    unsigned int high = round_pair(read(4 * i + 2), read(4 * i + 3), zero_point);
    words[i] = low | (high << 16);
  }}
  *reinterpret_cast<uint4*>(y) = *reinterpret_cast<uint4*>(words);
}}

extern "C" __global__ void {name}(const {type}* __restrict__ x, const float* __restrict__ factor,
                                  unsigned char* __restrict__ y, long long count, int zero_point) {{
  const int elements = {elements};
  long long start = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * elements;
  float number = *factor;
  if (start + elements <= count) {{
    Values loaded;
    loaded.load(x + start);
    round_and_store([&](int i) {{ return float(loaded.values[i]) * number; }}, y + start, zero_point);
  }} else {{
    for (long long i = start; i < count; ++i) y[i] = round_pair(float(x[i]) * number, 0.0f, zero_point) & 255;
  }}
}}

// Channels are a multiple of the elements of a thread, and image_elements those of an image.
extern "C" __global__ void {gated_name}(const {type}* __restrict__ x, const {type}* __restrict__ gate,
                                        const float* __restrict__ factor, unsigned char* __restrict__ y,
                                        long long count, long long image_elements, int channels, int zero_point) {{
  long long start = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * {elements};
  if (start >= count) return;
  Values loaded, gates;
  loaded.load(x + start);
  gates.load(gate + start / image_elements * channels + start % channels);
  float number = *factor;
  round_and_store([&](int i) {{ return float(loaded.values[i]) * float(gates.values[i]) * number; }}, y + start,
                  zero_point);
}}
"""


def make_source(dtype: torch.dtype, result_dtype: torch.dtype) -> str:
    """Return the source for an input type and an 8-bit type."""
    return SOURCE.format(
        conversion=CONVERSIONS[result_dtype],
        name=KERNEL_NAME,
        gated_name=GATED_KERNEL_NAME,
        type=TYPES[KERNEL_DTYPES[dtype]],
        elements=ELEMENTS,
    )


def launch_quantize(x: torch.Tensor, factor: torch.Tensor, y: torch.Tensor, zero_point: int = 0) -> None:
    """Write the elements of x times a number to y, rounded to nearest even, plus a zero point, and saturated.

    Args:
        x: Dense tensor in 16 or 32 bits on a GPU, as all others; its address is a multiple of 16.
        factor: One number in float32.
        y: Tensor of the same shape and strides in an 8-bit type.
        zero_point: Integer that stands for zero; 0 for 8-bit floats.
    """
    count = x.numel()
    if count:
        x = x.clone() if x.data_ptr() % 16 else x
        parameters = [x.data_ptr(), factor.data_ptr(), y.data_ptr(), count, zero_point & 0xFFFFFFFF]
        _launch(KERNEL_NAME, x, y, parameters)


def can_quantize_gated(x: torch.Tensor, gate: torch.Tensor) -> bool:
    """Return whether the kernel multiplies x by a gate: both have one type, and the gate one element per channel."""
    return (
        x.dim() > 2
        and gate.shape == (*x.shape[:2], *(1 for _ in x.shape[2:]))
        and x.dtype == gate.dtype
        and x.dtype in KERNEL_DTYPES
        and x.shape[1] % ELEMENTS == 0
    )


def launch_quantize_gated(
    x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor, y: torch.Tensor, zero_point: int = 0
) -> None:
    """Write the elements of x times those of a gate times a number to y, rounded as by `launch_quantize`.

    Args:
        x: Dense tensor, channels last, as `launch_quantize` reads; see `can_quantize_gated`.
        gate: Dense tensor of one element for each image and channel.
        factor: One number in float32.
        y: Tensor of the same shape and strides as x in an 8-bit type.
        zero_point: Integer that stands for zero; 0 for 8-bit floats.
    """
    count = x.numel()
    if count:
        x, gate = (each.clone() if each.data_ptr() % 16 else each for each in (x, gate))
        pointers = [each.data_ptr() for each in (x, gate, factor, y)]
        sizes = [count, count // x.shape[0], x.shape[1], zero_point & 0xFFFFFFFF]
        _launch(GATED_KERNEL_NAME, x, y, [*pointers, *sizes])


def _launch(name: str, x: torch.Tensor, y: torch.Tensor, parameters: list[int]) -> None:
    """Queue a kernel on the current stream."""
    shape = LaunchConfig(grid=(ceil_div(x.numel(), THREADS * ELEMENTS), 1, 1), block=(THREADS, 1, 1))
    with torch.cuda.device(x.device):
        make_context_current(torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
        _load_kernel(name, x.device, x.dtype, y.dtype).launch(shape, parameters, stream)


@functools.cache
def _load_kernel(name: str, device: torch.device, dtype: torch.dtype, result_dtype: torch.dtype) -> CudaFunction:
    """Return a kernel on a device, whose context is current; it must not be loaded during a graph capture."""
    major, minor = torch.cuda.get_device_capability(device)
    return CudaFunction(nvrtc.compile_cubin(make_source(dtype, result_dtype), f"sm_{major}{minor}").image, name)
