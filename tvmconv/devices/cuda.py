"""`cuda:N`: NVIDIA GPUs, run through TVM's runtime and timed with CUDA graphs."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvmconv.devices.arch import cuda_target
from tvmconv.devices.base import AbsentError, BufferSets, Device, Loaded, Timing, first_line, poisoned, set_bytes
from tvmconv.devices.graphs import Graph, Replay, Replays, check, new_stream, time_replays
from tvmconv.errors import DeviceError, Error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tvm.target import Target

    from tvmconv.compiler.lower import Lowered

# float32 multiply-adds per clock and multiprocessor, by compute capability: CUDA C++ Programming Guide, "Arithmetic
# Instructions", throughput table, row "32-bit floating-point add, multiply, multiply-add".
_FP32_LANES = {
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (12, 0): 128,
}

_NO_GPU = "use opencl:0, or compile only, for an architecture such as sm_90"


@dataclass(frozen=True)
class CudaDevice(Device):
    """An NVIDIA GPU.

    Attributes:
        index: its number, as CUDA counts.
    """

    index: int

    kind: ClassVar[str] = "cuda"

    def target(self) -> Target:
        """The CUDA target of this GPU's architecture."""
        return cuda_target(str(self.arch), self.max_threads_per_block, self.shared_bytes_per_block)

    def load(self, lowered: Lowered) -> CudaLoaded:
        """Compile a kernel with NVRTC and load it; errors as in `Device.load`."""
        self.check_fits(lowered)
        return CudaLoaded(self, lowered)


class CudaLoaded(Loaded):
    """A kernel on an NVIDIA GPU."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, lowered: Lowered) -> None:
        _load_runtime()
        self.device = device
        self._lowered = lowered
        lowered.cubin  # noqa: B018  compiled here, where a CompileError is not yet one of TVM's RuntimeErrors
        self._main = lowered.executable()["main"]

    def run(self, inputs: Sequence[NDArray[Any]], output_shape: Sequence[int], output_dtype: str) -> NDArray[Any]:
        """Run once on the default stream; see `Loaded.run`."""
        with self._border() as arrays:
            self._upload(arrays, inputs, output_shape, output_dtype)
            self._launch(arrays, stream=0)
            return arrays[-1].numpy()  # waits for the kernel, and meets its errors

    def call_dlpack(self, inputs: Sequence[Any], output_shape: Sequence[int], output_dtype: str) -> Any:
        """Run on the GPU's own arrays; see `Loaded.call_dlpack`."""
        import tvm

        with self._border():
            arrays = [tvm.runtime.from_dlpack(array) for array in inputs]
            for i, array in enumerate(arrays):
                if array.device != tvm.cuda(self.device.index):
                    raise DeviceError(f"input {i} is on {array.device}: expected {self.device.text}")
            stream, empty = _producer(inputs[0], self.device.index)
            output = empty(tuple(output_shape), output_dtype)
            self._launch([*arrays, tvm.runtime.from_dlpack(output)], stream)
            return output

    def time(
        self,
        inputs: Sequence[NDArray[Any]],
        output_shape: Sequence[int],
        output_dtype: str,
        *,
        cold: bool = False,
        seconds: float = 0.5,
    ) -> Timing:
        """Time launches captured in a CUDA graph; see `Loaded.time`."""
        size = set_bytes(inputs, output_shape, output_dtype)
        sets = BufferSets.choose(size, self.device.l2_bytes or 0, cold=cold)
        each = len(inputs) + 1
        with self._border() as arrays, new_stream(self.device.index) as stream:
            for _ in range(sets.count):
                self._upload(arrays, inputs, output_shape, output_dtype)

            def launch(i: int) -> None:
                first = i % sets.count * each
                self._launch(arrays[first : first + each], stream)

            launch(0)  # loads the module, which a capture does not allow
            self._tvm_device.sync(stream)
            replays, unit = _time_launches(launch, stream, multiple=sets.count, seconds=seconds)
        method = f"{unit} of {replays.launches} launches, {len(replays.seconds)} replays"
        return Timing(replays.seconds, f"{method}, {sets.describe('L2')}", cold)

    @property
    def _tvm_device(self) -> Any:
        import tvm

        return tvm.cuda(self.device.index)

    def _upload(
        self, arrays: list[Any], inputs: Sequence[NDArray[Any]], output_shape: Sequence[int], output_dtype: str
    ) -> None:
        """Append copies of the inputs on the GPU and a poisoned output."""
        import tvm

        for array in (*inputs, poisoned(output_shape, output_dtype)):
            arrays.append(tvm.runtime.tensor(array, self._tvm_device))  # one by one, for `_border` to know them all

    def _launch(self, arrays: Sequence[Any], stream: int) -> None:
        import tvm_ffi

        with tvm_ffi.use_raw_stream(self._tvm_device, stream):
            self._main(*arrays)

    @contextmanager
    def _border(self) -> Iterator[list[Any]]:
        """Turn errors of TVM and CUDA into a DeviceError of one line.

        Yields a list for the arrays that TVM allocates. A kernel's fault (an illegal address, say) ends the process's
        CUDA context for good, and TVM aborts the process if it then fails to free an array: those are never freed.
        """
        from cuda.bindings import runtime

        arrays: list[Any] = []
        try:
            yield arrays
        except Exception as error:  # TVM's errors have no class of their own in common
            lost = runtime.cudaDeviceSynchronize()[0] != runtime.cudaError_t.cudaSuccess
            if lost:
                for array in arrays:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(array))
            elif isinstance(error, Error):
                raise
            message = f"{self.device.text}: {first_line(error)}, launched as {self._lowered.launch}"
            lasting = " (this process can use the GPU no more: start another)" if lost else ""
            raise DeviceError(message + lasting) from error


def devices() -> list[CudaDevice]:
    """All NVIDIA GPUs, at least one.

    Raises:
        AbsentError: there is none, with the reason.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise AbsentError(
            "cuda", f"cuda-bindings is not installed ({first_line(error)})", 'pip install "tvmconv[cuda]"'
        ) from error
    status, count = runtime.cudaGetDeviceCount()
    if status == runtime.cudaError_t.cudaErrorInsufficientDriver:
        _, version = runtime.cudaDriverGetVersion()
        if version == 0:
            raise AbsentError("cuda", "no NVIDIA driver", f"install one on a machine with an NVIDIA GPU, or {_NO_GPU}")
        driver = f"{version // 1000}.{version % 1000 // 10}"
        raise AbsentError(
            "cuda", f"the NVIDIA driver is of CUDA {driver}", f"update it to one of CUDA 13, or {_NO_GPU}"
        )
    if status != runtime.cudaError_t.cudaSuccess:
        reason = runtime.cudaGetErrorString(status)[1].decode()
        raise AbsentError("cuda", reason, f"see what nvidia-smi and CUDA_VISIBLE_DEVICES say, or {_NO_GPU}")
    return [_describe(index) for index in range(count)]


def _describe(index: int) -> CudaDevice:
    from cuda.bindings import runtime

    properties = check(runtime.cudaGetDeviceProperties(index))
    capability = (properties.major, properties.minor)
    lanes = _FP32_LANES.get(capability)
    attribute = runtime.cudaDeviceAttr
    # Clocks are in kHz, the bus width in bits; memory transfers twice a clock.
    clock = check(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrClockRate, index)) * 1e3
    memory_clock = check(runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrMemoryClockRate, index)) * 1e3
    bandwidth = 2 * memory_clock * properties.memoryBusWidth / 8
    return CudaDevice(
        text=f"cuda:{index}",
        name=properties.name.decode(),
        arch=f"sm_{properties.major}{properties.minor}",
        memory_bytes=properties.totalGlobalMem,
        multiprocessors=properties.multiProcessorCount,
        max_threads_per_block=properties.maxThreadsPerBlock,
        shared_bytes_per_block=properties.sharedMemPerBlock,
        peak_flops=2 * lanes * properties.multiProcessorCount * clock if lanes else None,
        peak_bandwidth=bandwidth or None,
        l2_bytes=properties.l2CacheSize,
        index=index,
    )


@functools.cache
def _load_runtime() -> None:
    """Load TVM's CUDA runtime library, which `import tvm` leaves out silently when it does not find libcudart.

    Raises:
        DeviceError: it does not load.
    """
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib("cudart")  # where the wheels keep it, the dynamic loader does not look
        import tvm
        from tvm.base import _LOADED_LIBS
        from tvm_ffi.libinfo import load_lib_ctypes

        if "tvm_runtime_cuda" not in _LOADED_LIBS:  # TVM was imported before libcudart was there
            paths = tvm.libinfo.package_lib_paths()
            library = load_lib_ctypes("tvm", "tvm_runtime_cuda", "RTLD_LOCAL", extra_lib_paths=paths)
            _LOADED_LIBS["tvm_runtime_cuda"] = library
    except (DynamicLibNotFoundError, OSError, RuntimeError) as error:
        reason = f"TVM's CUDA runtime does not load: {first_line(error)}"
        raise DeviceError(f'{reason}; install what it needs with: pip install "tvmconv[cuda]"') from error


def _time_launches(launch: Callable[[int], None], stream: int, *, multiple: int, seconds: float) -> tuple[Replays, str]:
    """Time launches out of a CUDA graph, or queued one by one where they cannot be captured; and which it was."""

    def capture(launches: int) -> Replay:
        return Graph(stream, launches, launch).replay

    def queue(launches: int) -> Replay:
        def replay() -> None:
            for i in range(launches):
                launch(i)

        return replay

    try:
        Graph(stream, 1, launch)
    except (DeviceError, RuntimeError):
        return time_replays(queue, stream, multiple=multiple, seconds=seconds), "batch"
    return time_replays(capture, stream, multiple=multiple, seconds=seconds), "CUDA graph"


def _producer(array: Any, index: int) -> tuple[int, Callable[[tuple[int, ...], str], Any]]:
    """For the library that made `array`: the stream it is working on, and how it allocates an array on the GPU."""
    library = type(array).__module__.partition(".")[0]
    if library == "torch":
        torch = sys.modules["torch"]
        stream = torch.cuda.current_stream(index).cuda_stream
        return stream, lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=array.device)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            return cupy.cuda.get_current_stream().ptr, cupy.empty
    import tvm

    # To a consumer that names no stream, DLPack's producers hand over in the order of the default one.
    return 0, lambda shape, dtype: tvm.runtime.empty(shape, dtype, tvm.cuda(index))
