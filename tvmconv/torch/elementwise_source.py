"""CUDA source of element-wise operations over arrays (rows, channels), and of their gradients with sums over rows.

| kernel | computes |
| --- | --- |
| `activate`, `activate_backward` | z = activation(x + bias) |
| `scale_add`, `scale_add_backward` | y = (z + bias) * scale * noise + x, with one number per channel, or per sample |
| `gate`, `gate_backward` | y = x * s, with one number for each channel of each sample |

The biases are those of a convolution or linear layer before the operation: their gradients are sums of gradients that
are in registers here. A thread has `VECTOR` neighbouring channels and every `gridDim.y * blockDim.y`-th row. Reductions
keep sums in registers, and write those of each CTA to a workspace, whose parts another kernel adds up in a fixed order.
The result of `scale_add` may be stored in two data types, as that of a layer normalization.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvmconv.torch import batch_norm_source, group_norm_source
from tvmconv.torch.typed_source import ADD_PARTS
from tvmconv.torch.typed_source import make_source as make_typed_source

ROWS_IN_FLIGHT = 4  # rows that a thread loads before it computes

GELU_DERIVATIVE = "0.5f * (1.0f + erff(u * 0.70710678f)) + u * 0.39894228f * expf(-0.5f * u * u)"
ACTIVATION_CODE = {
    "gelu": (group_norm_source.ACTIVATION_CODE["gelu"], GELU_DERIVATIVE),
    "gelu_tanh": (group_norm_source.ACTIVATION_CODE["gelu_tanh"], "derive_gelu_tanh(u)"),
    **{name: batch_norm_source.ACTIVATION_CODE[name] for name in ("relu", "silu", "hardswish")},
}

START = """
  begin();
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  int begin_row = blockIdx.y * blockDim.y + threadIdx.y;
"""

ACTIVATIONS_COMMON = """
__device__ float derive_silu(float u) {
  float sigmoid = 1.0f / (1.0f + expf(-u));
  return sigmoid * (1.0f + u * (1.0f - sigmoid));
}
__device__ float derive_gelu_tanh(float u) {
  float square = u * u, t = tanhf(0.79788456f * u * (1.0f + 0.044715f * square));
  return 0.5f * (1.0f + t) + 0.5f * u * (1.0f - t * t) * 0.79788456f * (1.0f + 0.134145f * square);
}
__device__ float activate_number(float u) { return ACTIVATION; }
__device__ float derive(float u) { return DERIVATIVE; }
"""

ACTIVATE = """
extern "C" __global__ void __launch_bounds__(THREADS)
activate(const X* x, const float* bias, X* z, int rows, int channels) {
  START
  if (first >= channels) return;
  float offsets[VECTOR];
  load_channels(offsets, bias, first, 0.0f);
  for (int row = begin_row; row < rows; row += ROWS_IN_FLIGHT * step) {
    Pack<X> xs[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) xs[j] = load(x, (size_t)min(row + j * step, rows - 1) * channels + first);
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      if (row + j * step >= rows) break;
      float values[VECTOR];
      for (int i = 0; i < VECTOR; ++i) values[i] = activate_number(widen(xs[j].values[i]) + offsets[i]);
      store(z, (size_t)(row + j * step) * channels + first, values);
    }
  }
}
"""

ACTIVATE_BACKWARD = """
extern "C" __global__ void __launch_bounds__(THREADS)
activate_backward(const X* dz, const X* x, const float* bias, X* dx, float* workspace, int rows, int channels) {
  START
  float sums[1][VECTOR] = {};
  if (first < channels) {
    float offsets[VECTOR];
    load_channels(offsets, bias, first, 0.0f);
    for (int row = begin_row; row < rows; row += ROWS_IN_FLIGHT * step) {
      Pack<X> xs[ROWS_IN_FLIGHT], dzs[ROWS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        size_t offset = (size_t)min(row + j * step, rows - 1) * channels + first;
        xs[j] = load(x, offset), dzs[j] = load(dz, offset);
      }
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        if (row + j * step >= rows) break;
        float values[VECTOR];
        for (int i = 0; i < VECTOR; ++i) {
          values[i] = widen(dzs[j].values[i]) * derive(widen(xs[j].values[i]) + offsets[i]);
          sums[0][i] += round_as(dx, values[i]);
        }
        store(dx, (size_t)(row + j * step) * channels + first, values);
      }
    }
  }
  store_sums(sums, workspace, channels);
}
"""

SCALE_ADD = """
extern "C" __global__ void __launch_bounds__(THREADS)
scale_add(const Z* z, const float* bias, const float* scale, const float* noise, const X* x, Y* y, LOW* low, int rows,
          int channels, int rows_per_sample) {
  START
  if (first >= channels) return;
  float offsets[VECTOR], factors[VECTOR];
  load_channels(offsets, bias, first, 0.0f);
  load_channels(factors, scale, first, 1.0f);
  for (int row = begin_row; row < rows; row += ROWS_IN_FLIGHT * step) {
    Pack<Z> zs[ROWS_IN_FLIGHT];
    Pack<X> xs[ROWS_IN_FLIGHT];
    float sample_factors[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      int near = min(row + j * step, rows - 1);
      zs[j] = load(z, (size_t)near * channels + first), xs[j] = load(x, (size_t)near * channels + first);
      sample_factors[j] = noise ? noise[near / rows_per_sample] : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      if (row + j * step >= rows) break;
      float values[VECTOR];
      for (int i = 0; i < VECTOR; ++i)
        values[i] = (widen(zs[j].values[i]) + offsets[i]) * factors[i] * sample_factors[j] + widen(xs[j].values[i]);
      size_t offset = (size_t)(row + j * step) * channels + first;
      if (y) store(y, offset, values);
      if (low) store(low, offset, values);
    }
  }
}
"""

SCALE_ADD_BACKWARD = """
// The sums are the gradients of bias and scale. Without `dx`, the gradient of x is that of the result.
extern "C" __global__ void __launch_bounds__(THREADS)
scale_add_backward(const Y* dy, const LOW* dlow, const Z* z, const float* bias, const float* scale, const float* noise,
                   X* dx, Z* dz, float* workspace, int rows, int channels, int rows_per_sample) {
  START
  float sums[2][VECTOR] = {};
  if (first < channels) {
    float offsets[VECTOR], factors[VECTOR];
    load_channels(offsets, bias, first, 0.0f);
    load_channels(factors, scale, first, 1.0f);
    for (int row = begin_row; row < rows; row += ROWS_IN_FLIGHT * step) {
      Pack<Z> zs[ROWS_IN_FLIGHT];
      Pack<Y> dys[ROWS_IN_FLIGHT];
      Pack<LOW> dlows[ROWS_IN_FLIGHT];
      float sample_factors[ROWS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        int near = min(row + j * step, rows - 1);
        size_t offset = (size_t)near * channels + first;
        if (HAS_DY) dys[j] = load(dy, offset);
        if (HAS_DLOW) dlows[j] = load(dlow, offset);
        if (scale) zs[j] = load(z, offset);
        sample_factors[j] = noise ? noise[near / rows_per_sample] : 1.0f;
      }
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        if (row + j * step >= rows) break;
        float gradients[VECTOR], products[VECTOR];
        for (int i = 0; i < VECTOR; ++i) {
          gradients[i] = HAS_DY ? widen(dys[j].values[i]) : 0.0f;
          if (HAS_DLOW) gradients[i] += widen(dlows[j].values[i]);
          products[i] = gradients[i] * sample_factors[j] * factors[i];
          sums[0][i] += round_as(dz, products[i]);
          if (scale) sums[1][i] += gradients[i] * sample_factors[j] * (widen(zs[j].values[i]) + offsets[i]);
        }
        size_t offset = (size_t)(row + j * step) * channels + first;
        if (dx) store(dx, offset, gradients);
        store(dz, offset, products);
      }
    }
  }
  if (workspace) store_sums(sums, workspace, channels);
}
"""

GATE = """
extern "C" __global__ void __launch_bounds__(THREADS)
gate(const X* x, const S* s, X* y, int pixels, int channels) {
  START
  if (first >= channels) return;
  size_t image = (size_t)blockIdx.z * pixels * channels;
  Pack<S> factors = load(s, (size_t)blockIdx.z * channels + first);
  for (int row = begin_row; row < pixels; row += ROWS_IN_FLIGHT * step) {
    Pack<X> xs[ROWS_IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j)
      xs[j] = load(x, image + (size_t)min(row + j * step, pixels - 1) * channels + first);
#pragma unroll
    for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
      if (row + j * step >= pixels) break;
      float values[VECTOR];
      for (int i = 0; i < VECTOR; ++i) values[i] = widen(xs[j].values[i]) * widen(factors.values[i]);
      store(y, image + (size_t)(row + j * step) * channels + first, values);
    }
  }
}
"""

GATE_BACKWARD = """
extern "C" __global__ void __launch_bounds__(THREADS)
gate_backward(const X* dy, const X* x, const S* s, X* dx, float* workspace, int pixels, int channels) {
  START
  float sums[1][VECTOR] = {};
  if (first < channels) {
    size_t image = (size_t)blockIdx.z * pixels * channels;
    Pack<S> factors = load(s, (size_t)blockIdx.z * channels + first);
    for (int row = begin_row; row < pixels; row += ROWS_IN_FLIGHT * step) {
      Pack<X> xs[ROWS_IN_FLIGHT], dys[ROWS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        size_t offset = image + (size_t)min(row + j * step, pixels - 1) * channels + first;
        xs[j] = load(x, offset), dys[j] = load(dy, offset);
      }
#pragma unroll
      for (int j = 0; j < ROWS_IN_FLIGHT; ++j) {
        if (row + j * step >= pixels) break;
        float values[VECTOR];
        for (int i = 0; i < VECTOR; ++i) {
          float gradient = widen(dys[j].values[i]);
          sums[0][i] += gradient * widen(xs[j].values[i]);
          values[i] = gradient * widen(factors.values[i]);
        }
        store(dx, image + (size_t)(row + j * step) * channels + first, values);
      }
    }
  }
  store_sums(sums, workspace + (size_t)blockIdx.z * gridDim.y * channels, channels);
}
"""


def make_activation_source(vector: int, dtype: str, activation: str, *, is_backward: bool) -> str:
    """Return the source of `activate` or of its gradient, for tensors of a data type."""
    value, derivative = ACTIVATION_CODE[activation]
    macros = {"ACTIVATION": f"({value})", "DERIVATIVE": f"({derivative})"}
    kernels = ADD_PARTS + ACTIVATE_BACKWARD if is_backward else ACTIVATE
    return _make_source(ACTIVATIONS_COMMON + kernels, vector, {"X": dtype}, macros)


def make_scale_add_source(vector: int, types: dict[str, str]) -> str:
    """Return the source of `scale_add`, for data types of `Z`, `X`, the result `Y`, and in another type `LOW`."""
    return _make_source(SCALE_ADD, vector, types, {})


def make_scale_add_backward_source(vector: int, types: dict[str, str], *, has_dy: bool, has_low: bool) -> str:
    """Return the source of the gradient of `scale_add`.

    Args:
        vector: Neighbouring channels of a thread.
        types: Data types as of the forward pass.
        has_dy: Whether there is a gradient of the result.
        has_low: Whether there is a gradient of the result in the other type.
    """
    macros = {"HAS_DY": int(has_dy), "HAS_DLOW": int(has_low)}
    return _make_source(ADD_PARTS + SCALE_ADD_BACKWARD, vector, types, macros)


def make_gate_source(vector: int, types: dict[str, str], *, is_backward: bool) -> str:
    """Return the source of `gate` or of its gradient, for data types of `X` and of the factors `S`."""
    return _make_source(ADD_PARTS + GATE_BACKWARD if is_backward else GATE, vector, types, {})


def _make_source(kernels: str, vector: int, types: Mapping[str, str], macros: Mapping[str, object]) -> str:
    text = kernels.replace("  START\n", START)
    return make_typed_source(text, vector, types, {"ROWS_IN_FLIGHT": ROWS_IN_FLIGHT, **macros})
