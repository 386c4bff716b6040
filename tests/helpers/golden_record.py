"""Record what a GPU of compute capability 9.0 computes in the kernels of `golden_kernels`.

python golden_record.py pack FOLDER            # compiles the kernels: needs TVM and NVRTC, no GPU
python golden_record.py launch FOLDER FILE     # runs them, and writes FILE.npz: needs a GPU and NumPy, no TVM
"""

import ctypes
import datetime
import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np

START_SECONDS, SECONDS = 60, 10  # without a result, before the process is killed and the kernel is given up


# --- compiling, without a GPU ---


def pack(folder: Path) -> None:
    """Write cubins and inputs, and a manifest with all that a launch needs."""
    from tvmconv.tvm_import import import_tvm

    import_tvm()
    import golden_kernels

    folder.mkdir(parents=True, exist_ok=True)
    manifest, inputs, cubins = {}, {}, {}
    for name, kernel in golden_kernels.KERNELS.items():
        executable = kernel.lower().executable
        (step,) = executable.kernels
        cubins[name] = np.frombuffer(step.code, np.uint8)
        for number, values in enumerate(kernel.inputs):
            inputs[f"{name}.{number}"] = values.reshape(-1).view(np.uint8)
        manifest[name] = {
            "function": step.name,
            "grid": step.launch.grid,
            "block": step.launch.block,
            "dynamic_shared_bytes": step.dynamic_shared_bytes,
            "arguments": step.arguments,
            "constants": step.constants,
            "maps": {str(position): tensor_map.to_dict() for position, tensor_map in step.tensor_maps},
            "nbytes": [array.nbytes for array in executable.arrays],
        }
        print(name, cubins[name].size, flush=True)
    np.savez_compressed(folder / "cubins.npz", **cubins)
    np.savez_compressed(folder / "inputs.npz", **inputs)
    (folder / "manifest.json").write_text(json.dumps(manifest))


# --- launching, without TVM ---

DTYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute


class Driver:
    """The CUDA driver with a context on the first GPU; a call that fails raises RuntimeError."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        name, version = ctypes.create_string_buffer(100), ctypes.c_int()
        self("cuDeviceGetName", name, 100, device)
        self("cuDriverGetVersion", ctypes.byref(version))
        self.device = name.value.decode()
        self.version = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def __call__(self, name: str, *arguments) -> None:
        if status := getattr(self._library, name)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return pointer.value

    def encode(self, tensor_map: dict, pointer: int, place: int) -> None:
        """Write a CUtensorMap to an address that is a multiple of 64."""

        def array(kind, numbers):
            return (kind * max(1, len(numbers)))(*numbers)

        common = [ctypes.c_void_p(place), DTYPES[tensor_map["dtype"]], len(tensor_map["extents"])]
        common += [ctypes.c_uint64(pointer)]
        common += [array(ctypes.c_uint64, tensor_map["extents"]), array(ctypes.c_uint64, tensor_map["strides"])]
        options = [array(ctypes.c_uint32, tensor_map["element_strides"]), 0, SWIZZLES[tensor_map["swizzle"]], 0, 0]
        if tensor_map["lower_corner"]:
            corners = [array(ctypes.c_int, tensor_map[name]) for name in ("lower_corner", "upper_corner")]
            self("cuTensorMapEncodeIm2col", *common, *corners, *tensor_map["box"], *options)
        else:
            self("cuTensorMapEncodeTiled", *common, array(ctypes.c_uint32, tensor_map["box"]), *options)


def run_kernel(driver: Driver, kernel: dict, image: bytes, inputs: list[np.ndarray]) -> np.ndarray:
    """Return the bytes of the output, which are 0xFF where nothing is written."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), image)
    driver("cuModuleGetFunction", ctypes.byref(function), module, kernel["function"].encode())
    shared_bytes = kernel["dynamic_shared_bytes"]
    driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    output = np.full(kernel["nbytes"][-1], 0xFF, np.uint8)
    pointers = []
    for values in (*inputs, output):
        pointers.append(driver.allocate(values.nbytes))
        host = np.ascontiguousarray(values)
        driver(
            "cuMemcpyHtoD_v2",
            ctypes.c_uint64(pointers[-1]),
            ctypes.c_void_p(host.ctypes.data),
            ctypes.c_size_t(host.nbytes),
        )
    for index, symbol in kernel["constants"]:
        pointer, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        driver("cuModuleGetGlobal_v2", ctypes.byref(pointer), ctypes.byref(nbytes), module, symbol.encode())
        driver("cuMemcpyDtoD_v2", pointer, ctypes.c_uint64(pointers[index]), ctypes.c_size_t(kernel["nbytes"][index]))
    memory = ctypes.create_string_buffer(128 * (len(kernel["arguments"]) + 1))
    first, addresses = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64, []
    for position, index in enumerate(kernel["arguments"]):
        place = first + 128 * position
        if tensor_map := kernel["maps"].get(str(position)):
            driver.encode(tensor_map, pointers[index], place)
        else:
            ctypes.c_uint64.from_address(place).value = pointers[index]
        addresses.append(place)
    parameters = (ctypes.c_void_p * len(addresses))(*addresses)
    driver("cuLaunchKernel", function, *kernel["grid"], *kernel["block"], shared_bytes, None, parameters, None)
    driver("cuCtxSynchronize")
    driver(
        "cuMemcpyDtoH_v2",
        ctypes.c_void_p(output.ctypes.data),
        ctypes.c_uint64(pointers[-1]),
        ctypes.c_size_t(output.nbytes),
    )
    return output


def run_child(folder: Path, names: list[str], connection) -> None:
    """Run kernels in a process of its own, until one fails: its context may then be lost."""
    manifest = json.loads((folder / "manifest.json").read_text())
    cubins, inputs = np.load(folder / "cubins.npz"), np.load(folder / "inputs.npz")
    driver = Driver()
    connection.send(f"{driver.device}, CUDA {driver.version}")
    for name in names:
        values = [inputs[f"{name}.{number}"] for number in range(len(manifest[name]["nbytes"]) - 1)]
        try:
            connection.send((None, run_kernel(driver, manifest[name], cubins[name].tobytes(), values)))
        except RuntimeError as error:
            connection.send((str(error), None))
            return


def run_kernels(folder: Path, names: list[str]):
    """Yield the device's name, and then an error or an output of each kernel, until one fails or hangs."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_child, args=(folder, names, sender))
    child.start()
    sender.close()
    if not receiver.poll(START_SECONDS):
        sys.exit("the GPU does not start")
    yield receiver.recv()
    for _ in names:
        try:
            result = receiver.recv() if receiver.poll(SECONDS) else (f"no result after {SECONDS} s", None)
        except EOFError:
            result = "the process ended", None
        yield result
        if result[0]:
            break
    child.kill()
    child.join()


def read_driver_version() -> str:
    """Return the version of the kernel module, such as 570.86.15, or "unknown"."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "unknown"


def launch(folder: Path, file: Path) -> None:
    """Run all kernels; those that fail or hang are left out and named."""
    pending, outputs, failures, device = list(json.loads((folder / "manifest.json").read_text())), {}, {}, ""
    while pending:
        results = run_kernels(folder, pending)
        device = next(results)
        for error, output in results:
            name, *pending = pending
            if error:
                failures[name] = error
                print(f"{name}: {error}", flush=True)
            else:
                outputs[name] = output
    about = {
        "device": device,
        "driver": read_driver_version(),
        "date": datetime.date.today().isoformat(),
        "command": "python golden_record.py launch FOLDER FILE",
        "failures": failures,
    }
    np.savez_compressed(file, about=np.array(json.dumps(about)), **outputs)
    print(f"{len(outputs)} kernels recorded, {len(failures)} failed: {file}")
    print(about)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", folder]:
            pack(Path(folder))
        case ["launch", folder, file]:
            launch(Path(folder), Path(file))
        case _:
            sys.exit(__doc__)
