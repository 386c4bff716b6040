// The functions of OpenCL C that generated kernels call, for programs that PoCL compiles without its own header
// (-D_OPENCL_H_); see tests/conftest.py.
#ifdef DECLARE_FUNCTIONS
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef uint cl_mem_fence_flags;
#define CLK_LOCAL_MEM_FENCE 1
#define CLK_GLOBAL_MEM_FENCE 2

#define VECTOR(type, n) typedef type type##n __attribute__((ext_vector_type(n)));
#define VECTOR_TYPES(type) VECTOR(type, 2) VECTOR(type, 3) VECTOR(type, 4) VECTOR(type, 8) VECTOR(type, 16)
VECTOR_TYPES(char) VECTOR_TYPES(uchar) VECTOR_TYPES(short) VECTOR_TYPES(ushort) VECTOR_TYPES(int) VECTOR_TYPES(uint)
VECTOR_TYPES(long) VECTOR_TYPES(ulong) VECTOR_TYPES(float)

#define __ovld __attribute__((overloadable))
#define __conv __attribute__((convergent))
#define __purefn __attribute__((pure))
#define __cnfn __attribute__((const))

uint __ovld __cnfn get_work_dim(void);
size_t __ovld __cnfn get_global_size(uint);
size_t __ovld __cnfn get_global_id(uint);
size_t __ovld __cnfn get_local_size(uint);
size_t __ovld __cnfn get_local_id(uint);
size_t __ovld __cnfn get_num_groups(uint);
size_t __ovld __cnfn get_group_id(uint);
void __ovld __conv barrier(cl_mem_fence_flags);

#define OF_FLOATS(define) define(float) define(float2) define(float4)
#define UNARY_OF(type, name) type __ovld __cnfn name(type);
#define UNARY(name) UNARY_OF(float, name) UNARY_OF(float2, name) UNARY_OF(float4, name)
#define BINARY(name) float __ovld __cnfn name(float, float);
UNARY(exp) UNARY(exp2) UNARY(exp10) UNARY(log) UNARY(log2) UNARY(log10) UNARY(erf) UNARY(tanh) UNARY(sin) UNARY(cos)
UNARY(sqrt) UNARY(rsqrt) UNARY(fabs) UNARY(floor) UNARY(ceil) UNARY(round) UNARY(trunc)
BINARY(pow) BINARY(fmax) BINARY(fmin) BINARY(fmod)
float __ovld __cnfn fma(float, float, float);
float __ovld __cnfn mad(float, float, float);
int __ovld __cnfn select(int, int, int);

#define EXTREMA(type) type __ovld __cnfn max(type, type); type __ovld __cnfn min(type, type);
EXTREMA(char) EXTREMA(uchar) EXTREMA(short) EXTREMA(ushort) EXTREMA(int) EXTREMA(uint) EXTREMA(long) EXTREMA(ulong)
OF_FLOATS(EXTREMA)

#define CONVERT(to, from) to __ovld __cnfn convert_##to(from);
#define CONVERT_ALL(to) CONVERT(to, char) CONVERT(to, uchar) CONVERT(to, short) CONVERT(to, ushort) CONVERT(to, int) \
    CONVERT(to, uint) CONVERT(to, long) CONVERT(to, ulong) CONVERT(to, float)
CONVERT_ALL(char) CONVERT_ALL(uchar) CONVERT_ALL(short) CONVERT_ALL(ushort) CONVERT_ALL(int) CONVERT_ALL(uint)
CONVERT_ALL(long) CONVERT_ALL(ulong) CONVERT_ALL(float)
#define WIDEN(n) CONVERT(uint##n, ushort##n) CONVERT(ushort##n, uint##n)
WIDEN(2) WIDEN(4) WIDEN(8)

#define LOADS_AT(space, type, n) type##n __ovld __purefn vload##n(size_t, const space type *);
#define STORES_AT(space, type, n) void __ovld vstore##n(type##n, size_t, space type *);
#define VECTORS(type, n) \
    LOADS_AT(__global, type, n) LOADS_AT(__local, type, n) LOADS_AT(__private, type, n) \
    LOADS_AT(__constant, type, n) STORES_AT(__global, type, n) STORES_AT(__local, type, n) \
    STORES_AT(__private, type, n)
#define VECTORS_OF(type) VECTORS(type, 2) VECTORS(type, 3) VECTORS(type, 4) VECTORS(type, 8) VECTORS(type, 16)
VECTORS_OF(float) VECTORS_OF(ushort) VECTORS_OF(short) VECTORS_OF(int) VECTORS_OF(uint) VECTORS_OF(char)
VECTORS_OF(uchar)
#endif
