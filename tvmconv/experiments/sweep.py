"""Sweeps: schedules over several workloads, measured one after another on one device."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvmconv import jsonfile
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.provenance import provenance
from tvmconv.experiments.results import Result, in_common, libraries
from tvmconv.experiments.run import Prepared, Progress, choose, run_ladder
from tvmconv.files import read_bytes
from tvmconv.workloads import SUITES, Conv, Conv2d, Layer, Workload, suite
from tvmconv.workloads.suites import Variant, is_file, walk

CHANNELS_SUITE = "d2l"  # its layers differ in nothing but their channels
# Arguments of `run_ladder` that `Prepared` has.
_PREPARED = frozenset({"schedules", "config", "seed", "log", "ladder", "predicted", "verify"})
MAX_LABEL = 500  # characters of a name or a label
FIXED_EFFORT = 10**9  # building and timing a workload's schedules take about as long as verifying so many bytes


@dataclass(frozen=True)
class Sweep:
    """The results of several workloads.

    Attributes:
        name: the suite's name, and which of its layers; or the filter's, and its mask.
        labels: what tells each workload from the others.
        results: one for each label.
        provenance: on what they were measured, with what, when.
        counts: how often the network has each workload; empty where nobody asks.
    """

    name: str
    labels: list[str]
    results: list[Result]
    provenance: str
    counts: list[int] = field(default_factory=list)

    @property
    def over_sizes(self) -> bool:
        """Whether the workloads differ in the size of their input alone: the operator and all else are the same."""
        parts = [size_and_rest(result.workload) for result in self.results]
        sizes = {size for size, _ in parts}
        return len({rest for _, rest in parts}) == 1 and len(sizes) == len(parts) > 1

    @property
    def axis(self) -> str:
        """What the labels are."""
        if self.over_sizes:
            return "size"
        return "channels" if all(label.isdigit() for label in self.labels) else "layer"

    @property
    def shows_bandwidth(self) -> bool:
        """Whether the bandwidths say most: only the size differs, and memory bounds all workloads."""
        return self.over_sizes and all(result.memory_bound for result in self.results)

    def to_json(self) -> str:
        """The sweep as JSON, one layer a line, of numbers six digits."""
        counts = [{"count": count} for count in self.counts] or [{}] * len(self.labels)
        layers = [
            json.dumps({"label": label, **count, "result": _shortened(result.to_json())}, ensure_ascii=False)
            for label, count, result in zip(self.labels, counts, self.results, strict=True)
        ]
        head = json.dumps({"name": self.name, "provenance": self.provenance}, ensure_ascii=False)
        return head.removesuffix("}") + ', "layers": [\n' + ",\n".join(layers) + "\n]}\n"

    @classmethod
    def from_json(cls, data: jsonfile.Value) -> Sweep:
        """Return the sweep that `to_json` wrote; raises `JsonError` for anything else."""
        layers = data["layers"].elements()
        data["layers"].check(bool(layers), "at least one layer")
        results = [Result.from_json(layer["result"]) for layer in layers]
        counts = [count.integer(1) for layer in layers if (count := layer.get("count"))]
        data["layers"].check(len(counts) in (0, len(layers)), "a count in each layer, or in none")
        labels = [layer["label"].line(MAX_LABEL) for layer in layers]
        return cls(data["name"].line(MAX_LABEL), labels, results, data["provenance"].line(), counts)

    @classmethod
    def read(cls, file: Path) -> Sweep:
        """Read the sweep in a file: the JSON of a sweep, or what `tvmconv run --json` prints.

        Raises:
            Error: the file holds neither.
            OSError: it cannot be read.
        """
        with jsonfile.refused(f"{file}: no results of a sweep"):
            data = read_bytes(file, unpack=True)
            return cls.from_json(_sweep_of_lines(data, file.stem) if is_run_output(data) else jsonfile.parse(data))


def is_run_output(data: bytes) -> bool:
    """Whether a file begins as what `tvmconv run --json` prints: a JSON object a line, one for each workload."""
    return data.startswith(b'{"workload": ') and b'"rows": ' in data.partition(b"\n")[0]


def _sweep_of_lines(data: bytes, name: str) -> jsonfile.Value:
    """Return what `tvmconv run --json` printed, as the JSON of a sweep has it; raises `JsonError`."""
    results = [jsonfile.parse(line) for line in data.splitlines() if line.strip()]
    layers = [{"label": result["workload"].decode(str).partition(":")[2], "result": result.value} for result in results]
    names = dict.fromkeys(result["device_name"].line() for result in results)
    return jsonfile.Value({"name": name, "provenance": f"{', '.join(names)}; tvmconv run --json", "layers": layers})


def _shortened(data: Any) -> Any:
    """JSON's values with no more digits than measurements have."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: _shortened(value) for key, value in data.items()}
    return [_shortened(value) for value in data] if isinstance(data, (list, tuple)) else data


def size_and_rest(workload: Workload) -> tuple[str, str]:
    """The workload's text in two: the shape of X, and all else: "4096x4096x3", "filter2d:5x5"."""
    operator, _, sizes = workload.text.partition(":")
    size, _, rest = sizes.partition(",")
    return size, f"{operator}:{rest}"


@dataclass(frozen=True)
class Selection:
    """Layers of a suite in some variant.

    Attributes:
        name: what tells them from other layers and variants, such as `resnet50-3x3-f16-nhwc-b32`; the plain suite's is
            its own. Files of results are called so.
        layers: by the labels that a sweep gives them.
    """

    name: str
    layers: dict[str, Layer]

    @property
    def workloads(self) -> dict[str, Workload]:
        """What the layers compute, by label."""
        return {label: layer.workload for label, layer in self.layers.items()}

    @property
    def counts(self) -> dict[str, int] | None:
        """How often the network has each layer, by label; None if filters are among them, which are no network."""
        if not all(isinstance(layer.workload, Conv) for layer in self.layers.values()):
            return None
        return {label: layer.count for label, layer in self.layers.items()}

    @property
    def network(self) -> dict[Workload, int]:
        """How often the network has each workload, whatever its layers are called; empty where `counts` is None."""
        found = Counter[Workload]()
        for label, count in (self.counts or {}).items():
            found[self.layers[label].workload] += count
        return dict(found)


def select_layers(
    name: str, variant: Variant | None = None, only: str | None = None, skip: str | None = None
) -> Selection:
    """The layers of a suite in a variant whose names contain a text.

    Args:
        name: of the suite, or the path of a file.
        variant: what the layers shall have instead of their own.
        only: what their names contain; by default all are selected.
        skip: what the names of those contain that are left out.

    Raises:
        WorkloadError: there is no such suite, or it has no such variant.
        Error: no layer is named like that.
        OSError: the file cannot be read.
    """
    how = variant or Variant()
    layers = suite(name, how.batch, dtype=how.dtype, layout=how.layout, epilogue=how.epilogue)
    chosen = layers_named(name, layers, only, skip)
    return Selection(_selection_name(name, how, only, skip), {_label(name, layer): layer for layer in chosen})


def select_walk(
    name: str, variant: Variant | None = None, only: str | None = None, skip: str | None = None
) -> tuple[str, list[Layer]]:
    """All layers of a suite whose names contain a text, one after another, equal ones as well, under one name.

    Arguments and errors are those of `select_layers`.
    """
    how = variant or Variant()
    each = [replace(layer, count=1) for layer in walk(name, how) for _ in range(layer.count)]
    return _selection_name(name, how, only, skip), layers_named(name, each, only, skip)


def layers_named(name: str, layers: Sequence[Layer], only: str | None, skip: str | None) -> list[Layer]:
    """Those layers of a suite whose names contain `only`, and not `skip`; raises Error if there are none."""
    chosen = [layer for layer in layers if (only or "") in layer.name and not (skip and skip in layer.name)]
    if not chosen:
        like = " and ".join([*([f"like {only!r}"] if only else []), *([f"unlike {skip!r}"] if skip else [])])
        there = ", ".join(dict.fromkeys(layer.name for layer in layers))
        raise Error(f"no layer of {name} is named {like}; there are {there}")
    return chosen


def _selection_name(name: str, how: Variant, only: str | None, skip: str | None) -> str:
    """What tells layers and their variant from others."""
    own_name = Path(name).stem if is_file(name) else name
    return "-".join(filter(None, (own_name, only, f"no-{skip}" if skip else "", how.text(suite(name)))))


def _label(name: str, layer: Layer) -> str:
    """What tells a layer of a suite from the others; numbers alone are channels."""
    if name == CHANNELS_SUITE and isinstance(layer.workload, Conv2d):
        return str(layer.workload.C)
    return f"layer {layer.name}" if layer.name.isdigit() else layer.name


def counted(sweep: Sweep) -> Sweep:
    """The sweep with the network's counts: its own, or those of the built-in suite that it is named after, if any.

    Files of version 0.1.0 do not have their own.
    """
    there = {} if sweep.counts else _built_in_counts(sweep)
    counts = [there.get(result.workload) for result in sweep.results]
    known = [count for count in counts if count is not None]
    return replace(sweep, counts=known) if len(known) == len(counts) else sweep


def _built_in_counts(sweep: Sweep) -> dict[Workload, int]:
    """How often the suite that a sweep is named after has each workload, in the variant of its first one."""
    named = [name for name in SUITES if f"{sweep.name}-".startswith(f"{name}-")]
    first: Any = sweep.results[0].workload  # of an operator's dataclass
    if not named or not all(isinstance(result.workload, Conv) for result in sweep.results):
        return {}
    layers = suite(max(named, key=len), first.N, dtype=first.dtype, layout=first.layout, epilogue=first.epilogue)
    return {layer.workload: layer.count for layer in layers}


def part_measured(
    sweep: Sweep, device: Device, schedules: Sequence[str] | None, baselines: Sequence[str]
) -> Sweep | None:
    """The part of a sweep that need not be measured again on a device; None if there is none.

    Args:
        sweep: what was measured before, perhaps elsewhere.
        device: where.
        schedules: as for `run_ladder`.
        baselines: as for `run_ladder`.
    """
    there = []
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        names = [schedule.name for schedule in choose(result.workload, schedules, device)]
        if result.device_name == device.name and [row.name for row in result.rows] == [*names, *baselines]:
            there.append((label, result))
    if not there:
        return None
    labels, results = zip(*there, strict=True)
    return replace(sweep, labels=list(labels), results=list(results))


def measure_sweep(
    name: str,
    workloads: Mapping[str, Workload],
    device: Device,
    command: str,
    *,
    progress: Callable[[str], AbstractContextManager[Progress]],
    done: Callable[[Sweep], None],
    known: Sweep | None = None,
    counts: Mapping[str, int] | None = None,
    each: Callable[[Workload], Mapping[str, Any]] | None = None,
    remark: str = "",
    **how: Any,
) -> Sweep:
    """Measure schedules on workloads, one after another.

    Args:
        name: of the sweep.
        workloads: by label.
        device: where.
        command: what was typed, for the provenance.
        progress: given a prefix, shows the steps that it is told.
        done: is told the sweep so far, whose last result is new.
        known: what was measured before, and is not measured again.
        counts: how often the network has each workload, by label.
        each: from a workload to arguments of `run_ladder` that are its own.
        remark: what else the provenance is to tell, beside the versions.
        how: arguments of `run_ladder` for all of them.
    """
    there = {result.workload: result for result in known.results} if known else {}
    new = list(dict.fromkeys(workload for workload in workloads.values() if workload not in there))
    remaining = _Remaining(new)
    sweep = Sweep(name, [], [], known.provenance if known else "")
    arguments = {workload: {**how, **(each(workload) if each else {})} for workload in new}
    ahead = _Ahead(device, arguments)
    for number, (label, workload) in enumerate(workloads.items(), 1):
        result = there.get(workload)
        if result is None:
            with progress(f"{device.text}: {number} of {len(workloads)}, {label}, ") as tell:
                own = {**arguments[workload], **ahead.taken(workload)}
                result = run_ladder(workload, device=device, progress=remaining.told(tell), **own)
            remaining.finish(workload)
        sweep = replace(sweep, labels=[*sweep.labels, label], results=[*sweep.results, result])
        if counts is not None:
            sweep = replace(sweep, counts=[*sweep.counts, counts[label]])
        if workload not in there:
            ran = [what for name in libraries(sweep.results) for what in in_common(sweep.results, name)]
            sweep = replace(sweep, provenance=provenance(device, command, ", ".join(filter(None, [*ran, remark]))))
            done(sweep)
    return sweep


class _Ahead:
    """Prepares the next workload while a GPU measures one; on other devices, which share the processors, none.

    Args:
        device: where.
        arguments: of `run_ladder`, for each workload in their order.
    """

    def __init__(self, device: Device, arguments: Mapping[Workload, Mapping[str, Any]]) -> None:
        self._device = device
        self._arguments = {
            workload: {name: value for name, value in own.items() if name in _PREPARED}
            for workload, own in arguments.items()
        }
        self._thread = ThreadPoolExecutor(1, "ahead") if device.kind == "cuda" else None
        self._next: dict[Workload, Future[Prepared]] = {}

    def taken(self, workload: Workload) -> dict[str, Prepared]:
        """What was prepared for a workload, as an argument of `run_ladder`; that of the next one is begun."""
        if not self._thread:
            return {}
        mine = self._next.pop(workload, None)
        self._arguments.pop(workload, None)
        prepared = mine.result() if mine else None
        for following, own in [*self._arguments.items()][:1]:
            self._next[following] = self._thread.submit(self._make, following, own)
        return {"prepared": prepared} if prepared else {}

    def _make(self, workload: Workload, own: Mapping[str, Any]) -> Prepared:
        return Prepared(workload, device=self._device, **own).make()


class _Remaining:
    """How long the rest of a sweep will take, by what its workloads took so far."""

    def __init__(self, workloads: Iterable[Workload]) -> None:
        self._ahead = sum(map(_effort, workloads))
        self._spent = 0
        self._begun = time.monotonic()
        self._end: float | None = None

    def finish(self, workload: Workload) -> None:
        """Count a workload that was measured."""
        self._ahead -= _effort(workload)
        self._spent += _effort(workload)
        now = time.monotonic()
        self._end = now + (now - self._begun) * self._ahead / self._spent

    def told(self, tell: Progress) -> Progress:
        """`tell`, with the time that is left behind each step as soon as it can be estimated."""
        if self._end is None:
            return tell
        end = self._end
        return lambda step: tell(f"{step}, {max(end - time.monotonic(), 0):,.0f} s left")


def _effort(workload: Workload) -> int:
    return FIXED_EFFORT + workload.min_bytes
