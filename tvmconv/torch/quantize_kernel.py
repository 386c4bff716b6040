"""The kernel that rounds an activation to 8 bits on an NVIDIA GPU, in one pass over it."""

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
KERNEL_NAME = "quantize"
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

extern "C" __global__ void {name}(const {type}* __restrict__ x, const float* __restrict__ factor,
                                  unsigned char* __restrict__ y, long long count, int zero_point) {{
  const int elements = {elements};
  long long start = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * elements;
  float number = *factor;
  if (start + elements <= count) {{
    const int vectors = elements * sizeof({type}) / 16;
    uint4 loaded[vectors];
    for (int i = 0; i < vectors; ++i) loaded[i] = reinterpret_cast<const uint4*>(x + start)[i];
    const {type}* values = reinterpret_cast<const {type}*>(loaded);
    unsigned int words[elements / 4];
    for (int i = 0; i < elements / 4; ++i) {{
      unsigned int low = round_pair(float(values[4 * i]) * number, float(values[4 * i + 1]) * number, zero_point);
      unsigned int high = round_pair(float(values[4 * i + 2]) * number, float(values[4 * i + 3]) * number, zero_point);
      words[i] = low | (high << 16);
    }}
    *reinterpret_cast<uint4*>(y + start) = *reinterpret_cast<uint4*>(words);
  }} else {{
    for (long long i = start; i < count; ++i) y[i] = round_pair(float(x[i]) * number, 0.0f, zero_point) & 255;
  }}
}}
"""


def make_source(dtype: torch.dtype, result_dtype: torch.dtype) -> str:
    """Return the source for an input type and an 8-bit type."""
    return SOURCE.format(
        conversion=CONVERSIONS[result_dtype], name=KERNEL_NAME, type=TYPES[KERNEL_DTYPES[dtype]], elements=ELEMENTS
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
    if not count:
        return
    shape = LaunchConfig(grid=(ceil_div(count, THREADS * ELEMENTS), 1, 1), block=(THREADS, 1, 1))
    if x.data_ptr() % 16:
        x = x.clone()
    with torch.cuda.device(x.device):
        make_context_current(torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
        parameters = [x.data_ptr(), factor.data_ptr(), y.data_ptr(), count, zero_point & 0xFFFFFFFF]
        _load_kernel(x.device, x.dtype, y.dtype).launch(shape, parameters, stream)


@functools.cache
def _load_kernel(device: torch.device, dtype: torch.dtype, result_dtype: torch.dtype) -> CudaFunction:
    """Return the kernel on a device, whose context is current; it must not be loaded during a graph capture."""
    major, minor = torch.cuda.get_device_capability(device)
    return CudaFunction(nvrtc.compile_cubin(make_source(dtype, result_dtype), f"sm_{major}{minor}").image, KERNEL_NAME)
