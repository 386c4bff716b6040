"""CUDA source that the kernels of batch and group normalizations share.

Elements are loaded in vectors of `VECTOR`. Sums over rows are those of an array (rows, channels), as a channels-last
image has: a thread has `VECTOR` neighbouring channels, and loads `STATS_ROWS_IN_FLIGHT` rows before it adds them.
"""

from __future__ import annotations

# Conversions of an element to float32 and back, with rounding to nearest even. Source: PTX ISA, "cvt".
CONVERSIONS = {
    "float32": """
typedef float Element;
__device__ float widen(Element x) { return x; }
__device__ Element narrow(float x) { return x; }
""",
    "float16": """
typedef unsigned short Element;
__device__ float widen(Element x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ Element narrow(float x) { Element y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
""",
    "bfloat16": """
typedef unsigned short Element;
__device__ float widen(Element x) { return __uint_as_float((unsigned)x << 16); }
__device__ Element narrow(float x) { Element y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
""",
}

BEGIN = """
// Wait for the end of the previous kernel on the stream, and let the next one start. Source: PTX ISA, "griddepcontrol".
__device__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
"""

# The kernels that call it have the macros `VECTOR` and `THREADS`.
STORE_SUMS = """
// Add up the sums of a CTA's threads with equal columns, and write them to the workspace (gridDim.y, K, channels).
template <int K> __device__ void store_sums(float (&sums)[K][VECTOR], float* workspace, int channels) {
  const int pitch = K * VECTOR + 1;  // odd for even VECTOR, so that neighbouring threads are in different banks
  __shared__ float shared[THREADS * pitch];
  int thread = threadIdx.y * blockDim.x + threadIdx.x, values = blockDim.x * VECTOR;
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < VECTOR; ++i) shared[thread * pitch + k * VECTOR + i] = sums[k][i];
  __syncthreads();
  for (int index = thread; index < K * values; index += blockDim.x * blockDim.y) {
    int k = index / values, column = index % values / VECTOR, i = index % VECTOR;
    int channel = blockIdx.x * values + index % values;
    float sum = 0.0f;
    for (int row = 0; row < blockDim.y; ++row)
      sum += shared[(row * blockDim.x + column) * pitch + k * VECTOR + i];
    if (channel < channels) workspace[((size_t)blockIdx.y * K + k) * channels + channel] = sum;
  }
}
"""

COMMON = """
struct alignas(VECTOR * sizeof(Element)) Vector { Element values[VECTOR]; };

__device__ Vector load(const Element* array, size_t offset) { return *(const Vector*)(array + offset); }
__device__ void store(Element* array, size_t offset, const Vector& vector) { *(Vector*)(array + offset) = vector; }

// Add up the differences of all rows from the first one, and their squares, into a workspace (gridDim.y, 2, channels).
__device__ void sum_differences(const Element* x, float* workspace, int rows, int channels) {
  int first = (blockIdx.x * blockDim.x + threadIdx.x) * VECTOR, step = gridDim.y * blockDim.y;
  float sums[2][VECTOR] = {}, origin[VECTOR];
  if (first < channels) {
    Vector first_row = load(x, first);
    for (int i = 0; i < VECTOR; ++i) origin[i] = widen(first_row.values[i]);
    for (int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += STATS_ROWS_IN_FLIGHT * step) {
      Vector xs[STATS_ROWS_IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < STATS_ROWS_IN_FLIGHT; ++j)
        xs[j] = load(x, (size_t)min(row + j * step, rows - 1) * channels + first);
#pragma unroll
      for (int j = 0; j < STATS_ROWS_IN_FLIGHT; ++j) {
        if (row + j * step >= rows) break;
        for (int i = 0; i < VECTOR; ++i) {
          float difference = widen(xs[j].values[i]) - origin[i];
          sums[0][i] += difference;
          sums[1][i] += difference * difference;
        }
      }
    }
  }
  store_sums(sums, workspace, channels);
}
"""


def make_common(dtype: str) -> str:
    """Return the source for elements of a data type, which needs the macros named above and `THREADS`."""
    return CONVERSIONS[dtype] + BEGIN + STORE_SUMS + COMMON
