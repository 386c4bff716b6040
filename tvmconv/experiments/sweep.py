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
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.results import Result, find_common_settings, list_libraries
from tvmconv.experiments.run import PreparedExperiment, ProgressCallback, run_schedules, select_schedules
from tvmconv.files import read_bytes
from tvmconv.workloads import SUITES, Conv, Conv2d, Layer, Workload, suite
from tvmconv.workloads.suites import SuiteVariant, is_suite_file, iterate_layers

CHANNELS_SUITE = "d2l"  # its layers differ in nothing but their channels
# Arguments of `run_schedules` that `PreparedExperiment` has.
_PREPARED_ARGUMENTS = frozenset({"schedules", "config", "seed", "log", "ladder", "predicted", "verify"})
MAX_LABEL = 500  # characters of a name or a label
FIXED_EFFORT_BYTES = 10**9  # building and timing a workload's schedules take about as long as verifying so many bytes


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
    def is_size_sweep(self) -> bool:
        """Whether the workloads differ in the size of their input alone: the operator and all else are the same."""
        shapes_and_rests = [split_input_shape(result.workload) for result in self.results]
        sizes = {size for size, _ in shapes_and_rests}
        return len({other_text for _, other_text in shapes_and_rests}) == 1 and len(sizes) == len(shapes_and_rests) > 1

    @property
    def axis(self) -> str:
        """What the labels are."""
        if self.is_size_sweep:
            return "size"
        return "channels" if all(label.isdigit() for label in self.labels) else "layer"

    @property
    def shows_bandwidth(self) -> bool:
        """Whether the bandwidths say most: only the size differs, and memory bounds all workloads."""
        return self.is_size_sweep and all(result.is_memory_bound for result in self.results)

    def to_json(self) -> str:
        """The sweep as JSON, one layer a line, of numbers six digits."""
        counts = [{"count": count} for count in self.counts] or [{}] * len(self.labels)
        layers = [
            json.dumps({"label": label, **count, "result": _round_numbers(result.to_json())}, ensure_ascii=False)
            for label, count, result in zip(self.labels, counts, self.results, strict=True)
        ]
        header = json.dumps({"name": self.name, "provenance": self.provenance}, ensure_ascii=False)
        return header.removesuffix("}") + ', "layers": [\n' + ",\n".join(layers) + "\n]}\n"

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> Sweep:
        """Return the sweep that `to_json` wrote; raises `JsonError` for anything else."""
        layers = data["layers"].elements()
        data["layers"].check(bool(layers), "at least one layer")
        results = [Result.from_json(layer["result"]) for layer in layers]
        counts = [count.decode_integer(1) for layer in layers if (count := layer.get("count"))]
        data["layers"].check(len(counts) in (0, len(layers)), "a count in each layer, or in none")
        labels = [layer["label"].decode_line(MAX_LABEL) for layer in layers]
        return cls(data["name"].decode_line(MAX_LABEL), labels, results, data["provenance"].decode_line(), counts)

    @classmethod
    def read(cls, file: Path) -> Sweep:
        """Read the sweep in a file: the JSON of a sweep, or what `tvmconv run --json` prints.

        Raises:
            Error: the file holds neither.
            OSError: it cannot be read.
        """
        with jsonfile.translate_json_errors(f"{file}: no results of a sweep"):
            data = read_bytes(file, unpack=True)
            return cls.from_json(
                _parse_run_output(data, file.stem) if is_run_output(data) else jsonfile.parse_json(data)
            )


def is_run_output(data: bytes) -> bool:
    """Whether a file begins as what `tvmconv run --json` prints: a JSON object a line, one for each workload."""
    return data.startswith(b'{"workload": ') and b'"rows": ' in data.partition(b"\n")[0]


def _parse_run_output(data: bytes, name: str) -> jsonfile.JsonValue:
    """Return what `tvmconv run --json` printed, as the JSON of a sweep has it; raises `JsonError`."""
    results = [jsonfile.parse_json(line) for line in data.splitlines() if line.strip()]
    layers = [{"label": result["workload"].decode(str).partition(":")[2], "result": result.value} for result in results]
    names = dict.fromkeys(result["device_name"].decode_line() for result in results)
    return jsonfile.JsonValue({"name": name, "provenance": f"{', '.join(names)}; tvmconv run --json", "layers": layers})


def _round_numbers(data: Any) -> Any:
    """JSON's values with no more digits than measurements have."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: _round_numbers(value) for key, value in data.items()}
    return [_round_numbers(value) for value in data] if isinstance(data, (list, tuple)) else data


def split_input_shape(workload: Workload) -> tuple[str, str]:
    """The workload's text in two: the shape of X, and all else: "4096x4096x3", "filter2d:5x5"."""
    operator, _, sizes = workload.text.partition(":")
    input_shape, _, other_text = sizes.partition(",")
    return input_shape, f"{operator}:{other_text}"


@dataclass(frozen=True)
class LayerSelection:
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
        counts_by_workload = Counter[Workload]()
        for label, count in (self.counts or {}).items():
            counts_by_workload[self.layers[label].workload] += count
        return dict(counts_by_workload)


def select_layers(
    name: str, variant: SuiteVariant | None = None, name_filter: str | None = None, excluded_text: str | None = None
) -> LayerSelection:
    """The layers of a suite in a variant whose names contain a text.

    Args:
        name: of the suite, or the path of a file.
        variant: what the layers shall have instead of their own.
        name_filter: what their names contain; by default all are selected.
        excluded_text: what the names of those contain that are left out.

    Raises:
        WorkloadError: there is no such suite, or it has no such variant.
        Error: no layer is named like that.
        OSError: the file cannot be read.
    """
    layer_variant = variant or SuiteVariant()
    layers = suite(
        name,
        layer_variant.batch,
        dtype=layer_variant.dtype,
        layout=layer_variant.layout,
        epilogue=layer_variant.epilogue,
    )
    selected_layers = filter_layers(name, layers, name_filter, excluded_text)
    return LayerSelection(
        _selection_name(name, layer_variant, name_filter, excluded_text),
        {_make_label(name, layer): layer for layer in selected_layers},
    )


def select_layer_sequence(
    name: str, variant: SuiteVariant | None = None, name_filter: str | None = None, excluded_text: str | None = None
) -> tuple[str, list[Layer]]:
    """All layers of a suite whose names contain a text, one after another, equal ones as well, under one name.

    Arguments and errors are those of `select_layers`.
    """
    layer_variant = variant or SuiteVariant()
    single_layers = [
        replace(layer, count=1) for layer in iterate_layers(name, layer_variant) for _ in range(layer.count)
    ]
    return _selection_name(name, layer_variant, name_filter, excluded_text), filter_layers(
        name, single_layers, name_filter, excluded_text
    )


def filter_layers(
    name: str, layers: Sequence[Layer], name_filter: str | None, excluded_text: str | None
) -> list[Layer]:
    """Those layers of a suite whose names contain `name_filter`, and not `excluded_text`; raises Error if there are
    none.
    """
    selected = [
        layer
        for layer in layers
        if (name_filter or "") in layer.name and not (excluded_text and excluded_text in layer.name)
    ]
    if not selected:
        condition = " and ".join(
            [
                *([f"like {name_filter!r}"] if name_filter else []),
                *([f"unlike {excluded_text!r}"] if excluded_text else []),
            ]
        )
        layer_names = ", ".join(dict.fromkeys(layer.name for layer in layers))
        raise Error(f"no layer of {name} is named {condition}; there are {layer_names}")
    return selected


def _selection_name(name: str, layer_variant: SuiteVariant, name_filter: str | None, excluded_text: str | None) -> str:
    """What tells layers and their variant from others."""
    own_name = Path(name).stem if is_suite_file(name) else name
    return "-".join(
        filter(
            None,
            (
                own_name,
                name_filter,
                f"no-{excluded_text}" if excluded_text else "",
                layer_variant.format_suffix(suite(name)),
            ),
        )
    )


def _make_label(name: str, layer: Layer) -> str:
    """What tells a layer of a suite from the others; numbers alone are channels."""
    if name == CHANNELS_SUITE and isinstance(layer.workload, Conv2d):
        return str(layer.workload.C)
    return f"layer {layer.name}" if layer.name.isdigit() else layer.name


def fill_counts(sweep: Sweep) -> Sweep:
    """The sweep with the network's counts: its own, or those of the built-in suite that it is named after, if any.

    Files of version 0.1.0 do not have their own.
    """
    suite_counts = {} if sweep.counts else _find_suite_counts(sweep)
    counts = [suite_counts.get(result.workload) for result in sweep.results]
    known_counts = [count for count in counts if count is not None]
    return replace(sweep, counts=known_counts) if len(known_counts) == len(counts) else sweep


def _find_suite_counts(sweep: Sweep) -> dict[Workload, int]:
    """How often the suite that a sweep is named after has each workload, in the variant of its first one."""
    suite_names = [name for name in SUITES if f"{sweep.name}-".startswith(f"{name}-")]
    first_workload: Any = sweep.results[0].workload  # of an operator's dataclass
    if not suite_names or not all(isinstance(result.workload, Conv) for result in sweep.results):
        return {}
    layers = suite(
        max(suite_names, key=len),
        first_workload.N,
        dtype=first_workload.dtype,
        layout=first_workload.layout,
        epilogue=first_workload.epilogue,
    )
    return {layer.workload: layer.count for layer in layers}


def find_reusable_part(
    sweep: Sweep, device: Device, schedules: Sequence[str] | None, baselines: Sequence[str]
) -> Sweep | None:
    """The part of a sweep that need not be measured again on a device; None if there is none.

    Args:
        sweep: what was measured before, perhaps elsewhere.
        device: where.
        schedules: as for `run_schedules`.
        baselines: as for `run_schedules`.
    """
    reusable = []
    for label, result in zip(sweep.labels, sweep.results, strict=True):
        names = [schedule.name for schedule in select_schedules(result.workload, schedules, device)]
        if result.device_name == device.name and [row.name for row in result.rows] == [*names, *baselines]:
            reusable.append((label, result))
    if not reusable:
        return None
    labels, results = zip(*reusable, strict=True)
    return replace(sweep, labels=list(labels), results=list(results))


def measure_sweep(
    name: str,
    workloads: Mapping[str, Workload],
    device: Device,
    command: str,
    *,
    progress: Callable[[str], AbstractContextManager[ProgressCallback]],
    on_result: Callable[[Sweep], None],
    previous_sweep: Sweep | None = None,
    counts: Mapping[str, int] | None = None,
    workload_arguments: Callable[[Workload], Mapping[str, Any]] | None = None,
    extra_provenance: str = "",
    **how: Any,
) -> Sweep:
    """Measure schedules on workloads, one after another.

    Args:
        name: of the sweep.
        workloads: by label.
        device: where.
        command: what was typed, for the provenance.
        progress: given a prefix, shows the steps that it is told.
        on_result: is told the sweep so far, whose last result is new.
        previous_sweep: what was measured before, and is not measured again.
        counts: how often the network has each workload, by label.
        workload_arguments: from a workload to arguments of `run_schedules` that are its own.
        extra_provenance: what else the provenance is to tell, beside the versions.
        how: arguments of `run_schedules` for all of them.
    """
    known_results = {result.workload: result for result in previous_sweep.results} if previous_sweep else {}
    new_workloads = list(dict.fromkeys(workload for workload in workloads.values() if workload not in known_results))
    time_estimator = _RemainingTimeEstimator(new_workloads)
    sweep = Sweep(name, [], [], previous_sweep.provenance if previous_sweep else "")
    arguments = {
        workload: {**how, **(workload_arguments(workload) if workload_arguments else {})} for workload in new_workloads
    }
    prefetcher = _NextExperimentPrefetcher(device, arguments)
    for number, (label, workload) in enumerate(workloads.items(), 1):
        result = known_results.get(workload)
        if result is None:
            with progress(f"{device.text}: {number} of {len(workloads)}, {label}, ") as on_progress:
                run_arguments = {**arguments[workload], **prefetcher.take_prepared(workload)}
                result = run_schedules(
                    workload, device=device, progress=time_estimator.with_estimate(on_progress), **run_arguments
                )
            time_estimator.finish(workload)
        sweep = replace(sweep, labels=[*sweep.labels, label], results=[*sweep.results, result])
        if counts is not None:
            sweep = replace(sweep, counts=[*sweep.counts, counts[label]])
        if workload not in known_results:
            library_settings = [
                setting
                for name in list_libraries(sweep.results)
                for setting in find_common_settings(sweep.results, name)
            ]
            sweep = replace(
                sweep,
                provenance=describe_provenance(
                    device, command, ", ".join(filter(None, [*library_settings, extra_provenance]))
                ),
            )
            on_result(sweep)
    return sweep


class _NextExperimentPrefetcher:
    """Prepares the next workload while a GPU measures one; on other devices, which share the processors, none.

    Args:
        device: where.
        arguments: of `run_schedules`, for each workload in their order.
    """

    def __init__(self, device: Device, arguments: Mapping[Workload, Mapping[str, Any]]) -> None:
        self._device = device
        self._arguments = {
            workload: {name: value for name, value in workload_arguments.items() if name in _PREPARED_ARGUMENTS}
            for workload, workload_arguments in arguments.items()
        }
        self._executor = ThreadPoolExecutor(1, "ahead") if device.kind == "cuda" else None
        self._futures: dict[Workload, Future[PreparedExperiment]] = {}

    def take_prepared(self, workload: Workload) -> dict[str, PreparedExperiment]:
        """What was prepared for a workload, as an argument of `run_schedules`; that of the next one is begun."""
        if not self._executor:
            return {}
        future = self._futures.pop(workload, None)
        self._arguments.pop(workload, None)
        experiment = future.result() if future else None
        for next_workload, next_arguments in [*self._arguments.items()][:1]:
            self._futures[next_workload] = self._executor.submit(self._prepare, next_workload, next_arguments)
        return {"prepared": experiment} if experiment else {}

    def _prepare(self, workload: Workload, arguments: Mapping[str, Any]) -> PreparedExperiment:
        return PreparedExperiment(workload, device=self._device, **arguments).build_all_kernels()


class _RemainingTimeEstimator:
    """How long the rest of a sweep will take, by what its workloads took so far."""

    def __init__(self, workloads: Iterable[Workload]) -> None:
        self._remaining_bytes = sum(map(_estimate_effort_bytes, workloads))
        self._finished_bytes = 0
        self._started_at = time.monotonic()
        self._expected_end: float | None = None

    def finish(self, workload: Workload) -> None:
        """Count a workload that was measured."""
        self._remaining_bytes -= _estimate_effort_bytes(workload)
        self._finished_bytes += _estimate_effort_bytes(workload)
        now = time.monotonic()
        self._expected_end = now + (now - self._started_at) * self._remaining_bytes / self._finished_bytes

    def with_estimate(self, on_progress: ProgressCallback) -> ProgressCallback:
        """`on_progress`, with the time that is left behind each step as soon as it can be estimated."""
        if self._expected_end is None:
            return on_progress
        expected_end = self._expected_end
        return lambda message: on_progress(f"{message}, {max(expected_end - time.monotonic(), 0):,.0f} s left")


def _estimate_effort_bytes(workload: Workload) -> int:
    return FIXED_EFFORT_BYTES + workload.min_bytes
