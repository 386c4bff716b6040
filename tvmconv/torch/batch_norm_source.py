"""CUDA source of batch normalizations in training with an activation, over arrays (rows, channels): channels last.

A thread has `VECTOR` neighbouring channels, which it loads in one instruction, and every
`gridDim.y * blockDim.y`-th row. Reductions keep sums in registers, add them up in shared
memory, and write the sums of each CTA to a workspace; a second kernel adds those in a fixed order, so that results have
the same bits in each run.

| kernel | reads | writes |
| --- | --- | --- |
| `sum_elements`, `finish_stats` | x | mean and variance of each channel |
| `apply` | x, residual | z = activation(scale * (x - mean) + bias + residual), mask |
| `sum_gradients`, `finish_gradients` | x, residual or mask, gradients of z | gradients of weight, bias and residual |
| `apply_gradients` | x, gradient | gradient of x |

The gradients are those of Ioffe and Szegedy, "Batch Normalization", 2015. The gradient of z may be the sum of two
arrays, or of one and of a number for each channel of each sample. The activation's derivative is computed from x and
the residual again, which takes less time than to read z. With a residual, `apply` also stores where a derivative of 0
or 1 is 1, in a byte for each vector, and `sum_gradients` reads this mask in place of the residual. Kernels that read
what a previous one has just read take the rows in reverse order, because the last ones are still in the L2 cache. Most
tensors of a network are so small that launches take as long as their bytes. From sm_90 on, each kernel therefore starts
while the one before it on the stream ends, and waits for its end before it reads memory.
"""

from __future__ import annotations

from tvmconv.torch import norm_source

THREADS = 256  # largest number of threads of a CTA
ROWS_IN_FLIGHT = 4  # rows that a thread loads before it computes
STATS_ROWS_IN_FLIGHT = 8  # the same where it loads one array and has registers left
COMBINED_CHANNELS, COMBINING_THREADS = 32, 32  # channels of a CTA that adds up a workspace, and its threads for each

BINARY_ACTIVATIONS = "relu", "relu6"  # whose derivatives are 0 or 1
# Second gradients of the result: none, an array, or a number for each channel of each sample.
SECOND_GRADIENTS = NO_SECOND, SECOND_ARRAY, SECOND_OF_SAMPLES = "", "array", "samples"

# CUDA expressions of the activations of u, and of their derivatives, by name.
ACTIVATION_CODE = {
    "": ("u", "1.0f"),
    "relu": ("fmaxf(u, 0.0f)", "(u > 0.0f ? 1.0f : 0.0f)"),
    "relu6": ("fminf(fmaxf(u, 0.0f), 6.0f)", "(u > 0.0f && u < 6.0f ? 1.0f : 0.0f)"),
    "silu": ("u / (1.0f + expf(-u))", "derive_silu(u)"),
    "hardswish": (
        "u * fminf(fmaxf(u + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f)",
        "(u <= -3.0f ? 0.0f : u >= 3.0f ? 1.0f : u * (1.0f / 3.0f) + 0.5f)",
    ),
}

COMMON = """
struct Affine {  // u = scale * (x - mean) + bias, for the channels of a thread
  float mean[VECTOR], scale[VECTOR], bias[VECTOR];
  __device__ Affine(const float* stats, const float* weight, const float* offset, int channels, int first, float eps) {
    for (int i = 0; i < VECTOR; ++i) {
      mean[i] = stats[first + i];
      scale[i] = rsqrtf(stats[channels + first + i] + eps) * (weight ? weight[first + i] : 1.0f);
      bias[i] = offset ? offset[first + i] : 0.0f;
    }
  }
};

__device__ float derive_silu(float u) {
  float sigmoid = 1.0f / (1.0f + expf(-u));
  return sigmoid * (1.0f + u * (1.0f - sigmoid));
}
__device__ float activate(float u) { return ACTIVATE; }
__device__ float derive(float u) { return DERIVE; }

// Return the two sums over a workspace (parts, 2, channels) of one channel, in the thread with threadIdx.y 0.
__device__ float2 combine_sums(const float* workspace, int parts, int channels, int channel) {
  __shared__ float2 shared[COMBINING_THREADS][COMBINED_CHANNELS];
  float2 total = {0.0f, 0.0f};
#pragma unroll 8
  for (int part = threadIdx.y; part < parts; part += COMBINING_THREADS) {
    const float* sums = workspace + (size_t)part * 2 * channels + channel;
    total.x += sums[0];
    total.y += sums[channels];
  }
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y) return total;
#pragma unroll
  for (int row = 1; row < COMBINING_THREADS; ++row) {
    total.x += shared[row][threadIdx.x].x;
    total.y += shared[row][threadIdx.x].y;
  }
  return total;
}
"""

STATS = """
extern "C" __global__ void __launch_bounds__(THREADS)
sum_elements(const Element* x, float* workspace, int rows, int channels) {
  begin();
  sum_differences(x, workspace, rows, channels);
}

extern "C" __global__ void finish_stats(const Element* x, const float* workspace, float* stats, int parts, int rows,
                                        int channels) {
  begin();
  int channel = blockIdx.x * COMBINED_CHANNELS + threadIdx.x;
  float2 sums = combine_sums(workspace, parts, channels, min(channel, channels - 1));
  if (threadIdx.y || channel >= channels) return;
  float difference = sums.x / rows;
  stats[channel] = widen(x[channel]) + difference;
  stats[channels + channel] = fmaxf(sums.y / rows - difference * difference, 0.0f);
}
"""

APPLY = """
extern "C" __global__ void __launch_bounds__(THREADS)
apply(const Element* x, const Element* residual, Element* z, unsigned char* mask, const float* stats,
      const float* weight, const float* bias, int rows, int channels, float eps) {
  begin();
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  if (first >= channels) return;
  Affine affine(stats, weight, bias, channels, first, eps);
  for (int number = blockIdx.y * blockDim.y + threadIdx.y; number < rows; number += ROWS_IN_FLIGHT * step) {
    Vector xs[ROWS_IN_FLIGHT], residuals[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      size_t offset = (size_t)max(rows - 1 - number - j * step, 0) * channels + first;
      xs[j] = load(x, offset);
      if (HAS_RESIDUAL) residuals[j] = load(residual, offset);
    }
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      int row = rows - 1 - number - j * step;
      if (row < 0) break;
      Vector zs;
      unsigned bits = 0;
      for (int i = 0; i < VECTOR; ++i) {
        float u = (widen(xs[j].values[i]) - affine.mean[i]) * affine.scale[i] + affine.bias[i];
        if (HAS_RESIDUAL) u += widen(residuals[j].values[i]);
        zs.values[i] = narrow(activate(u));
        if (HAS_MASK && derive(u) != 0.0f) bits |= 1u << i;
      }
      size_t offset = (size_t)row * channels + first;
      store(z, offset, zs);
      if (HAS_MASK) mask[offset / VECTOR] = bits;
    }
  }
}
"""

GRADIENTS = """
// The second gradient of z; one number for each channel of each sample if `HAS_SECOND_GRADIENT` is 2.
__device__ Vector load_second(const Element* dz2, int row, int pixels, int channels, int first) {
  return load(dz2, (size_t)(HAS_SECOND_GRADIENT == 2 ? row / pixels : row) * channels + first);
}

// The derivative of the activation times the gradient of z, which is the gradient of the residual.
__device__ Vector differentiate(const Vector& x, const Vector& residual, unsigned bits, const Vector& dz,
                                const Vector& dz2, const Affine& affine) {
  Vector gradient;
  for (int i = 0; i < VECTOR; ++i) {
    float u = (widen(x.values[i]) - affine.mean[i]) * affine.scale[i] + affine.bias[i];
    if (HAS_RESIDUAL && !HAS_MASK) u += widen(residual.values[i]);
    float sum = widen(dz.values[i]);
    if (HAS_SECOND_GRADIENT) sum += widen(dz2.values[i]);
    gradient.values[i] = narrow(sum * (HAS_MASK ? (bits >> i & 1 ? 1.0f : 0.0f) : derive(u)));
  }
  return gradient;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sum_gradients(const Element* x, const Element* residual, const unsigned char* mask, const Element* dz,
              const Element* dz2, Element* gradients, float* workspace, const float* stats, const float* weight,
              const float* bias, int rows, int channels, int pixels, float eps) {
  begin();
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  float sums[2][VECTOR] = {};
  if (first < channels) {
    Affine affine(stats, weight, bias, channels, first, eps);
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += ROWS_IN_FLIGHT * step) {
      Vector xs[ROWS_IN_FLIGHT], residuals[ROWS_IN_FLIGHT], dzs[ROWS_IN_FLIGHT], dzs2[ROWS_IN_FLIGHT];
      unsigned bits[ROWS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        int near = min(row + j * step, rows - 1);
        size_t offset = (size_t)near * channels + first;
        xs[j] = load(x, offset);
        if (HAS_MASK)
          bits[j] = mask[offset / VECTOR];
        else if (HAS_RESIDUAL)
          residuals[j] = load(residual, offset);
        dzs[j] = load(dz, offset);
        if (HAS_SECOND_GRADIENT) dzs2[j] = load_second(dz2, near, pixels, channels, first);
      }
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        if (row + j * step >= rows) break;
        Vector gradient = differentiate(xs[j], residuals[j], bits[j], dzs[j], dzs2[j], affine);
        for (int i = 0; i < VECTOR; ++i) {
          float value = widen(gradient.values[i]);
          sums[0][i] += value;
          sums[1][i] += value * (widen(xs[j].values[i]) - affine.mean[i]);
        }
        if (HAS_RESIDUAL) store(gradients, (size_t)(row + j * step) * channels + first, gradient);
      }
    }
  }
  store_sums(sums, workspace, channels);
}

extern "C" __global__ void finish_gradients(const float* workspace, const float* stats, float* parameter_gradients,
                                            int parts, int channels, float eps) {
  begin();
  int channel = blockIdx.x * COMBINED_CHANNELS + threadIdx.x;
  float2 sums = combine_sums(workspace, parts, channels, min(channel, channels - 1));
  if (threadIdx.y || channel >= channels) return;
  parameter_gradients[channel] = sums.y * rsqrtf(stats[channels + channel] + eps);
  parameter_gradients[channels + channel] = sums.x;
}

// With a residual, `dz` is the array that `sum_gradients` stored.
extern "C" __global__ void __launch_bounds__(THREADS)
apply_gradients(const Element* x, const Element* dz, const Element* dz2, Element* dx, const float* parameter_gradients,
                const float* stats, const float* weight, const float* bias, int rows, int channels, int pixels,
                float eps) {
  begin();
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  if (first >= channels) return;
  Affine affine(stats, weight, bias, channels, first, eps);
  float mean_gradient[VECTOR], slope[VECTOR];
  for (int i = 0; i < VECTOR; ++i) {
    mean_gradient[i] = parameter_gradients[channels + first + i] / rows;
    slope[i] = parameter_gradients[first + i] / rows * rsqrtf(stats[channels + first + i] + eps);
  }
  for (int number = blockIdx.y * blockDim.y + threadIdx.y; number < rows; number += ROWS_IN_FLIGHT * step) {
    Vector xs[ROWS_IN_FLIGHT], dzs[ROWS_IN_FLIGHT], dzs2[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      int near = max(rows - 1 - number - j * step, 0);
      size_t offset = (size_t)near * channels + first;
      xs[j] = load(x, offset);
      dzs[j] = load(dz, offset);
      if (HAS_SECOND_GRADIENT && !HAS_RESIDUAL) dzs2[j] = load_second(dz2, near, pixels, channels, first);
    }
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      int row = rows - 1 - number - j * step;
      if (row < 0) break;
      Vector gradient = HAS_RESIDUAL ? dzs[j] : differentiate(xs[j], xs[j], 0, dzs[j], dzs2[j], affine), dxs;
      for (int i = 0; i < VECTOR; ++i) {
        float difference = widen(xs[j].values[i]) - affine.mean[i];
        float value = widen(gradient.values[i]) - mean_gradient[i] - difference * slope[i];
        dxs.values[i] = narrow(value * affine.scale[i]);
      }
      store(dx, (size_t)row * channels + first, dxs);
    }
  }
}
"""


def make_source(
    kernels: str,
    dtype: str,
    activation: str = "",
    *,
    vector: int,
    has_residual: bool = False,
    second: str = NO_SECOND,
    has_mask: bool = False,
) -> str:
    """Return the source of some kernels.

    Args:
        kernels: `STATS`, `APPLY` or `GRADIENTS`.
        dtype: Name of the elements' data type.
        activation: Name of the activation; "" for none.
        vector: Channels of a thread, which divide the channels.
        has_residual: Whether a residual is added before the activation.
        second: What the gradient of the result is the sum of besides one array, as `SECOND_GRADIENTS` names it.
        has_mask: Whether a mask of the activation's derivative is written, or read.
    """
    value, derivative = ACTIVATION_CODE[activation]
    macros = {
        "VECTOR": vector,
        "THREADS": THREADS,
        "ROWS_IN_FLIGHT": ROWS_IN_FLIGHT,
        "STATS_ROWS_IN_FLIGHT": STATS_ROWS_IN_FLIGHT,
        "HAS_RESIDUAL": int(has_residual),
        "HAS_MASK": int(has_mask),
        "HAS_SECOND_GRADIENT": SECOND_GRADIENTS.index(second),
        "COMBINED_CHANNELS": COMBINED_CHANNELS,
        "COMBINING_THREADS": COMBINING_THREADS,
        "ACTIVATE": value,
        "DERIVE": derivative,
    }
    lines = [f"#define {name} ({text})\n" for name, text in macros.items()]
    return "".join(lines) + norm_source.make_common(dtype) + COMMON + kernels
