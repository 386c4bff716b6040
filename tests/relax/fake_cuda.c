/* CUDA's driver where there is none: it writes what it is asked to encode and to launch to the file $FAKE_CUDA_LOG. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

static FILE* file(void) {
  static FILE* opened;
  if (!opened) opened = fopen(getenv("FAKE_CUDA_LOG"), "w"), setvbuf(opened, NULL, _IONBF, 0);
  return opened;
}

static void write_long(const char* name, const uint64_t* numbers, int count) {
  fprintf(file(), " %s", name);
  for (int i = 0; i < count; ++i) fprintf(file(), i ? ",%llu" : "%llu", (unsigned long long)numbers[i]);
}

static void write_ints(const char* name, const void* numbers, int count) {
  fprintf(file(), " %s", name);
  for (int i = 0; i < count; ++i) fprintf(file(), i ? ",%d" : "%d", ((const int*)numbers)[i]);
}

static int num_maps;

static int finish(void* map) {
  for (int i = 0; i < 16; ++i) ((uint64_t*)map)[i] = 1000 * num_maps + i;
  ++num_maps;
  fprintf(file(), "\n");
  return (uintptr_t)map % 64 ? 1 : 0;
}

int cuInit(unsigned flags) { return 0 * flags; }
int cuGetErrorString(int code, const char** text) { return *text = code == 1 ? "invalid argument" : "no binary", 0; }
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = (void*)(uintptr_t)(device + 100), 0; }
int cuCtxGetCurrent(void** context) { return *context = NULL, 0; }
int cuCtxSetCurrent(void* context) { return fprintf(file(), "context %d\n", (int)(uintptr_t)context), 0; }
int cuLibraryUnload(void* library) { return fprintf(file(), "unload %d\n", library != NULL), 0; }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  *library = (void*)code;
  return getenv("FAKE_CUDA_REFUSES") || a || b || c || d || e || f || memcmp(code, "\177ELF", 4) ? 209 : 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  return *kernel = (void*)name, library == NULL;
}
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) {
  return fprintf(file(), "attribute %s %d %d\n", (char*)function, attribute, value), 0;
}

int cuTensorMapEncodeTiled(void* map, int dtype, uint32_t rank, void* address, const uint64_t* extents,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  const int last[] = {interleave, swizzle, promotion, fill};
  fprintf(file(), "cuTensorMapEncodeTiled %d %u %llu", dtype, rank, (unsigned long long)(uintptr_t)address);
  write_long("", extents, rank), write_long("", strides, rank - 1), write_ints("", box, rank);
  write_ints("", steps, rank), write_ints("", last, 4);
  return finish(map);
}

int cuTensorMapEncodeIm2col(void* map, int dtype, uint32_t rank, void* address, const uint64_t* extents,
                            const uint64_t* strides, const int* lower, const int* upper, uint32_t channels,
                            uint32_t pixels, const uint32_t* steps, int interleave, int swizzle, int promotion,
                            int fill) {
  const int last[] = {interleave, swizzle, promotion, fill};
  fprintf(file(), "cuTensorMapEncodeIm2col %d %u %llu", dtype, rank, (unsigned long long)(uintptr_t)address);
  write_long("", extents, rank), write_long("", strides, rank - 1), write_ints("", lower, rank - 2);
  write_ints("", upper, rank - 2), fprintf(file(), " %u %u", channels, pixels);
  write_ints("", steps, rank), write_ints("", last, 4);
  return finish(map);
}

typedef struct {
  uint32_t numbers[7];
  void* stream;
  struct {
    int id;
    char padding[4];
    int value;
  } * attributes;
  unsigned num_attributes;
} Config;

int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
  fprintf(file(), "launch %s", (char*)function);
  write_ints("", config->numbers, 7);
  fprintf(file(), " stream %d", (int)(uintptr_t)config->stream);
  for (unsigned i = 0; i < config->num_attributes; ++i)
    fprintf(file(), " attribute %d %d", config->attributes[i].id, config->attributes[i].value);
  for (int i = 0; i < atoi(getenv("FAKE_CUDA_PARAMS")); ++i)
    fprintf(file(), " %llu", (unsigned long long)*(uint64_t*)params[i]);
  return fprintf(file(), "\n"), extra != NULL;
}

#ifdef __cplusplus
}
#endif
