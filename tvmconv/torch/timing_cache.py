"""A cache of measured times, so that the choice between kernels is reused in later runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tvmconv import jsonfile
from tvmconv.checksummed_file import read_checked, write_checked
from tvmconv.jsonfile import JsonError
from tvmconv.measure import kernel_cache
from tvmconv.torch.layer import is_tf32_allowed
from tvmconv.torch.model import Optimized
from tvmconv.torch.timing import raise_clocks, time_call


class TimingCache:
    """Times of a model's parts by name, which are measured once and kept on disk.

    The file is in the folder of the kernel cache. Its name depends on the model's graphs and shapes, the example's, the
    GPU, the sources of this package, the versions of PyTorch and cuDNN, and the settings that decide what PyTorch runs.

    Args:
        model: The model.
        arguments: Arguments of the model.
        torch_device: PyTorch's device.
        device_name: Name of the device.
    """

    def __init__(
        self, model: Optimized, arguments: Sequence[Any], torch_device: torch.device, device_name: str
    ) -> None:
        self._torch_device = torch_device
        self._model, self._arguments = model, arguments
        self._is_awake = False
        cache_folder = kernel_cache.find_cache_folder()
        self._file = (
            None
            if cache_folder is None
            else cache_folder / f"times-{_hash_key(_make_cache_key(model, arguments, device_name))}.json"
        )
        self._seconds_by_name: dict[str, float] = {}
        content = read_checked(self._file) if self._file else None
        if content is not None:
            with contextlib.suppress(JsonError):
                cached_seconds = jsonfile.parse_json(content).decode(dict[str, float])
                self._seconds_by_name = {key: seconds for key, seconds in cached_seconds.items() if seconds > 0}
        self._has_new = False

    def get_seconds(self, name: str, call: Callable[[], object]) -> float:
        """Return the seconds of a call from the cache, or measure them.

        Args:
            name: Key of the call.
            call: Function to time.
        """
        if name not in self._seconds_by_name:
            if not self._is_awake:
                raise_clocks(lambda: self._model(*self._arguments), self._torch_device)
                self._is_awake = True
            self._seconds_by_name[name], self._has_new = time_call(call, self._torch_device), True
        return self._seconds_by_name[name]

    def mark_idle(self) -> None:
        """Note that the GPU was idle and may have lowered its clocks; the next timing raises them first."""
        self._is_awake = False

    def save(self) -> None:
        """Write new times to the file, if the cache has a folder."""
        if self._has_new and self._file:
            write_checked(self._file, json.dumps(self._seconds_by_name, indent=0).encode())


@contextlib.contextmanager
def use_cudnn_heuristics() -> Iterator[None]:
    """Have cuDNN choose algorithms by heuristics; trying them would take seconds for a network."""
    previous = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = previous


def _make_cache_key(model: Optimized, arguments: Sequence[Any], device_name: str) -> list[Any]:
    """Return everything that decides what PyTorch runs for a model, and how fast."""
    tensors = [*model.state_dict().items(), *((str(number), value) for number, value in enumerate(arguments))]
    tensor_keys = [
        (key, str(value.dtype), tuple(value.shape), value.stride())
        for key, value in tensors
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
    cudnn = torch.backends.cudnn
    pytorch_settings = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, is_tf32_allowed(), autocast)
    versions = (torch.__version__, cudnn.version(), kernel_cache.hash_sources())
    return [
        type(model.original).__qualname__,
        str(model),
        model.graph_code(),
        tensor_keys,
        device_name,
        pytorch_settings,
        versions,
    ]


def _hash_key(key: Any) -> str:
    return hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()
