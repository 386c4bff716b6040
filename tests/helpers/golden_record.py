"""Record what a GPU of compute capability 9.0 computes in the kernels of `golden_kernels`.

python golden_record.py pack FILE             # compiles the kernels: needs TVM and NVRTC, no GPU
python golden_record.py launch FILE RESULT    # runs them, and writes RESULT.npz: needs a GPU, no TVM
"""

import datetime
import json
import multiprocessing
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tvmconv import devices
from tvmconv.errors import DeviceError

DRIVER_VERSION = Path("/sys/module/nvidia/version")  # version of the kernel module, such as 570.86.15
START_SECONDS, SECONDS = 60, 10  # without a result, before the process is killed and the kernel is given up


def pack(file: Path) -> None:
    """Write the executable and the inputs of each kernel."""
    import golden_kernels

    kernels = {name: (kernel.lower().executable, kernel.inputs) for name, kernel in golden_kernels.KERNELS.items()}
    file.write_bytes(pickle.dumps(kernels))


def run_child(file: Path, names: list[str], connection) -> None:
    """Run kernels in a process of its own, until one fails: its context may then be lost."""
    kernels, device = pickle.loads(file.read_bytes()), devices.find_device("cuda:0")
    connection.send(device.name)
    for name in names:
        executable, inputs = kernels[name]
        try:
            output = device.load(executable).run(inputs)
            connection.send((None, output.reshape(-1).view(np.uint8)))
        except DeviceError as error:
            connection.send((str(error), None))
            return


def run_kernels(file: Path, names: list[str]) -> Iterator:
    """Yield the device's name, and then an error or an output of each kernel, until one fails or hangs."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=run_child, args=(file, names, sender))
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


def launch(file: Path, result_file: Path) -> None:
    """Run all kernels; those that fail or hang are left out and named."""
    pending, outputs, failures, device = list(pickle.loads(file.read_bytes())), {}, {}, ""
    while pending:
        results = run_kernels(file, pending)
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
        "driver": DRIVER_VERSION.read_text().strip() if DRIVER_VERSION.exists() else "unknown",
        "date": datetime.date.today().isoformat(),
        "command": "python golden_record.py launch FILE RESULT",
        "failures": failures,
    }
    np.savez_compressed(result_file, about=np.array(json.dumps(about)), **outputs)
    print(f"{len(outputs)} kernels recorded, {len(failures)} failed: {result_file}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", file]:
            pack(Path(file))
        case ["launch", file, result_file]:
            launch(Path(file), Path(result_file))
        case _:
            sys.exit(__doc__)
