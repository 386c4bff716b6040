"""What calls took when they were timed: a choice between kernels is kept from one run to the next."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tvmconv import jsonfile
from tvmconv.checksummed import read_checked, write_checked
from tvmconv.jsonfile import JsonError
from tvmconv.measuring import kept
from tvmconv.torch.layer import tf32_allowed
from tvmconv.torch.model import Optimized
from tvmconv.torch.timing import seconds_of, wake


class Times:
    """The times of a model's parts, by names; those that an earlier run took are not taken again.

    They are kept where programs are, for this model's graphs and shapes, the example's, this GPU, this library's files,
    the versions of PyTorch and cuDNN, and the settings that decide what PyTorch runs.

    Args:
        model: whose parts they are.
        arguments: of the model.
        place: where it runs.
        name: of the device.
    """

    def __init__(self, model: Optimized, arguments: Sequence[Any], place: torch.device, name: str) -> None:
        self._place = place
        self._model, self._arguments = model, arguments
        self._awake = False
        where = kept.folder()
        self._file = None if where is None else where / f"times-{_digest(_setting(model, arguments, name))}.json"
        self._known: dict[str, float] = {}
        content = read_checked(self._file) if self._file else None
        if content is not None:
            with contextlib.suppress(JsonError):
                known = jsonfile.parse(content).decode(dict[str, float])
                self._known = {key: seconds for key, seconds in known.items() if seconds > 0}
        self._new = False

    def seconds(self, name: str, call: Callable[[], object]) -> float:
        """The seconds of a call, as they are known under a name, or measured now."""
        if name not in self._known:
            if not self._awake:
                wake(lambda: self._model(*self._arguments), self._place)
                self._awake = True
            self._known[name], self._new = seconds_of(call, self._place), True
        return self._known[name]

    def pause(self) -> None:
        """The GPU has nothing to do for a while, and will lower its clocks."""
        self._awake = False

    def keep(self) -> None:
        """Write what was measured, if that is possible."""
        if self._new and self._file:
            write_checked(self._file, json.dumps(self._known, indent=0).encode())


@contextlib.contextmanager
def by_heuristics() -> Iterator[None]:
    """Have cuDNN choose its algorithms without trying them, which takes it seconds for a network."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _setting(model: Optimized, arguments: Sequence[Any], name: str) -> list[Any]:
    """All that decides what PyTorch runs for a model, and how fast."""
    tensors = [*model.state_dict().items(), *((str(number), each) for number, each in enumerate(arguments))]
    told = [
        (key, str(each.dtype), tuple(each.shape), each.stride())
        for key, each in tensors
        if isinstance(each, torch.Tensor) and each.layout is torch.strided
    ]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
    cudnn = torch.backends.cudnn
    how = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, tf32_allowed(), autocast)
    versions = (torch.__version__, cudnn.version(), kept.library())
    return [type(model.plain).__qualname__, str(model), model.codes(), told, name, how, versions]


def _digest(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()
