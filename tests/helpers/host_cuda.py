"""CUDA source of small kernels compiled for the CPU, with one thread for each thread of a CTA."""

import ctypes
import subprocess

PRELUDE = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>
using std::max; using std::min; using std::size_t;
struct Dim { unsigned x, y, z; };
struct float2 { float x, y; };
static thread_local Dim threadIdx, blockIdx;
static Dim blockDim, gridDim;
static std::unique_ptr<std::barrier<>> cta;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
static void __syncthreads() { cta->arrive_and_wait(); }
static void __syncwarp() { warps[threadIdx.y]->arrive_and_wait(); }
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
template <class Kernel> void run_grid(const int* sizes, Kernel kernel) {
  gridDim = {(unsigned)sizes[0], (unsigned)sizes[1], (unsigned)sizes[2]};
  blockDim = {(unsigned)sizes[3], (unsigned)sizes[4], 1};
  cta = std::make_unique<std::barrier<>>(blockDim.x * blockDim.y);
  warps.clear();
  for (unsigned row = 0; row < blockDim.y; ++row) warps.push_back(std::make_unique<std::barrier<>>(blockDim.x));
  std::vector<std::thread> threads;
  for (unsigned y = 0; y < blockDim.y; ++y)
    for (unsigned x = 0; x < blockDim.x; ++x)
      threads.emplace_back([=] {
        threadIdx = {x, y, 0};
        for (unsigned k = 0; k < gridDim.z; ++k)
          for (unsigned j = 0; j < gridDim.y; ++j)
            for (unsigned i = 0; i < gridDim.x; ++i) {
              blockIdx = {i, j, k};
              kernel();
              cta->arrive_and_wait();
            }
      });
  for (auto& thread : threads) thread.join();
}
"""


def compile_kernels(source, names, folder):
    """Compile kernels without `asm` statements; return functions of a launch and of their parameters, by name."""
    text = PRELUDE + source + RUN
    for name in names:
        text += f"""
template <class... Args> void expand_{name}(const int* sizes, void (*kernel)(Args...), void** values) {{
  size_t index = 0;
  std::tuple<Args...> arguments{{*(Args*)values[index++]...}};
  run_grid(sizes, [=] {{ std::apply(kernel, arguments); }});
}}
extern "C" void launch_{name}(const int* sizes, void** values) {{ expand_{name}(sizes, {name}, values); }}
"""
    path = folder / "kernels.cpp"
    path.write_text("#include <tuple>\n" + text)
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
            getattr(loaded, f"launch_{name}")(sizes, pointers)

        return launch

    return {name: make_launch(name) for name in names}


def _to_c(parameter):
    if parameter is None:
        return ctypes.c_void_p(0)
    if isinstance(parameter, float):
        return ctypes.c_float(parameter)
    return ctypes.c_int(parameter) if isinstance(parameter, int) else ctypes.c_void_p(parameter.data_ptr())
