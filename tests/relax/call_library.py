"""Call a function of an exported library with tensors that say that they are on a GPU; print addresses or the error.

usage: call_library.py LIBRARY FUNCTION STREAM ARRAYS…, one call for each ARRAYS: DTYPE:SIZES[:STRIDES] with commas
"""

import ctypes
import json
import sys

import tvm_ffi

CUDA, FLOAT = 2, 2  # kDLCUDA, kDLFloat
ADDRESSES = range(0x10000, 0x1000000, 0x10000)


class DLTensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("ndim", ctypes.c_int32))
    _fields_ += (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))
    _fields_ += (("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)))
    _fields_ += (("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Pretended:
    """A tensor on a GPU, of which only the address is there."""

    def __init__(self, address, text):
        dtype, sizes, *strides = text.split(":")
        self.shape = [int(size) for size in sizes.split("x")]
        strides = [int(n) for n in strides[0].split("x")] if strides else self._compact_strides()
        self.lengths = [(ctypes.c_int64 * len(self.shape))(*numbers) for numbers in (self.shape, strides)]
        self.tensor = DLTensor(address, (CUDA, 1), len(self.shape), FLOAT, int(dtype[5:]), 1, *self.lengths)

    def _compact_strides(self):
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.insert(0, strides[0] * size)
        return strides

    def __dlpack_device__(self):
        return CUDA, 1

    def __dlpack__(self, **_options):
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return capsule(ctypes.addressof(self.tensor), b"dltensor", None)


def call(function, stream, texts):
    """The addresses of the arrays of two calls, or the error of the first."""
    arrays = [Pretended(address, text) for address, text in zip(ADDRESSES, texts, strict=False)]
    tensors = [tvm_ffi.from_dlpack(array) for array in arrays]
    try:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 1), stream):
            function(*tensors)
            function(*tensors)
    except RuntimeError as error:
        return str(error)
    return [array.tensor.data for array in arrays]


def main():
    path, name, stream, *calls = sys.argv[1:]
    function = getattr(tvm_ffi.load_module(path), name)
    for texts in calls:
        print(json.dumps(call(function, int(stream), texts.split(","))))
    assert not any(module in sys.modules for module in ("tvm", "tvmconv"))


if __name__ == "__main__":
    main()
