"""CUDA source of layer normalizations over the channels of arrays (rows, channels), and of their gradients.

A row has `LANES` threads, each with `STEPS` vectors of channels in registers, so that each tensor is read once. A CTA
takes `FLIGHT` rows per thread at a time. The gradients of weight and bias are sums over all rows: a CTA keeps them in
registers, and writes them to a workspace at its end, whose parts another kernel adds up in a fixed order.

The bias of the convolution or linear layer before the normalization may be added here, for its gradient is the sum of
the input's over the rows as well. The result may be stored in two data types: float32 for a sum, and another one for
convolutions under autocast, whose two gradients are added while they are read.

Source of the formulas: Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""

from __future__ import annotations

from tvmconv.arithmetic import ceil_div
from tvmconv.torch.typed_source import ADD_PARTS
from tvmconv.torch.typed_source import make_source as make_typed_source

MAX_STEPS = 3  # vectors of a thread
MAX_LANES = 256
WARP_LANES = (32, 16, 8, 4, 2, 1)  # powers of two up to a warp
MIN_USED_FRACTION = 0.7  # of the vectors of a row's threads

COMMON = """
// Return the sum of a value over the threads of a row, in all of them.
__device__ float sum_lanes(float value) {
#pragma unroll
  for (int distance = (LANES < 32 ? LANES : 32) / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, distance);
#if LANES > 32
  __shared__ float partial[THREADS / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[(threadIdx.y * LANES + threadIdx.x) / 32] = value;
  __syncthreads();
  value = 0.0f;
  for (int warp = 0; warp < LANES / 32; ++warp) value += partial[threadIdx.y * (LANES / 32) + warp];
#endif
  return value;
}

__device__ int find_channel(int k) { return (k * LANES + threadIdx.x) * VECTOR; }
"""

FORWARD = """
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm(const X* x, const float* x_bias, const float* weight, const float* bias, Y* y, LOW* low, float* stats,
           int rows, int channels, float eps) {
  begin();
  float offsets[STEPS][VECTOR], factors[STEPS][VECTOR], shifts[STEPS][VECTOR];
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    int first = find_channel(k);
    if (first >= channels) continue;
    load_channels(offsets[k], x_bias, first, 0.0f);
    load_channels(factors[k], weight, first, 1.0f);
    load_channels(shifts[k], bias, first, 0.0f);
  }
  int step = blockDim.y * FLIGHT;
  for (int begin_row = blockIdx.x * step; begin_row < rows; begin_row += gridDim.x * step) {
    Pack<X> xs[FLIGHT][STEPS];
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j)
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        int row = min(begin_row + j * (int)blockDim.y + (int)threadIdx.y, rows - 1);
        if (find_channel(k) < channels) xs[j][k] = load(x, (size_t)row * channels + find_channel(k));
      }
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j) {
      int row = begin_row + j * blockDim.y + threadIdx.y;
      float values[STEPS][VECTOR], sum = 0.0f, squares = 0.0f;
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        if (find_channel(k) < channels)
          for (int i = 0; i < VECTOR; ++i) sum += values[k][i] = widen(xs[j][k].values[i]) + offsets[k][i];
      float mean = sum_lanes(sum) / channels;
#pragma unroll
      for (int k = 0; k < STEPS; ++k)
        if (find_channel(k) < channels)
          for (int i = 0; i < VECTOR; ++i) squares += (values[k][i] - mean) * (values[k][i] - mean);
      float reciprocal = rsqrtf(sum_lanes(squares) / channels + eps);
      if (row >= rows) continue;
      if (threadIdx.x == 0) stats[row] = mean, stats[(size_t)rows + row] = reciprocal;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (find_channel(k) >= channels) continue;
        for (int i = 0; i < VECTOR; ++i)
          values[k][i] = (values[k][i] - mean) * reciprocal * factors[k][i] + shifts[k][i];
        size_t offset = (size_t)row * channels + find_channel(k);
        if (y) store(y, offset, values[k]);
        if (low) store(low, offset, values[k]);
      }
    }
  }
}
"""

BACKWARD = """
// The sums are those of the gradients of weight, bias and, if `SUMS` is 3, of the input's bias.
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_backward(const Y* dy, const LOW* dlow, const X* x, const float* x_bias, const float* weight,
                    const float* stats, X* dx, float* workspace, int rows, int channels) {
  begin();
  float offsets[STEPS][VECTOR], factors[STEPS][VECTOR], sums[SUMS][STEPS][VECTOR] = {};
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    int first = find_channel(k);
    if (first >= channels) continue;
    load_channels(offsets[k], x_bias, first, 0.0f);
    load_channels(factors[k], weight, first, 1.0f);
  }
  int step = blockDim.y * FLIGHT;
  for (int begin_row = blockIdx.x * step; begin_row < rows; begin_row += gridDim.x * step) {
    Pack<X> xs[FLIGHT][STEPS];
    Pack<Y> dys[FLIGHT][STEPS];
    Pack<LOW> dlows[FLIGHT][STEPS];
    float means[FLIGHT], reciprocals[FLIGHT];
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j) {
      int row = min(begin_row + j * (int)blockDim.y + (int)threadIdx.y, rows - 1);
      means[j] = stats[row], reciprocals[j] = stats[(size_t)rows + row];
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (find_channel(k) >= channels) continue;
        size_t offset = (size_t)row * channels + find_channel(k);
        xs[j][k] = load(x, offset);
        if (HAS_DY) dys[j][k] = load(dy, offset);
        if (HAS_DLOW) dlows[j][k] = load(dlow, offset);
      }
    }
#pragma unroll
    for (int j = 0; j < FLIGHT; ++j) {
      int row = begin_row + j * blockDim.y + threadIdx.y;
      float normalized[STEPS][VECTOR], gradients[STEPS][VECTOR], sum = 0.0f, product = 0.0f;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (find_channel(k) >= channels) continue;
        for (int i = 0; i < VECTOR; ++i) {
          float gradient = HAS_DY ? widen(dys[j][k].values[i]) : 0.0f;
          if (HAS_DLOW) gradient += widen(dlows[j][k].values[i]);
          normalized[k][i] = (widen(xs[j][k].values[i]) + offsets[k][i] - means[j]) * reciprocals[j];
          if (row < rows) sums[0][k][i] += gradient * normalized[k][i], sums[1][k][i] += gradient;
          gradients[k][i] = gradient * factors[k][i];
          sum += gradients[k][i], product += gradients[k][i] * normalized[k][i];
        }
      }
      sum = sum_lanes(sum) / channels, product = sum_lanes(product) / channels;
      if (row >= rows) continue;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (find_channel(k) >= channels) continue;
        for (int i = 0; i < VECTOR; ++i) {
          gradients[k][i] = (gradients[k][i] - sum - normalized[k][i] * product) * reciprocals[j];
          if (SUMS > 2) sums[SUMS - 1][k][i] += round_as(dx, gradients[k][i]);
        }
        store(dx, (size_t)row * channels + find_channel(k), gradients[k]);
      }
    }
  }
  __shared__ float shared[THREADS * (VECTOR + 1)];
  int thread = threadIdx.y * LANES + threadIdx.x;
  for (int s = 0; s < SUMS; ++s)
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      __syncthreads();
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        shared[thread * (VECTOR + 1) + i] = s == 0 ? sums[0][k][i] : s == 1 ? sums[1][k][i] : sums[SUMS - 1][k][i];
      __syncthreads();
      for (int index = thread; index < LANES * VECTOR; index += THREADS) {
        float total = 0.0f;
        for (int y = 0; y < blockDim.y; ++y)
          total += shared[(y * LANES + index / VECTOR) * (VECTOR + 1) + index % VECTOR];
        int channel = k * LANES * VECTOR + index;
        if (channel < channels) workspace[((size_t)blockIdx.x * SUMS + s) * channels + channel] = total;
      }
    }
}
"""


def choose_lanes(num_vectors: int) -> tuple[int, int] | None:
    """Return threads of a row, and vectors of each of them; None if a row has too many vectors.

    A row in one warp needs no shared memory. Fewer vectors of a thread leave registers to more threads, as long as most
    threads have one.
    """
    for all_lanes in (WARP_LANES, (64, 128, MAX_LANES)):
        choices = [(lanes, ceil_div(num_vectors, lanes)) for lanes in all_lanes]
        valid = [(lanes, steps) for lanes, steps in choices if steps <= MAX_STEPS]
        used = [(num_vectors / (lanes * steps), lanes, steps) for lanes, steps in valid]
        if used:
            good = [each for each in used if each[0] >= MIN_USED_FRACTION] or [max(used)]
            return min(good, key=lambda each: each[2])[1:]
    return None


def make_forward_source(vector: int, lanes: int, steps: int, types: dict[str, str], flight: int) -> str:
    """Return the source of `layer_norm`.

    Args:
        vector: Neighbouring channels of a thread.
        lanes: Threads of a row.
        steps: Vectors of a thread.
        types: Data types of the input `X`, the result `Y`, and the result in another type `LOW`.
        flight: Rows that a thread loads before it computes.
    """
    macros = {"LANES": lanes, "STEPS": steps, "FLIGHT": flight}
    return make_typed_source(COMMON + FORWARD, vector, types, macros)


def make_backward_source(
    vector: int,
    lanes: int,
    steps: int,
    types: dict[str, str],
    flight: int,
    *,
    num_sums: int,
    has_dy: bool,
    has_low: bool,
) -> str:
    """Return the source of `layer_norm_backward` and `add_parts`.

    Args:
        vector: Neighbouring channels of a thread.
        lanes: Threads of a row.
        steps: Vectors of a thread.
        types: Data types as of the forward pass.
        flight: Rows that a thread loads before it computes.
        num_sums: Number of gradients of parameters: 3 with the input's bias, else 2.
        has_dy: Whether there is a gradient of the result.
        has_low: Whether there is a gradient of the result in the other type.
    """
    macros = {
        **{"LANES": lanes, "STEPS": steps, "FLIGHT": flight, "SUMS": num_sums},
        **{"HAS_DY": int(has_dy), "HAS_DLOW": int(has_low)},
    }
    return make_typed_source(ADD_PARTS + COMMON + BACKWARD, vector, types, macros)
