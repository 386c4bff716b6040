"""cuDNN, through PyTorch: the convolution that most people run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvmconv.devices.base import BufferSets, Device, Timing, first_line, set_bytes
from tvmconv.devices.cuda import CudaDevice
from tvmconv.devices.graphs import Replay, time_replays
from tvmconv.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tvmconv.workloads.conv2d import Conv2d


PICKS = 3


@dataclass(frozen=True)
class Baseline:
    """A library's time for a workload.

    Attributes:
        timing: taken as those of our kernels are.
        output: what it computed.
        text: what ran: the library, its version, its settings.
    """

    timing: Timing
    output: NDArray[Any]
    text: str


def time_cudnn(
    w: Conv2d, inputs: Sequence[NDArray[Any]], *, device: Device, cold: bool = False, seconds: float = 0.5
) -> Baseline:
    """Time `torch.nn.functional.conv2d` with cuDNN's fastest algorithm and without TF32.

    cuDNN tries its algorithms on trials of microseconds, and at times picks one that is half as fast as another. It
    remembers its picks by thread: it is asked in `PICKS` threads, and the fastest counts.

    cuDNN pads both sides of an axis alike. Other paddings are a kernel of their own before it, in the time.

    Args:
        w: the workload.
        inputs: X and K, of `w.argument_shapes` and `w.dtype`.
        device: an NVIDIA GPU.
        cold: as for `Loaded.time`.
        seconds: as for `Loaded.time`.

    Raises:
        DeviceError: `device` is no NVIDIA GPU, PyTorch with cuDNN is missing, or it fails.
    """
    if not isinstance(device, CudaDevice):
        raise DeviceError(f"the cuDNN baseline needs an NVIDIA GPU: expected cuda:N instead of {device.text}")
    _torch()  # missing, it is missed before threads are started
    picks = []
    for _ in range(PICKS):
        with ThreadPoolExecutor(max_workers=1) as thread:
            picks.append(thread.submit(_time_pick, w, inputs, device, cold=cold, seconds=seconds).result())
    return min(picks, key=lambda pick: pick.timing.median)


def _time_pick(
    w: Conv2d, inputs: Sequence[NDArray[Any]], device: CudaDevice, *, cold: bool, seconds: float
) -> Baseline:
    """Let cuDNN try its algorithms, and time the one that it picks."""
    torch = _torch()
    size = set_bytes(inputs, w.output_shape, w.dtype)
    sets = BufferSets.choose(size, device.l2_bytes or 0, cold=cold)
    stream = torch.cuda.Stream(device.index)
    try:
        with torch.cuda.device(device.index), torch.cuda.stream(stream), torch.no_grad(), _exact(torch):
            convolve = _convolution(torch, w)
            copies = [[torch.from_numpy(array).to(device.text) for array in inputs] for _ in range(sets.count)]
            for _ in range(3):  # the first call tries the algorithms, which a capture does not allow
                output = convolve(*copies[0])
            result = output.cpu().numpy()
            del output

            def capture(launches: int) -> Replay:
                graph = torch.cuda.CUDAGraph()
                # Hot: each output is freed at once and the next takes its place. Cold: each set has an output.
                outputs: list[Any] = [None] * sets.count
                with torch.cuda.graph(graph, stream=stream):
                    for i in range(launches):
                        outputs[i % sets.count] = None
                        outputs[i % sets.count] = convolve(*copies[i % sets.count])
                return graph.replay

            replays = time_replays(capture, stream.cuda_stream, multiple=sets.count, seconds=seconds)
    except RuntimeError as error:
        if isinstance(error, DeviceError):
            raise
        raise DeviceError(f"{device.text}: cuDNN through PyTorch: {first_line(error)}") from error
    method = f"CUDA graph of {replays.launches} launches, {len(replays.seconds)} replays"
    timing = Timing(replays.seconds, f"{method}, {sets.describe('L2')}", cold)
    return Baseline(timing, result, _text(torch, w))


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceError("the cuDNN baseline needs PyTorch: pip install torch") from error
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        raise DeviceError(
            f"PyTorch {torch.__version__} has no CUDA device with cuDNN: install a build for CUDA from pytorch.org"
        )
    return torch


@contextmanager
def _exact(torch: Any) -> Iterator[None]:
    """Let cuDNN try every algorithm, and nobody round to TF32."""
    wanted = (
        (torch.backends.cudnn, "benchmark", True),
        (torch.backends.cudnn, "benchmark_limit", 0),  # 0: all of them
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cuda.matmul, "allow_tf32", False),
    )
    before = [getattr(place, name) for place, name, _ in wanted]
    for place, name, value in wanted:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(wanted, before, strict=True):
            setattr(place, name, value)


def _convolution(torch: Any, w: Conv2d) -> Callable[[Any, Any], Any]:
    """The workload as a function of X and K on the GPU."""
    functional = torch.nn.functional
    options = {"stride": w.stride, "dilation": w.dilation, "groups": w.groups}
    top, left, bottom, right = w.padding
    if _symmetric(w):
        return lambda x, k: functional.conv2d(x, k, padding=(top, left), **options)
    return lambda x, k: functional.conv2d(functional.pad(x, (left, right, top, bottom)), k, **options)


def _symmetric(w: Conv2d) -> bool:
    top, left, bottom, right = w.padding
    return (top, left) == (bottom, right)


def _text(torch: Any, w: Conv2d) -> str:
    version = torch.backends.cudnn.version()  # 91900 is 9.19.0, and before cuDNN 9 8907 was 8.9.7
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1000)
    pieces = [f"cuDNN {major}.{rest // 100}", f"PyTorch {torch.__version__}", "best algorithm, no TF32"]
    if not _symmetric(w):
        pieces.append("padded by a kernel of its own")
    if w.depthwise:
        pieces.append("depthwise, for which PyTorch may choose a kernel of its own")
    return ", ".join(pieces)
