"""CUDA source of group and instance normalizations with an activation, for inference, in both layouts.

An instance normalization has one channel per group. Each element is read twice and written once:

| kernel | reads | writes |
| --- | --- | --- |
| `sum_channels` | x | sums of the differences from the first element of each channel, and of their squares |
| `finish` | these sums | scale and shift of each channel of each sample |
| `apply` | x | z = activation(scale * x + shift) |

Channels last, a thread has `VECTOR` neighbouring channels and every `gridDim.y * blockDim.y`-th pixel. Channels first,
it has `VECTOR` neighbouring pixels of one channel of one sample. The sums of each CTA are in a workspace
(samples, parts, 2, channels), which the second kernel adds up in a fixed order. The third kernel takes the pixels in
reverse order, because the last ones are still in the L2 cache. Variances of groups are combined from those of channels
as by Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983.
"""

from __future__ import annotations

from tvmconv.torch import batch_norm_source, norm_source

THREADS = 256  # largest number of threads of a CTA, but for `finish`
VECTORS_IN_FLIGHT = 4  # that a thread loads before it computes
COMBINED_CHANNELS, COMBINING_THREADS = 32, 32  # channels that `finish` adds up at a time, and threads for each

# Activations of u; `slope` is an argument of the kernel.
ACTIVATION_CODE = {
    **{name: value for name, (value, _) in batch_norm_source.ACTIVATION_CODE.items()},
    "leaky_relu": "(u > 0.0f ? u : slope * u)",
    "sigmoid": "1.0f / (1.0f + expf(-u))",
    "tanh": "tanhf(u)",
    "gelu": "0.5f * u * (1.0f + erff(u * 0.70710678f))",
    "gelu_tanh": "0.5f * u * (1.0f + tanhf(0.79788456f * (u + 0.044715f * u * u * u)))",
    "mish": "u * tanhf(log1pf(expf(u)))",
}

COMMON = """
__device__ float activate(float u, float slope) { return ACTIVATE; }

// Return the sum of a value over a warp, in all of its threads.
__device__ float sum_row(float value, float2* shared) {
  shared[threadIdx.x].x = value;
  __syncwarp();
  float sum = 0.0f;
#pragma unroll
  for (int thread = 0; thread < COMBINED_CHANNELS; ++thread) sum += shared[thread].x;
  __syncwarp();
  return sum;
}

// Add up mean and variance of each channel to those of its group, and write scale and shift (samples, 2, channels).
// A CTA has whole groups: `channels_per_cta` channels. Its threads are (COMBINED_CHANNELS, COMBINING_THREADS).
extern "C" __global__ void finish(const Element* x, const float* workspace, const Parameter* weight,
                                  const Parameter* bias, float* affine, int channels, int pixels, int parts,
                                  int group_channels, int channels_per_cta, float eps) {
  begin();
  __shared__ float2 shared[COMBINING_THREADS][COMBINED_CHANNELS + 1];
  size_t sample = blockIdx.y;
  float* scale = affine + sample * 2 * channels;  // at first the mean of each channel
  float* shift = scale + channels;  // at first the sum of squared differences from this mean
  int begin_channel = blockIdx.x * channels_per_cta, end_channel = min(begin_channel + channels_per_cta, channels);
  for (int first = begin_channel; first < end_channel; first += COMBINED_CHANNELS) {
    int channel = first + threadIdx.x;
    float2 total = {0.0f, 0.0f};
    if (channel < end_channel)
#pragma unroll 4
      for (int part = threadIdx.y; part < parts; part += COMBINING_THREADS) {
        const float* sums = workspace + (sample * parts + part) * 2 * channels + channel;
        total.x += sums[0];
        total.y += sums[channels];
      }
    shared[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y == 0 && channel < end_channel) {
      total = {0.0f, 0.0f};
#pragma unroll
      for (int row = 0; row < COMBINING_THREADS; ++row) {
        total.x += shared[row][threadIdx.x].x;
        total.y += shared[row][threadIdx.x].y;
      }
      size_t first_element = IS_LAST ? sample * pixels * channels + channel : (sample * channels + channel) * pixels;
      scale[channel] = widen(x[first_element]) + total.x / pixels;
      shift[channel] = fmaxf(total.y - total.x * total.x / pixels, 0.0f);
    }
    __syncthreads();
  }
  // The threads of one row, which are a warp, have the channels of a group.
  for (int group = begin_channel / group_channels + threadIdx.y; group * group_channels < end_channel;
       group += COMBINING_THREADS) {
    int first = group * group_channels + threadIdx.x, end = (group + 1) * group_channels;
    float sum = 0.0f, squares = 0.0f;
    for (int channel = first; channel < end; channel += COMBINED_CHANNELS) sum += scale[channel];
    float mean = sum_row(sum, shared[threadIdx.y]) / group_channels;
    for (int channel = first; channel < end; channel += COMBINED_CHANNELS) {
      float difference = scale[channel] - mean;
      squares += shift[channel] + difference * difference * pixels;
    }
    float variance = sum_row(squares, shared[threadIdx.y]) / ((float)pixels * group_channels);
    for (int channel = first; channel < end; channel += COMBINED_CHANNELS) {
      float factor = rsqrtf(variance + eps) * (weight ? widen_parameter(weight[channel]) : 1.0f);
      scale[channel] = factor;
      shift[channel] = (bias ? widen_parameter(bias[channel]) : 0.0f) - mean * factor;
    }
  }
}
"""

LAST = """
extern "C" __global__ void __launch_bounds__(THREADS)
sum_channels(const Element* x, float* workspace, int channels, int pixels) {
  begin();
  size_t sample = blockIdx.z;
  sum_differences(x + sample * pixels * channels, workspace + sample * gridDim.y * 2 * channels, pixels, channels);
}

extern "C" __global__ void __launch_bounds__(THREADS)
apply(const Element* x, const float* affine, Element* z, int channels, int pixels, float slope) {
  begin();
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  if (first >= channels) return;
  size_t image = (size_t)blockIdx.z * pixels * channels;
  float scale[VECTOR], shift[VECTOR];
  for (int i = 0; i < VECTOR; ++i) {
    scale[i] = affine[(size_t)blockIdx.z * 2 * channels + first + i];
    shift[i] = affine[((size_t)blockIdx.z * 2 + 1) * channels + first + i];
  }
  for (int number = blockIdx.y * blockDim.y + threadIdx.y; number < pixels; number += VECTORS_IN_FLIGHT * step) {
    Vector xs[VECTORS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < VECTORS_IN_FLIGHT; ++j)
      xs[j] = load(x, image + (size_t)max(pixels - 1 - number - j * step, 0) * channels + first);
#pragma unroll
    for (int j = 0; j < VECTORS_IN_FLIGHT; ++j) {
      int pixel = pixels - 1 - number - j * step;
      if (pixel < 0) break;
      for (int i = 0; i < VECTOR; ++i)
        xs[j].values[i] = narrow(activate(widen(xs[j].values[i]) * scale[i] + shift[i], slope));
      store(z, image + (size_t)pixel * channels + first, xs[j]);
    }
  }
}
"""

FIRST = """
// The rows are the channels of all samples; a CTA has blockDim.y of them, and a part of the pixels of each.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_channels(const Element* x, float* workspace, int samples, int channels, int pixels) {
  begin();
  __shared__ float2 shared[THREADS];
  int row = blockIdx.x * blockDim.y + threadIdx.y, step = gridDim.y * blockDim.x, vectors = pixels / VECTOR;
  int thread = threadIdx.y * blockDim.x + threadIdx.x;
  float2 total = {0.0f, 0.0f};
  if (row < samples * channels) {
    const Element* image = x + (size_t)row * pixels;
    float origin = widen(image[0]);
    for (int number = blockIdx.y * blockDim.x + threadIdx.x; number < vectors; number += VECTORS_IN_FLIGHT * step) {
      Vector xs[VECTORS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < VECTORS_IN_FLIGHT; ++j)
        xs[j] = load(image, (size_t)min(number + j * step, vectors - 1) * VECTOR);
#pragma unroll
      for (int j = 0; j < VECTORS_IN_FLIGHT; ++j) {
        if (number + j * step >= vectors) break;
        for (int i = 0; i < VECTOR; ++i) {
          float difference = widen(xs[j].values[i]) - origin;
          total.x += difference;
          total.y += difference * difference;
        }
      }
    }
  }
  shared[thread] = total;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {  // blockDim.x is a power of two
    if (threadIdx.x < half) {
      shared[thread].x += shared[thread + half].x;
      shared[thread].y += shared[thread + half].y;
    }
    __syncthreads();
  }
  if (threadIdx.x || row >= samples * channels) return;
  float* sums = workspace + ((size_t)(row / channels) * gridDim.y + blockIdx.y) * 2 * channels + row % channels;
  sums[0] = shared[thread].x;
  sums[channels] = shared[thread].y;
}

extern "C" __global__ void __launch_bounds__(THREADS)
apply(const Element* x, const float* affine, Element* z, int samples, int channels, int pixels, float slope) {
  begin();
  int row = blockIdx.x * blockDim.y + threadIdx.y, step = gridDim.y * blockDim.x, vectors = pixels / VECTOR;
  if (row >= samples * channels) return;
  size_t image = (size_t)row * pixels;
  const float* factors = affine + (size_t)(row / channels) * 2 * channels + row % channels;
  float scale = factors[0], shift = factors[channels];
  for (int number = blockIdx.y * blockDim.x + threadIdx.x; number < vectors; number += VECTORS_IN_FLIGHT * step) {
    Vector xs[VECTORS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < VECTORS_IN_FLIGHT; ++j)
      xs[j] = load(x, image + (size_t)max(vectors - 1 - number - j * step, 0) * VECTOR);
#pragma unroll
    for (int j = 0; j < VECTORS_IN_FLIGHT; ++j) {
      int position = vectors - 1 - number - j * step;
      if (position < 0) break;
      for (int i = 0; i < VECTOR; ++i)
        xs[j].values[i] = narrow(activate(widen(xs[j].values[i]) * scale + shift, slope));
      store(z, image + (size_t)position * VECTOR, xs[j]);
    }
  }
}
"""


def make_source(
    dtype: str, activation: str, *, vector: int, is_channels_last: bool, has_float_parameters: bool = True
) -> str:
    """Return the source of the three kernels.

    Args:
        dtype: Name of the elements' data type.
        activation: Name of the activation; "" for none.
        vector: Neighbouring elements of a thread; they divide the channels or, channels first, the pixels.
        is_channels_last: Whether tensors are channels last.
        has_float_parameters: Whether weight and bias are float32, and not of the elements' data type.
    """
    macros = {
        "VECTOR": vector,
        "THREADS": THREADS,
        "VECTORS_IN_FLIGHT": VECTORS_IN_FLIGHT,
        "STATS_ROWS_IN_FLIGHT": VECTORS_IN_FLIGHT,
        "COMBINED_CHANNELS": COMBINED_CHANNELS,
        "COMBINING_THREADS": COMBINING_THREADS,
        "IS_LAST": int(is_channels_last),
        "ACTIVATE": ACTIVATION_CODE[activation],
        "Parameter": "float" if has_float_parameters else "Element",
        "widen_parameter": "" if has_float_parameters else "widen",
    }
    lines = [f"#define {name} {text}\n" for name, text in macros.items()]
    return "".join(lines) + norm_source.make_common(dtype) + COMMON + (LAST if is_channels_last else FIRST)
