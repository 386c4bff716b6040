"""CUDA source of kernels over arrays (rows, channels) whose tensors have different data types.

A residual network under autocast has float32 sums, and float16 or bfloat16 results of convolutions. The kernels of
`layer_norm_source.py` and `elementwise_source.py` therefore have a type for each tensor, and move `VECTOR` neighbouring
channels in one access or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tvmconv.torch import norm_source

THREADS = 256
COMBINED_CHANNELS, COMBINING_THREADS = 32, 32  # columns of a CTA that adds up a workspace, and its threads for each

# Types of elements by data type, with their conversions. Source: PTX ISA, "cvt".
TYPE_NAMES = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat"}
TYPES = {
    "float32": """
__device__ float widen(float x) { return x; }
__device__ void narrow(float x, float& y) { y = x; }
""",
    "float16": """
struct Half { unsigned short bits; };
__device__ float widen(Half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ void narrow(float x, Half& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
""",
    "bfloat16": """
struct Bfloat { unsigned short bits; };
__device__ float widen(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void narrow(float x, Bfloat& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
""",
}

COMMON = """
template <class T> struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Pack { T values[VECTOR]; };

template <class T> __device__ Pack<T> load(const T* array, size_t offset) { return *(const Pack<T>*)(array + offset); }
template <class T> __device__ void store(T* array, size_t offset, const float (&values)[VECTOR]) {
  Pack<T> pack;
  for (int i = 0; i < VECTOR; ++i) narrow(values[i], pack.values[i]);
  *(Pack<T>*)(array + offset) = pack;
}

// Load one number for each channel of a thread; `missing` where there is no array.
__device__ void load_channels(float (&values)[VECTOR], const float* array, int first, float missing) {
  for (int i = 0; i < VECTOR; ++i) values[i] = array ? array[first + i] : missing;
}

// Round a number as it is stored in an array.
template <class T> __device__ float round_as(const T*, float x) { T y; narrow(x, y); return widen(y); }
"""

ADD_PARTS = """
// Add up the parts of a workspace (samples, parts, columns) in a fixed order. A CTA has 32 columns of one sample.
extern "C" __global__ void add_parts(const float* workspace, float* results, int parts, int columns) {
  begin();
  __shared__ float shared[COMBINING_THREADS][COMBINED_CHANNELS];
  int column = blockIdx.x * COMBINED_CHANNELS + threadIdx.x;
  const float* sums = workspace + (size_t)blockIdx.y * parts * columns + min(column, columns - 1);
  float total = 0.0f;
#pragma unroll 8
  for (int part = threadIdx.y; part < parts; part += COMBINING_THREADS) total += sums[(size_t)part * columns];
  shared[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y || column >= columns) return;
#pragma unroll
  for (int row = 1; row < COMBINING_THREADS; ++row) total += shared[row][threadIdx.x];
  results[(size_t)blockIdx.y * columns + column] = total;
}
"""


def make_source(kernels: str, vector: int, types: Mapping[str, str], macros: Mapping[str, object]) -> str:
    """Return the source of kernels.

    Args:
        kernels: Their text, with `ADD_PARTS` if they fill a workspace.
        vector: Neighbouring channels of a thread.
        types: Data types of the tensors by the names that the kernels give to the types of their elements.
        macros: Other macros of the kernels.
    """
    values: dict[str, object] = {
        "VECTOR": vector,
        "THREADS": THREADS,
        "COMBINED_CHANNELS": COMBINED_CHANNELS,
        "COMBINING_THREADS": COMBINING_THREADS,
        **{name: TYPE_NAMES[dtype] for name, dtype in types.items()},
        **macros,
    }
    lines = (f"#define {name} {value}\n" for name, value in values.items())
    return "".join((*lines, norm_source.BEGIN, *_list_types(types.values()), norm_source.STORE_SUMS, COMMON, kernels))


def _list_types(dtypes: Iterable[str]) -> Iterable[str]:
    return (TYPES[dtype] for dtype in dict.fromkeys(("float32", *dtypes)))
