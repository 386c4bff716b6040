"""Sweeps, which measure schedules on several workloads, one after another, on one device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvmconv import jsonfile
from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiments.kernel_metrics import format_json_lines
from tvmconv.experiments.preparation import PreparedExperiment, select_schedules
from tvmconv.experiments.provenance import describe_provenance
from tvmconv.experiments.results import Result, find_common_settings, list_libraries
from tvmconv.experiments.run import ProgressCallback, run_schedules
from tvmconv.files import read_bytes
from tvmconv.workloads import SUITES, Conv, Conv2d, Layer, Workload, suite
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.suites import SuiteVariant, is_suite_file, iterate_layers

CHANNELS_SUITE = "d2l"  # its layers differ only in their channels
# Arguments of `run_schedules` that `PreparedExperiment` has.
_PREPARED_ARGUMENTS = frozenset({"schedules", "config", "seed", "log", "ladder", "predicted", "verify"})
MAX_LABEL = 500  # maximum number of characters of a name or a label
FIXED_EFFORT_BYTES = 10**9  # number of bytes whose verification takes as long as building and timing the schedules


@dataclass(frozen=True)
class Sweep:
    """The results of several workloads, each with a unique label."""

    name: str  # of the suite with its variant and selection, or of a filter with its mask
    labels: list[str]
    results: list[Result]
    provenance: str  # device, versions, date and command of the measurement
    counts: list[int] = field(default_factory=list)  # of each workload in the network; empty if it is not a network

    @property
    def labeled_results(self) -> list[tuple[str, Result]]:
        """Labels with their results."""
        return [*zip(self.labels, self.results, strict=True)]

    def has_row(self, name: str) -> bool:
        """Return whether a result has a row of this name."""
        return any(row.name == name for result in self.results for row in result.rows)

    @property
    def is_size_sweep(self) -> bool:
        """Whether the workloads differ only in the size of their input."""
        shapes_and_rests = [split_input_shape(result.workload) for result in self.results]
        sizes = {size for size, _ in shapes_and_rests}
        return len({other_text for _, other_text in shapes_and_rests}) == 1 and len(sizes) == len(shapes_and_rests) > 1

    @property
    def axis(self) -> str:
        """Name of the quantity of the labels: "size", "channels" or "layer"."""
        if self.is_size_sweep:
            return "size"
        return "channels" if all(label.isdigit() for label in self.labels) else "layer"

    @property
    def shows_bandwidth(self) -> bool:
        """Whether bandwidths are shown: only the size differs, and all workloads are memory-bound."""
        return self.is_size_sweep and all(result.is_memory_bound for result in self.results)

    def to_json(self) -> str:
        """Return the sweep as JSON, with one line per layer and numbers of six digits."""
        counts = [{"count": count} for count in self.counts] or [{}] * len(self.labels)
        layers = [
            {"label": label, **count, "result": _round_numbers(result.to_json())}
            for (label, result), count in zip(self.labeled_results, counts, strict=True)
        ]
        return format_json_lines({"name": self.name, "provenance": self.provenance}, "layers", layers)

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> Sweep:
        """Return the sweep that `to_json` wrote; raise `JsonError` for other data."""
        layers = data["layers"].elements()
        data["layers"].check(bool(layers), "at least one layer")
        results = [Result.from_json(layer["result"]) for layer in layers]
        counts = [count.decode_integer(1) for layer in layers if (count := layer.get("count"))]
        data["layers"].check(len(counts) in (0, len(layers)), "a count in each layer, or in none")
        labels = [layer["label"].decode_line(MAX_LABEL) for layer in layers]
        return cls(data["name"].decode_line(MAX_LABEL), labels, results, data["provenance"].decode_line(), counts)

    @classmethod
    def read(cls, file: Path) -> Sweep:
        """Read a sweep from a file: the JSON of a sweep, or the output of `tvmconv run --json`."""
        with jsonfile.translate_json_errors(f"{file}: no results of a sweep"):
            data = read_bytes(file, unpack=True)
            parsed = _parse_run_output(data, file.stem) if is_run_output(data) else jsonfile.parse_json(data)
            return cls.from_json(parsed)


def is_run_output(data: bytes) -> bool:
    """Return whether data starts like the output of `tvmconv run --json`, a line with a JSON object per workload."""
    return data.startswith(b'{"workload": ') and b'"rows": ' in data.partition(b"\n")[0]


def _parse_run_output(data: bytes, name: str) -> jsonfile.JsonValue:
    """Return the output of `tvmconv run --json` as the JSON of a sweep; raise `JsonError` for other data."""
    results = [jsonfile.parse_json(line) for line in data.splitlines() if line.strip()]
    layers = [{"label": result["workload"].decode(str).partition(":")[2], "result": result.value} for result in results]
    names = dict.fromkeys(result["device_name"].decode_line() for result in results)
    return jsonfile.JsonValue({"name": name, "provenance": f"{', '.join(names)}; tvmconv run --json", "layers": layers})


def _round_numbers(data: Any) -> Any:
    """Return JSON values with numbers of six digits."""
    if isinstance(data, float):
        return float(f"{data:.6g}")
    if isinstance(data, Mapping):
        return {key: _round_numbers(value) for key, value in data.items()}
    return [_round_numbers(value) for value in data] if isinstance(data, (list, tuple)) else data


def split_input_shape(workload: Workload) -> tuple[str, str]:
    """Split a workload's text into the shape of X and the rest, such as "4096x4096x3" and "filter2d:5x5"."""
    operator, _, sizes = workload.text.partition(":")
    input_shape, _, other_text = sizes.partition(",")
    return input_shape, f"{operator}:{other_text}"


@dataclass(frozen=True)
class LayerSelection:
    """Selected layers of a suite in a variant, by the labels of a sweep."""

    name: str  # of the suite with its selection and variant, such as `resnet50-3x3-f16-nhwc-b32`, as of result files
    layers: dict[str, Layer]

    @property
    def workloads(self) -> dict[str, Workload]:
        """Workloads of the layers, by label."""
        return {label: layer.workload for label, layer in self.layers.items()}

    @property
    def counts(self) -> dict[str, int] | None:
        """Number of occurrences of each layer in the network, by label; None if some are filters, not layers."""
        if not all(isinstance(layer.workload, ConvOperator) for layer in self.layers.values()):
            return None
        return {label: layer.count for label, layer in self.layers.items()}

    @property
    def network(self) -> dict[Workload, int]:
        """Number of occurrences of each workload in the network; empty if `counts` is None."""
        counts_by_workload = Counter[Workload]()
        for label, count in (self.counts or {}).items():
            counts_by_workload[self.layers[label].workload] += count
        return dict(counts_by_workload)


def select_layers(
    name: str,
    variant: SuiteVariant | None = None,
    name_filter: str | None = None,
    excluded_text: str | None = None,
    *,
    training: bool = False,
) -> LayerSelection:
    """Select layers of a suite, or of a file of layers, each distinct one once. The variant's properties replace those
    of the layers. With `training`, the layers have their gradients, as of `suite`. The layers' names contain
    `name_filter` and not `excluded_text`, or else Error is raised.
    """
    layer_variant = variant or SuiteVariant()
    layers = filter_layers(name, suite(name, **vars(layer_variant), training=training), name_filter, excluded_text)
    training_name = "training" if training else ""
    selection_name = _selection_name(name, layer_variant, training_name, name_filter, excluded_text)
    return LayerSelection(selection_name, {_make_label(name, layer): layer for layer in layers})


def select_layer_sequence(
    name: str, variant: SuiteVariant | None = None, name_filter: str | None = None, excluded_text: str | None = None
) -> tuple[str, list[Layer]]:
    """Return the name of a selection, as of `select_layers`, and its layers in the order of the network, repeated."""
    layer_variant = variant or SuiteVariant()
    single_layers = [replace(each, count=1) for each in iterate_layers(name, layer_variant) for _ in range(each.count)]
    selected_layers = filter_layers(name, single_layers, name_filter, excluded_text)
    return _selection_name(name, layer_variant, "", name_filter, excluded_text), selected_layers


def filter_layers(
    name: str, layers: Sequence[Layer], name_filter: str | None, excluded_text: str | None
) -> list[Layer]:
    """Return the layers whose names contain `name_filter` and not `excluded_text`; raise Error if there are none."""
    selected = [
        layer
        for layer in layers
        if (name_filter or "") in layer.name and not (excluded_text and excluded_text in layer.name)
    ]
    if not selected:
        conditions = [f"like {name_filter!r}"] if name_filter else []
        conditions += [f"unlike {excluded_text!r}"] if excluded_text else []
        layer_names = ", ".join(dict.fromkeys(layer.name for layer in layers))
        raise Error(f"no layer of {name} is named {' and '.join(conditions)}; there are {layer_names}")
    return selected


def _selection_name(
    name: str, layer_variant: SuiteVariant, training_name: str, name_filter: str | None, excluded_text: str | None
) -> str:
    """Return a name of the suite with its selection and variant."""
    own_name = Path(name).stem if is_suite_file(name) else name
    exclusion = f"no-{excluded_text}" if excluded_text else ""
    return "-".join(
        filter(None, (own_name, training_name, name_filter, exclusion, layer_variant.format_suffix(suite(name))))
    )


def _make_label(name: str, layer: Layer) -> str:
    """Return the label of a layer; a label of digits only is a number of channels."""
    if name == CHANNELS_SUITE and isinstance(layer.workload, Conv2d):
        return str(layer.workload.C)
    return f"layer {layer.name}" if layer.name.isdigit() else layer.name


def fill_counts(sweep: Sweep) -> Sweep:
    """Return the sweep with counts: its own, or else those of the built-in suite in its name, if there is one. Files of
    version 0.1.0 have no counts.
    """
    suite_counts = {} if sweep.counts else _find_suite_counts(sweep)
    counts = [suite_counts.get(result.workload) for result in sweep.results]
    known_counts = [count for count in counts if count is not None]
    return replace(sweep, counts=known_counts) if len(known_counts) == len(counts) else sweep


def _find_suite_counts(sweep: Sweep) -> dict[Workload, int]:
    """Return the counts of the suite in a sweep's name, in the variant of the first workload."""
    suite_names = [name for name in SUITES if f"{sweep.name}-".startswith(f"{name}-")]
    if not suite_names or not all(isinstance(result.workload, Conv) for result in sweep.results):
        return {}
    first: Any = sweep.results[0].workload
    name = max(suite_names, key=len)
    layers = suite(name, first.N, dtype=first.dtype, layout=first.layout, epilogue=first.epilogue)
    return {layer.workload: layer.count for layer in layers}


def find_reusable_part(
    sweep: Sweep, device: Device, schedules: Sequence[str] | None, baselines: Sequence[str]
) -> Sweep | None:
    """Return the part of an earlier sweep, possibly of another device, that need not be measured again; None: nothing.
    The other arguments are those of `run_schedules` in the new sweep.
    """
    reusable = []
    for label, result in sweep.labeled_results:
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
    complete: Callable[[PreparedExperiment], None] | None = None,
    **how: Any,
) -> Sweep:
    """Measure schedules on workloads, one after another.

    Args:
        name: Name of the sweep.
        workloads: Workloads by label.
        device: Device to measure on.
        command: Command line, for the provenance.
        progress: Function from a prefix to a context manager that yields the function for progress texts.
        on_result: Function that is called with the sweep so far after each new result.
        previous_sweep: Earlier results, which are not measured again.
        counts: Number of occurrences of each workload in the network, by label.
        workload_arguments: Function from a workload to arguments of `run_schedules` for this workload only.
        extra_provenance: Text that is added to the versions of the provenance.
        complete: Function that is called with each experiment before it is measured, and may add kernels to it.
        how: Arguments of `run_schedules` for all workloads.
    """
    results = {result.workload: result for result in previous_sweep.results} if previous_sweep else {}
    arguments = {
        workload: {**how, **(workload_arguments(workload) if workload_arguments else {})}
        for workload in workloads.values()
        if workload not in results
    }
    prepared_experiments = _prepare_ahead(device, arguments)
    remaining_bytes, finished_bytes = sum(map(_estimate_effort_bytes, arguments)), 0
    started_at, expected_end = time.monotonic(), None
    sweep = Sweep(name, [], [], previous_sweep.provenance if previous_sweep else "")
    for number, (label, workload) in enumerate(workloads.items(), 1):
        if workload not in results:
            with progress(f"{device.text}: {number} of {len(workloads)}, {label}, ") as on_progress:
                experiment = next(prepared_experiments)
                if complete:
                    experiment = experiment or _prepare(workload, device, arguments[workload])
                    complete(experiment)
                results[workload] = run_schedules(
                    workload,
                    device=device,
                    progress=_add_remaining_time(on_progress, expected_end),
                    prepared=experiment,
                    **arguments[workload],
                )
            remaining_bytes -= _estimate_effort_bytes(workload)
            finished_bytes += _estimate_effort_bytes(workload)
            now = time.monotonic()
            expected_end = now + (now - started_at) * remaining_bytes / finished_bytes
        sweep = replace(sweep, labels=[*sweep.labels, label], results=[*sweep.results, results[workload]])
        if counts is not None:
            sweep = replace(sweep, counts=[*sweep.counts, counts[label]])
        if workload in arguments:
            libraries = list_libraries(sweep.results)
            settings = [setting for library in libraries for setting in find_common_settings(sweep.results, library)]
            library_text = ", ".join(filter(None, [*settings, extra_provenance]))
            sweep = replace(sweep, provenance=describe_provenance(device, command, library_text))
            on_result(sweep)
    return sweep


def _prepare_ahead(
    device: Device, arguments: Mapping[Workload, Mapping[str, Any]]
) -> Iterator[PreparedExperiment | None]:
    """Yield the experiment of each workload, which a thread prepares while the GPU measures the one before. The first
    experiment, and all those on devices that are CPUs, are not prepared.
    """
    executor = ThreadPoolExecutor(1, "ahead")
    future: Future[PreparedExperiment] | None = None
    for following in [*[*arguments][1:], None]:
        experiment = future.result() if future else None
        future = None
        if following is not None and device.kind == "cuda":
            future = executor.submit(_prepare, following, device, arguments[following])
        yield experiment


def _prepare(workload: Workload, device: Device, arguments: Mapping[str, Any]) -> PreparedExperiment:
    own_arguments = {name: value for name, value in arguments.items() if name in _PREPARED_ARGUMENTS}
    return PreparedExperiment(workload, device=device, **own_arguments).build_all_kernels()


def _add_remaining_time(on_progress: ProgressCallback, expected_end: float | None) -> ProgressCallback:
    """Return a function that adds the remaining time, once it is known, to the texts for `on_progress`."""
    if expected_end is None:
        return on_progress
    return lambda message: on_progress(f"{message}, {max(expected_end - time.monotonic(), 0):,.0f} s left")


def _estimate_effort_bytes(workload: Workload) -> int:
    """Return a number to which the time for a workload is about proportional."""
    return FIXED_EFFORT_BYTES + workload.min_bytes
