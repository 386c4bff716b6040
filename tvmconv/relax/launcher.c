/* Launches of tvmconv's CUDA kernels inside a library that TVM exports.
 *
 * The file is followed by generated tables of one `Function` per convolution, and by its entry point. It calls the CUDA
 * driver, which it opens when a function is called first, so that a library links and loads without CUDA. It is needed
 * for what TVM's runtime does not do: tensor maps, clusters, and programmatic dependent launch.
 *
 * Numbers and structures of the driver are those of cuda.h 12.0 and later. Compilers read the file as C or as C++.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* TVM's calling convention and DLPack's tensor. Sources: tvm/ffi/c_api.h, tvm/ffi/extra/c_env_api.h, dlpack.h. */
typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t number;
    void* pointer;
  } value;
} TVMFFIAny;

typedef struct {
  uint64_t reference_counts;
  int32_t type_index;
  uint32_t padding;
  void* deleter;
} TVMFFIObject; /* header of a tensor object, which a DLTensor follows */

typedef struct {
  void* data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

enum { kDLCUDA = 2, kTVMFFIDLTensorPtr = 7, kTVMFFITensor = 70 };

#ifdef __cplusplus
#define EXPORT extern "C"
#else
#define EXPORT extern
#endif
EXPORT void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message);
EXPORT void* TVMFFIEnvGetStream(int32_t device_type, int32_t device_id);

#define MAX_AXES 5
#define MAX_ARRAYS 24
#define MAX_PARAMS 24
#define MAX_DEVICES 64

typedef struct {
  int code, bits, ndim;
  int64_t shape[8];
} ArrayType;

typedef struct {
  int dtype, rank, swizzle, is_im2col;
  uint64_t extents[MAX_AXES], strides[MAX_AXES];
  uint32_t box[MAX_AXES], element_strides[MAX_AXES];
  int lower_corner[MAX_AXES], upper_corner[MAX_AXES];
} TensorMap;

typedef struct {
  int array;
  const TensorMap* map; /* NULL for a parameter that is an address */
} Param;

typedef struct {
  const char* name;
  uint32_t grid[3], block[3], dynamic_shared_bytes;
  int uses_pdl, num_params;
  Param params[MAX_PARAMS];
} Kernel;

typedef struct {
  void* library;
  void* functions[MAX_DEVICES][8]; /* by device and kernel */
} State;

typedef struct {
  const char* name; /* text of the workload */
  const char* arch;
  const unsigned char* cubin;
  int num_arrays, num_kernels;
  const ArrayType* arrays; /* inputs, output, workspace */
  const Kernel* kernels;
  State* state;
} Function;

typedef struct {
  uint32_t grid[3], block[3], dynamic_shared_bytes;
  void* stream;
  void* attributes;
  uint32_t num_attributes;
} LaunchConfig; /* CUlaunchConfig */

typedef struct {
  uint32_t id;
  char padding[4];
  int32_t value;
  char rest[60];
} __attribute__((aligned(8))) LaunchAttribute; /* CUlaunchAttribute */

typedef struct {
  uint64_t words[16];
} __attribute__((aligned(64))) EncodedMap; /* CUtensorMap */

enum { FUNCTION_MAX_DYNAMIC_SHARED_BYTES = 8, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
enum { INTERLEAVE_NONE = 0, L2_PROMOTION_256B = 3, OUT_OF_BOUNDS_ZEROS = 0 };

static struct {
  int is_open;
  void* contexts[MAX_DEVICES];
  int (*cuInit)(unsigned);
  int (*cuGetErrorString)(int, const char**);
  int (*cuDeviceGet)(int*, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuLibraryLoadData)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*cuLibraryUnload)(void*);
  int (*cuLibraryGetKernel)(void**, void*, const char*);
  int (*cuKernelGetFunction)(void**, void*);
  int (*cuFuncSetAttribute)(void*, int, int);
  int (*cuLaunchKernelEx)(const LaunchConfig*, void*, void**, void**);
  int (*cuTensorMapEncodeTiled)(EncodedMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                                const uint32_t*, int, int, int, int);
  int (*cuTensorMapEncodeIm2col)(EncodedMap*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const int*,
                                 const int*, uint32_t, uint32_t, const uint32_t*, int, int, int, int);
} driver;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int fail(const char* function, const char* what, const char* why) {
  char message[512];
  snprintf(message, sizeof(message), "tvmconv: %s: %s%s%s", function, what, why[0] ? ": " : "", why);
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

/* Raise an error for a code of the driver, and return 0 for success. */
static int check(const Function* function, const char* what, int code) {
  const char* text = NULL;
  if (code == 0) return 0;
  if (driver.cuGetErrorString) driver.cuGetErrorString(code, &text);
  return fail(function->name, what, text ? text : "unknown error");
}

static int open_driver(const Function* function) {
  static const struct {
    const char* name;
    void** address;
  } symbols[] = {
#define SYMBOL(name) {#name, (void**)&driver.name}
      SYMBOL(cuInit), SYMBOL(cuGetErrorString), SYMBOL(cuDeviceGet), SYMBOL(cuDevicePrimaryCtxRetain),
      SYMBOL(cuCtxGetCurrent), SYMBOL(cuCtxSetCurrent), SYMBOL(cuLibraryLoadData), SYMBOL(cuLibraryUnload),
      SYMBOL(cuLibraryGetKernel), SYMBOL(cuKernelGetFunction), SYMBOL(cuFuncSetAttribute), SYMBOL(cuLaunchKernelEx),
      SYMBOL(cuTensorMapEncodeTiled), SYMBOL(cuTensorMapEncodeIm2col)};
#undef SYMBOL
  void* library;
  size_t i;
  if (driver.is_open) return 0;
  library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (!library) return fail(function->name, "no CUDA driver", dlerror());
  for (i = 0; i < sizeof(symbols) / sizeof(symbols[0]); ++i) {
    *symbols[i].address = dlsym(library, symbols[i].name);
    if (!*symbols[i].address) return fail(function->name, "expected the CUDA driver 12.0 or later, without", symbols[i].name);
  }
  if (check(function, "cuInit", driver.cuInit(0))) return -1;
  driver.is_open = 1;
  return 0;
}

/* Make the context of a device current, and load the kernels of a function for it. */
static int prepare(const Function* function, int device) {
  void *context = NULL, *kernel = NULL;
  State* state = function->state;
  int i, handle;
  if (open_driver(function)) return -1;
  if (!driver.contexts[device]) {
    if (check(function, "cuDeviceGet", driver.cuDeviceGet(&handle, device))) return -1;
    if (check(function, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(&driver.contexts[device], handle)))
      return -1;
  }
  if (driver.cuCtxGetCurrent(&context) || context != driver.contexts[device])
    if (check(function, "cuCtxSetCurrent", driver.cuCtxSetCurrent(driver.contexts[device]))) return -1;
  if (!state->library) {
    char what[64];
    snprintf(what, sizeof(what), "the kernel for %s cannot be loaded", function->arch);
    if (check(function, what, driver.cuLibraryLoadData(&state->library, function->cubin, NULL, NULL, 0, NULL, NULL, 0)))
      return -1;
  }
  for (i = 0; i < function->num_kernels && !state->functions[device][i]; ++i) {
    const Kernel* each = &function->kernels[i];
    void* loaded = NULL;
    if (check(function, each->name, driver.cuLibraryGetKernel(&kernel, state->library, each->name))) return -1;
    if (check(function, each->name, driver.cuKernelGetFunction(&loaded, kernel))) return -1;
    if (each->dynamic_shared_bytes &&
        check(function, "dynamic shared memory",
              driver.cuFuncSetAttribute(loaded, FUNCTION_MAX_DYNAMIC_SHARED_BYTES, (int)each->dynamic_shared_bytes)))
      return -1;
    state->functions[device][i] = loaded;
  }
  return 0;
}

/* Read the address of a tensor's elements; raise an error for another array than the kernel takes. */
static int read_array(const Function* function, int index, const TVMFFIAny* argument, int* device, char** address) {
  const ArrayType* expected = &function->arrays[index];
  const DLTensor* array = NULL;
  int64_t stride = 1;
  int axis, is_equal;
  char what[64];
  if (argument->type_index == kTVMFFIDLTensorPtr) array = (const DLTensor*)argument->value.pointer;
  if (argument->type_index == kTVMFFITensor) 
    array = (const DLTensor*)((const char*)argument->value.pointer + sizeof(TVMFFIObject));
  snprintf(what, sizeof(what), "argument %d", index);
  if (!array) return fail(function->name, what, "expected a tensor");
  if (array->device_type != kDLCUDA || array->device_id >= MAX_DEVICES)
    return fail(function->name, what, "expected a tensor on a CUDA device");
  if (*device >= 0 && *device != array->device_id)
    return fail(function->name, what, "expected all tensors on one device");
  *device = array->device_id;
  is_equal = array->ndim == expected->ndim && array->code == expected->code &&
             array->bits == expected->bits && array->lanes == 1;
  for (axis = expected->ndim - 1; is_equal && axis >= 0; --axis) {
    is_equal = array->shape[axis] == expected->shape[axis];
    if (array->strides && array->shape[axis] > 1 && array->strides[axis] != stride)
      return fail(function->name, what, "expected a tensor without gaps, in C order");
    stride *= array->shape[axis];
  }
  if (!is_equal) return fail(function->name, what, "the shape or dtype differs from the kernel's");
  *address = (char*)array->data + array->byte_offset;
  return 0;
}

static int encode(const Function* function, const TensorMap* map, void* address, EncodedMap* encoded) {
  int code;
  if (map->is_im2col)
    code = driver.cuTensorMapEncodeIm2col(encoded, map->dtype, map->rank, address, map->extents, map->strides,
                                          map->lower_corner, map->upper_corner, map->box[0], map->box[1],
                                          map->element_strides, INTERLEAVE_NONE, map->swizzle, L2_PROMOTION_256B,
                                          OUT_OF_BOUNDS_ZEROS);
  else
    code = driver.cuTensorMapEncodeTiled(encoded, map->dtype, map->rank, address, map->extents, map->strides, map->box,
                                         map->element_strides, INTERLEAVE_NONE, map->swizzle, L2_PROMOTION_256B,
                                         OUT_OF_BOUNDS_ZEROS);
  return check(function, (uintptr_t)address % 16 ? "tensor map over an address that is no multiple of 16" : "tensor map",
               code);
}

static int launch(const Function* function, int index, int device, char** addresses, void* stream) {
  const Kernel* kernel = &function->kernels[index];
  EncodedMap maps[MAX_PARAMS];
  void* params[MAX_PARAMS];
  LaunchAttribute attribute;
  LaunchConfig config;
  int i;
  for (i = 0; i < kernel->num_params; ++i) {
    const Param* param = &kernel->params[i];
    params[i] = param->map ? (void*)&maps[i] : (void*)&addresses[param->array];
    if (param->map && encode(function, param->map, addresses[param->array], &maps[i])) return -1;
  }
  memset(&config, 0, sizeof(config));
  memset(&attribute, 0, sizeof(attribute));
  memcpy(config.grid, kernel->grid, sizeof(config.grid));
  memcpy(config.block, kernel->block, sizeof(config.block));
  config.dynamic_shared_bytes = kernel->dynamic_shared_bytes;
  config.stream = stream;
  if (kernel->uses_pdl) { /* the kernel itself waits for its predecessor on the stream */
    attribute.id = PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value = 1;
    config.attributes = &attribute;
    config.num_attributes = 1;
  }
  return check(function, kernel->name,
               driver.cuLaunchKernelEx(&config, function->state->functions[device][index], params, NULL));
}

static int run(const Function* function, const TVMFFIAny* arguments, int num_arguments, TVMFFIAny* result) {
  char* addresses[MAX_ARRAYS];
  int i, failed, device = -1;
  void* stream;
  if (num_arguments != function->num_arrays) return fail(function->name, "wrong number of arguments", "");
  for (i = 0; i < num_arguments; ++i)
    if (read_array(function, i, &arguments[i], &device, &addresses[i])) return -1;
  pthread_mutex_lock(&mutex);
  failed = prepare(function, device);
  pthread_mutex_unlock(&mutex);
  if (failed) return -1;
  stream = TVMFFIEnvGetStream(kDLCUDA, device);
  for (i = 0; i < function->num_kernels; ++i)
    if (launch(function, i, device, addresses, stream)) return -1;
  memset(result, 0, sizeof(*result)); /* None */
  return 0;
}
