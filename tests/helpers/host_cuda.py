"""CUDA source of small kernels compiled for the CPU, with one thread for each thread of a CTA."""

import ctypes
import subprocess

# Headers of the standard library take longer to compile than the kernels, so that functions are declared here instead.
PRELUDE = """
#include <pthread.h>
#include <stddef.h>
extern "C" {
float erff(float); float expf(float); float fabsf(float); float fmaxf(float, float); float fminf(float, float);
float sqrtf(float); float tanhf(float);
}
template <class T> T max(T x, T y) { return x < y ? y : x; }
template <class T> T min(T x, T y) { return y < x ? y : x; }
struct Dim { unsigned x, y, z; };
struct float2 { float x, y; };
static thread_local Dim threadIdx, blockIdx;
static Dim blockDim, gridDim;
static pthread_barrier_t cta, warps[1024];
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
static void __syncthreads() { pthread_barrier_wait(&cta); }
static void __syncwarp() { pthread_barrier_wait(&warps[threadIdx.y]); }
static float exchanged[1024];
static float __shfl_xor_sync(unsigned, float value, int distance) {  // among the threads of a row of the CTA
  unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
  exchanged[thread] = value;
  __syncwarp();
  float other = exchanged[thread ^ distance];
  __syncwarp();
  return other;
}
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
"""
RUN = """
struct Grid { void (*call)(void**); void** values; };
struct Thread { Grid* grid; Dim index; pthread_t handle; };

static void* run_thread(void* argument) {
  Thread* thread = (Thread*)argument;
  threadIdx = thread->index;
  for (unsigned k = 0; k < gridDim.z; ++k)
    for (unsigned j = 0; j < gridDim.y; ++j)
      for (unsigned i = 0; i < gridDim.x; ++i) {
        blockIdx = {i, j, k};
        thread->grid->call(thread->grid->values);
        pthread_barrier_wait(&cta);
      }
  return nullptr;
}

static int run_grid(const int* sizes, Grid grid) {
  gridDim = {(unsigned)sizes[0], (unsigned)sizes[1], (unsigned)sizes[2]};
  blockDim = {(unsigned)sizes[3], (unsigned)sizes[4], 1};
  unsigned count = blockDim.x * blockDim.y;
  Thread threads[1024];
  pthread_barrier_init(&cta, nullptr, count);
  for (unsigned row = 0; row < blockDim.y; ++row) pthread_barrier_init(&warps[row], nullptr, blockDim.x);
  for (unsigned i = 0; i < count; ++i) {
    threads[i] = {&grid, {i % blockDim.x, i / blockDim.x, 0}};
    if (int error = pthread_create(&threads[i].handle, nullptr, run_thread, &threads[i])) return error;
  }
  for (unsigned i = 0; i < count; ++i) pthread_join(threads[i].handle, nullptr);
  return 0;
}

template <int... index> struct Indices {};
template <class... Args, int... index>
void call_with(void (*kernel)(Args...), void** values, Indices<index...>) { kernel(*(Args*)values[index]...); }
template <class... Args> void call(void (*kernel)(Args...), void** values) {
  call_with(kernel, values, Indices<__integer_pack(sizeof...(Args))...>());
}
"""


def compile_kernels(source, names, folder):
    """Compile kernels without `asm` statements; return functions of a launch and of their parameters, by name."""
    text = PRELUDE + source + RUN
    for name in names:
        text += f"""
static void call_{name}(void** values) {{ call({name}, values); }}
extern "C" int launch_{name}(const int* sizes, void** values) {{ return run_grid(sizes, {{call_{name}, values}}); }}
"""
    path = folder / "kernels.cpp"
    path.write_text(text)
    library = path.with_suffix(".so")
    # Static variables of templates are shared memory, whose size differs among libraries.
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-fno-gnu-unique"]
    subprocess.run(["g++", *options, path, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))

    def make_launch(name):
        def launch(shape, parameters):
            values = [_to_c(each) for each in parameters]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
            sizes = (ctypes.c_int * 5)(*shape.grid, *shape.block[:2])
            assert not getattr(loaded, f"launch_{name}")(sizes, pointers)

        return launch

    return {name: make_launch(name) for name in names}


def _to_c(parameter):
    if parameter is None:
        return ctypes.c_void_p(0)
    if isinstance(parameter, float):
        return ctypes.c_float(parameter)
    return ctypes.c_int(parameter) if isinstance(parameter, int) else ctypes.c_void_p(parameter.data_ptr())
