"""The kernel that finishes the statistics of a batch normalization on an NVIDIA GPU, in one launch instead of six.

From mean and variance of each channel it computes the reciprocal of the standard deviation, and updates the running
statistics.
"""

from __future__ import annotations

import functools
import struct

import torch

from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import nvrtc
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices.cuda.function import CudaFunction
from tvmconv.torch.launch import make_context_current

THREADS = 128  # per CTA
KERNEL_NAME = "finish_stats"
SOURCE = """
extern "C" __global__ void finish_stats(const float* stats, float* reciprocal, float* running_mean,
                                        float* running_variance, int channels, float eps, float factor,
                                        float correction) {
  int channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= channels) return;
  float mean = stats[channel], variance = stats[channels + channel];
  reciprocal[channel] = 1.0f / sqrtf(variance + eps);
  if (!running_mean) return;
  running_mean[channel] += factor * (mean - running_mean[channel]);
  running_variance[channel] += factor * (correction * variance - running_variance[channel]);
}
"""


def finish_stats(
    stats: torch.Tensor,
    running: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    factor: float,
    correction: float,
) -> torch.Tensor:
    """Return 1 / √(variance + eps) of each channel, and update the running statistics in place.

    Args:
        stats: Mean and biased variance, of shape (2, channels), contiguous float32 tensors on a GPU as all others.
        running: Running mean and variance; None if there are none.
        eps: Summand of the variance.
        factor: Weight of the new statistics in the running ones.
        correction: Factor that makes the variance unbiased.
    """
    channels, device = stats.shape[1], stats.device
    reciprocal = torch.empty(channels, dtype=torch.float32, device=device)
    pointers = [0, 0] if running is None else [each.data_ptr() for each in running]
    numbers = [channels, *map(_encode_float, (eps, factor, correction))]
    shape = LaunchConfig(grid=(ceil_div(channels, THREADS), 1, 1), block=(THREADS, 1, 1))
    with torch.cuda.device(device):
        make_context_current(torch.cuda.current_device())
        stream = torch.cuda.current_stream().cuda_stream
        parameters = [stats.data_ptr(), reciprocal.data_ptr(), *pointers, *numbers]
        _load_kernel(device).launch(shape, parameters, stream)
    for tensor in running or ():
        torch.autograd.graph.increment_version(tensor)  # packed weights of inference depend on it
    return reciprocal


@functools.cache
def _load_kernel(device: torch.device) -> CudaFunction:
    """Return the kernel on a device, whose context is current; it must not be loaded during a graph capture."""
    major, minor = torch.cuda.get_device_capability(device)
    return CudaFunction(nvrtc.compile_cubin(SOURCE, f"sm_{major}{minor}").image, KERNEL_NAME)


def _encode_float(number: float) -> int:
    """Return the bits of a float32 number."""
    return int.from_bytes(struct.pack("<f", number), "little")
