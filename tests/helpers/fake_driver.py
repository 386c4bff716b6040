"""CUDA's driver where there is none: it tells what it was asked to encode and to launch, and runs nothing."""

import ctypes
from itertools import count
from types import SimpleNamespace

ENCODERS = ("cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col")
WORDS = 16  # of a tensor map


class FakeDriver:
    """Takes the place of functions of `cuda.bindings.driver`.

    Args:
        monkeypatch: of the test.
        program: what is going to be launched.

    Attributes:
        encoded: for each tensor map the name of the function and its arguments, as plain numbers. The words of the map
            of index i are 1000·i, 1000·i + 1, ….
        launched: for each launch the function's name, grid and block, dynamic shared memory, and its parameters: each
            an integer, or the words of a tensor map.
        alignments: for each tensor map that was launched the remainder of its address modulo 64.
        overlapping: names of the functions that were launched before the end of what came before.
    """

    def __init__(self, monkeypatch, program):
        from cuda.bindings import driver

        self.encoded, self.launched, self.alignments, self.overlapping = [], [], [], []
        self._steps = {step.name: step for step in program.kernels}
        self._driver, addresses = driver, count(1 << 20, 1 << 20)
        answers = {
            **dict.fromkeys(("cuInit", "cuCtxSetCurrent", "cuFuncSetAttribute", "cuLibraryUnload"), lambda *_: ()),
            "cuMemcpyHtoD": lambda *_: (),
            "cuMemcpyDtoH": lambda host, _, nbytes: ctypes.memset(host, 0, nbytes) and (),
            **dict.fromkeys(("cuDeviceGet", "cuDevicePrimaryCtxRetain"), lambda *_: (0,)),
            **dict.fromkeys(("cuModuleLoadData", "cuLibraryLoadData"), lambda *_: (0,)),
            **dict.fromkeys(("cuModuleGetFunction", "cuLibraryGetKernel"), lambda _, name: (name.decode(),)),
            "cuKernelGetFunction": lambda kernel: (kernel,),
            "cuMemAlloc": lambda nbytes: (next(addresses),),
            "cuLaunchKernel": self._launch,
            "cuLaunchKernelEx": self._launch_ex,
            **{name: self._encoder(name) for name in ENCODERS},
        }
        for name, answer in answers.items():
            monkeypatch.setattr(driver, name, lambda *a, answer=answer: (driver.CUresult.CUDA_SUCCESS, *answer(*a)))

    def _encoder(self, name):
        def encode(*arguments):
            first = 1000 * len(self.encoded)
            self.encoded.append((name, [_plain(argument) for argument in arguments]))
            return (SimpleNamespace(opaque=[self._driver.cuuint64_t(first + i) for i in range(WORDS)]),)

        return encode

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, address, extra):
        step = self._steps[function]
        maps = {position for position, _ in step.tensor_maps}
        pointers = (ctypes.c_uint64 * len(step.arguments)).from_address(address)
        self.alignments += [pointers[i] % 64 for i in maps]
        words = [list((ctypes.c_uint64 * (WORDS if i in maps else 1)).from_address(p)) for i, p in enumerate(pointers)]
        parameters = [each if i in maps else each[0] for i, each in enumerate(words)]
        self.launched.append((function, (gx, gy, gz), (bx, by, bz), shared, parameters))
        return ()

    def _launch_ex(self, config, function, address, extra):
        attribute = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        if config.numAttrs:
            (attr,) = config.attrs
            assert (attr.id, attr.value.programmaticStreamSerializationAllowed, config.numAttrs) == (attribute, 1, 1)
            self.overlapping.append(function)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        return self._launch(function, *grid, *block, config.sharedMemBytes, config.hStream, address, extra)


def _plain(argument):
    return [int(each) for each in argument] if isinstance(argument, list | tuple) else int(argument)
