"""The model, as a file: trees, configs that serve many workloads, and the fastest configs of those that were measured.

The file is a NumPy archive of plain arrays and one JSON text; nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
import os
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvmconv import jsonfile
from tvmconv.errors import Error, FallbackWarning
from tvmconv.files import check_archive, open_regular
from tvmconv.knobs import Config, Value
from tvmconv.knobs.space import Space
from tvmconv.knowledge.features import Machine, features, matrix
from tvmconv.knowledge.likeness import layer_of
from tvmconv.knowledge.trees import Trees
from tvmconv.workloads import Conv, Conv1d, Conv2d, Conv3d, Workload, parse

VERSION = 2
MAX_BYTES = 1 << 28  # of a file, unpacked; the one that comes with the package has 6 MB
SHIPPED = Path(__file__).with_name("h200.npz")
_CONVOLUTIONS = tuple(f"{each.operator}:" for each in (Conv1d, Conv2d, Conv3d))  # how texts of workloads begin
_ARRAYS = ("feature", "threshold", "left", "roots")


def kind_of(w: Conv) -> str:
    """What of a workload decides whether others tell anything of it: its dtype, float16 for bfloat16, and layout."""
    dtype = "float16" if w.dtype == "bfloat16" else w.dtype
    return f"{dtype} {w.layout}"


@dataclass(frozen=True)
class Example:
    """A workload that was measured, and a config that was fast on it.

    Attributes:
        workload: its text.
        config: of the schedule.
        share: of the speed of the fastest schedule's fastest config on that workload.
    """

    workload: str
    config: Config
    share: float


@dataclass(frozen=True)
class Expert:
    """What is known of one schedule.

    Attributes:
        schedule: its name.
        knobs: names of those that it had, for one workload or another, when the model was trained.
        kinds: the dtypes and layouts of the workloads that were measured: of others nothing is known.
        names: of the features.
        members: forests that were trained on different samples; each tells the base-2 logarithm of how many times as
            long as `Machine.least_seconds` a config takes.
        portfolio: configs of which one or another is fast on most workloads, those that serve most first.
        examples: the fastest configs of what was measured.
    """

    schedule: str
    knobs: tuple[str, ...]
    kinds: tuple[str, ...]
    names: tuple[str, ...]
    members: tuple[Trees, ...]
    portfolio: tuple[Config, ...] = ()
    examples: tuple[Example, ...] = ()

    def slowness(self, w: Conv, space: Space, points: np.ndarray, machine: Machine) -> np.ndarray:
        """What each member takes configs (n, knobs) to be, as above: float32 (members, n)."""
        rows = matrix(features(w, space, points, machine), self.names)
        return np.stack([member.predict(rows) for member in self.members])


@dataclass(frozen=True)
class Knowledge:
    """All that was learnt of a device.

    Attributes:
        machine: the device.
        experts: by schedule, each of workloads of all operators that were measured.
        provenance: of what, when and by which command it was learnt.
        taught: the layers that any expert was taught records of, each as `layer_of` has it.
    """

    machine: Machine
    experts: Mapping[str, Expert]
    provenance: str = ""
    taught: frozenset[str] = frozenset()
    _workloads: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def expert(self, w: Conv, schedule: str, space: Space) -> Expert | None:
        """Who knows a schedule of a workload; None where nobody does, or the schedule has other knobs by now.

        Epilogues may bring knobs of their own, which nobody has learnt anything of; so do axes that images do not have.
        """
        found = self.experts.get(schedule)
        if found is None or kind_of(w) not in found.kinds:
            return None
        if not w.epilogue and isinstance(w, Conv2d) and not {*space.knobs} <= {*found.knobs}:
            _warn_once(f"what was learnt of {schedule} is of other knobs, and is not used: train it anew")
            return None
        return found

    def seen(self, layers: Collection[Workload]) -> int:
        """Of how many of some layers it was taught records, in whatever batch, dtype, layout and epilogue."""
        return sum(layer_of(w) in self.taught for w in layers)

    def workload(self, text: str) -> Any:
        """The workload of a text of an example, parsed once."""
        if text not in self._workloads:
            self._workloads[text] = parse(text)
        return self._workloads[text]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file."""
        arrays: dict[str, np.ndarray] = {}
        experts = []
        for number, expert in enumerate(self.experts.values()):
            members = []
            for place, trees in enumerate(expert.members):
                arrays |= {f"{number}.{place}.{name}": getattr(trees, name) for name in _ARRAYS}
                members.append({"base": trees.base, "depth": trees.depth})
            told = {name: getattr(expert, name) for name in ("schedule", "knobs", "kinds", "names", "portfolio")}
            examples = [[example.workload, example.config, example.share] for example in expert.examples]
            experts.append({**told, "members": members, "examples": examples})
        about = {"version": VERSION, "machine": asdict(self.machine), "provenance": self.provenance}
        head = {**about, "taught": sorted(self.taught), "experts": experts}
        text = np.frombuffer(json.dumps(head).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, head=text, **arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Knowledge:
        """Read a file.

        Raises:
            Error: it cannot be read, or is no such file, or of another version.
        """
        try:
            with open_regular(path) as file:
                with zipfile.ZipFile(file) as packed:
                    check_archive(packed, MAX_BYTES)
                file.seek(0)
                with np.load(file, allow_pickle=False) as archive:
                    arrays: dict[str, Any] = dict(archive)
            head = jsonfile.parse(arrays["head"].tobytes()).value
            version = head["version"]
            read = _knowledge(head, arrays) if version == VERSION else None
        except Exception as error:  # for a file that is damaged, archives, decompression and NumPy raise a dozen kinds
            raise Error(f"cannot read {path}: {type(error).__name__}: {error}") from error
        if read is None:
            raise Error(f"{path} is of version {version}, and this library reads {VERSION}: train it anew")
        return read


def _knowledge(head: Mapping[str, Any], arrays: Mapping[str, Any]) -> Knowledge:
    machine = Machine(**head["machine"])
    if not all(1 <= float(each) < math.inf for each in (machine.multiprocessors, machine.flops, machine.bandwidth)):
        raise ValueError(f"there is no such machine: {machine}")
    experts = [_expert(number, told, arrays) for number, told in enumerate(head["experts"])]
    taught = frozenset(map(str, head["taught"]))
    return Knowledge(machine, {each.schedule: each for each in experts}, str(head["provenance"]), taught)


def _expert(number: int, told: Mapping[str, Any], arrays: Mapping[str, Any]) -> Expert:
    members = tuple(
        Trees(**{name: arrays[f"{number}.{place}.{name}"] for name in _ARRAYS}, **each)
        for place, each in enumerate(told["members"])
    )
    examples = tuple(Example(text, _config(config), share) for text, config, share in told["examples"])
    if not (members and told["names"] and all(each.workload.startswith(_CONVOLUTIONS) for each in examples)):
        raise ValueError("an expert without forests or features, or with workloads that are no convolutions")
    for trees in members:
        trees.check(len(told["names"]))
    return Expert(
        str(told["schedule"]),
        tuple(map(str, told["knobs"])),
        tuple(map(str, told["kinds"])),
        tuple(map(str, told["names"])),
        members,
        tuple(map(_config, told["portfolio"])),
        examples,
    )


def _config(read: Mapping[str, Any]) -> Config:
    """A config as JSON has it, whose tuples are lists there."""
    return {
        name: tuple(map(_integer, value)) if isinstance(value, list) else _scalar(value) for name, value in read.items()
    }


def _scalar(read: Any) -> Value:
    return read if isinstance(read, (bool, float, str)) else _integer(read)


def _integer(read: Any) -> int:
    """One that NumPy has room for; raises TypeError or OverflowError for anything else."""
    return int(np.int64(operator.index(read)))


class _InUse:
    """The model that predictions are made by; one for all threads of this process."""

    def __init__(self) -> None:
        self.given = False
        self.knowledge: Knowledge | None = None


_in_use = _InUse()


def use(knowledge: Knowledge | str | os.PathLike[str] | None) -> None:
    """Have predictions made by a model, in place of the one that comes with the package.

    Args:
        knowledge: the model, or its file; None for no predictions at all.

    Raises:
        Error: the file cannot be read.
    """
    given = knowledge if isinstance(knowledge, Knowledge) or knowledge is None else Knowledge.load(knowledge)
    _in_use.given, _in_use.knowledge = True, given


@contextlib.contextmanager
def nothing_known() -> Iterator[None]:
    """Within the block, nothing is predicted."""
    before = _in_use.given, _in_use.knowledge
    use(None)
    try:
        yield
    finally:
        _in_use.given, _in_use.knowledge = before


def known_for(arch: str | None) -> Knowledge | None:
    """The model of GPUs of an architecture such as "sm_90"; None if nothing is known of these."""
    if not _in_use.given:
        _in_use.given, _in_use.knowledge = True, _shipped()
    knowledge = _in_use.knowledge
    return knowledge if knowledge and arch and knowledge.machine.arch == arch else None


def _shipped() -> Knowledge | None:
    """The model that comes with the package; None, and a warning, where it cannot be used."""
    if not SHIPPED.exists():
        return None
    try:
        return Knowledge.load(SHIPPED)
    except Error as error:
        _warn_once(f"what was learnt is not used: {error}")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=3)
