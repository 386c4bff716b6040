"""The collection of a page's contents from logs, comparisons, counters, and kernels that are built for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import cast

from tvmconv import registry
from tvmconv.analysis.nsight.predicted_counters import predict_counters
from tvmconv.analysis.waterfall import WaterfallStep, compute_waterfall
from tvmconv.devices import Device
from tvmconv.errors import Error, ScheduleError
from tvmconv.experiments.counter_comparison import CounterComparison, PredictedKernelCounters
from tvmconv.experiments.counters import Counters
from tvmconv.experiments.kernel_metrics import KernelMetricsFile
from tvmconv.experiments.sweep import Sweep
from tvmconv.kernel import Kernel, build_for_device
from tvmconv.logs.build import build
from tvmconv.logs.lines import InvalidLines
from tvmconv.logs.log import read_records
from tvmconv.logs.ranking import RecordIndex
from tvmconv.logs.record import Record
from tvmconv.reports import timing_groups
from tvmconv.reports.page.contents import Contents
from tvmconv.reports.timing_groups import TimingGroup
from tvmconv.reports.waterfall import make_time_lookup
from tvmconv.target import Target
from tvmconv.version import VERSION
from tvmconv.workloads import Layer, Workload

COMPARED_SCHEDULE = "conflict_free"  # schedule to which the fastest is compared, where it applies


@dataclass(frozen=True)
class ReportSources:
    """The sources of a page's numbers."""

    logs: Sequence[Path]
    logs_name: str  # on the page
    requires_records: bool = False  # whether the logs were given, so that they must have records of the page's layers
    sweeps: Sequence[Sweep] = ()  # each must have results of the page's layers
    counters: Sequence[Path] = ()
    schedules: Sequence[str] | None = None  # those to show; None for the fastest and one to compare it with


@dataclass
class DeviceRecords:
    """The records of one device in the logs, in the order of the files, and the files that have such records."""

    device: str = ""
    records: dict[Workload, list[Record]] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    invalid_lines: dict[Path, InvalidLines] = field(default_factory=dict)


def collect_contents(
    name: str,
    layers: Sequence[Layer],
    device: Device,
    device_spec: Target | None,
    sources: ReportSources,
    command: str,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Contents:
    """Collect the contents of a page, whose kernels are compiled for the device.

    Args:
        name: Text of the workload, or name of the network.
        layers: Layers of the network, or the one workload.
        device: Device to compile for.
        device_spec: Specification of the GPU; None if unknown.
        sources: Sources of measured numbers.
        command: Command line, for the provenance.
        on_progress: Function that is called with a line of text on the current work.

    Raises:
        Error: A file cannot be read, a schedule does not exist, or a source has nothing about these layers.
    """
    on_progress("reading")
    device_records = read_logs(sources.logs, [layer.workload for layer in layers], device)
    if sources.requires_records and not device_records.records:
        raise Error(f"no record of {name} in {sources.logs_name}")
    for sweep in sources.sweeps:
        if not any(timing_groups.times_from_sweep(sweep, layer.workload) for layer in layers):
            raise Error(f"no result of {name} in {sweep.name}")
    counters, counter_provenance = _read_counters(layers, sources.counters, device, on_progress)
    is_single = len(layers) == 1
    groups = {
        layer.workload: _collect_groups(layer.workload, device_records, sources, device, is_single=is_single)
        for layer in layers
    }
    focus_workload = max(layers, key=lambda layer: layer.count * _estimate_seconds(layer.workload, groups)).workload
    if is_single and not groups[focus_workload] and device_spec:
        on_progress("computing bounds")
        computed_group = timing_groups.times_from_code(focus_workload, device, device_spec, sources.schedules)
        groups[focus_workload] = [computed_group]
    kernels = _build_kernels(focus_workload, device_records, sources, device, on_progress)
    records = device_records.records.get(focus_workload, [])
    waterfall_steps, no_waterfall_reason = _compute_waterfall(kernels, device_spec, records, on_progress)
    return Contents(
        name=name,
        layers=layers,
        target_text=f"Compiled for {device.text if device.arch == device.text else f'{device.text}, {device.name}'}.",
        device_spec=device_spec,
        timing_groups=groups,
        focus_workload=focus_workload,
        kernels=kernels,
        searches=[(sources.logs_name, records)] if records else [],
        waterfall=waterfall_steps,
        no_waterfall_reason=no_waterfall_reason,
        counters=counters,
        invalid_lines=[f"{file}: {invalid}" for file, invalid in device_records.invalid_lines.items() if invalid.count],
        provenance=[
            ("this page", f"tvmconv {VERSION}, TVM {metadata.version('apache-tvm')}; {command}"),
            *_describe_logs(device_records, sources),
            *((sweep.name, sweep.provenance) for sweep in sources.sweeps),
            *counter_provenance,
        ],
    )


def read_logs(logs: Sequence[Path], workloads: Sequence[Workload], device: Device) -> DeviceRecords:
    """Read the records of workloads on the device in the logs that matches `device` best."""
    device_records = DeviceRecords()
    workload_set, single_workload = set(workloads), workloads[0] if len(workloads) == 1 else None
    file_records: list[tuple[Path, Record]] = []
    for file in logs:
        device_records.invalid_lines[file] = InvalidLines()
        file_records += (
            (file, item)
            for item in read_records(file, device_records.invalid_lines[file], single_workload)
            if item.workload in workload_set
        )
    if not file_records:
        return device_records
    files = list(dict.fromkeys(file for file, _ in file_records))
    rankings = RecordIndex(files)
    nearest = (item.device for workload in workloads for _, item in rankings.iterate_by_device_match(workload, device))
    device_records.device = next(nearest, file_records[0][1].device)
    for file, record in file_records:
        if record.device == device_records.device:
            device_records.records.setdefault(record.workload, []).append(record)
            if file not in device_records.files:
                device_records.files.append(file)
    return device_records


def _collect_groups(
    w: Workload, device_records: DeviceRecords, sources: ReportSources, device: Device, *, is_single: bool
) -> list[TimingGroup]:
    """Return the times of a workload by the selected schedules; for a network only the log's best time."""
    log_group = timing_groups.times_from_log(sources.logs_name, device_records.records.get(w, []))
    if log_group and not is_single:
        log_group = replace(log_group, timings=log_group.timings[:1])
    sweep_groups = (timing_groups.times_from_sweep(sweep, w) for sweep in sources.sweeps)
    groups = [timing_group for timing_group in (log_group, *sweep_groups) if timing_group]
    if is_single:
        groups = [_select_schedules(group, w, sources.schedules) for group in groups]
        return [group for group in groups if group.timings or group.failures]
    predicted_group = None if groups else timing_groups.times_from_model(w, device)
    return [predicted_group] if predicted_group else groups


def _select_schedules(group: TimingGroup, w: Workload, schedules: Sequence[str] | None) -> TimingGroup:
    """Return a group without the schedules that were not selected; libraries stay."""
    if schedules is None:
        return group
    excluded = {schedule.name for schedule in registry.schedules(w)} - {*schedules}
    timings = tuple(timing for timing in group.timings if not excluded & {timing.name, timing.note})
    failures = tuple(failure for failure in group.failures if failure[0] not in excluded)
    return replace(group, timings=timings, failures=failures)


def _estimate_seconds(w: Workload, groups: Mapping[Workload, Sequence[TimingGroup]]) -> float:
    """Return the fastest known time of a workload, or a guess, in order to find the most expensive layer."""
    return next((group.timings[0].seconds for group in groups[w] if group.timings), w.flops * 1e-15)


def _build_kernels(
    w: Workload,
    device_records: DeviceRecords,
    sources: ReportSources,
    device: Device,
    on_progress: Callable[[str], None],
) -> list[Kernel]:
    """Build the kernels to show, the fastest first."""
    if sources.schedules:
        kernels, failures = [], []
        for name in sources.schedules:
            on_progress(f"building {name}")
            try:
                kernels.append(build_fastest(w, name, device_records, device))
            except ScheduleError as failure:
                registry.report_skipped_schedule(failure, "the page")
                failures.append(failure)
        if not kernels:
            raise failures[0]
        return kernels
    on_progress("building the fastest")
    best = build_fastest(w, None, device_records, device)
    schedules_by_name = {
        schedule.name: schedule for schedule in registry.schedules(w) if schedule.can_run_on(device.kind, device.arch)
    }
    naive = registry.get_baseline_schedule(w)
    for name in (COMPARED_SCHEDULE, naive.name if naive else ""):
        if name in schedules_by_name and name != best.schedule.name:
            on_progress(f"building {name}")
            return [best, build_for_device(w, schedules_by_name[name], device, None)]
    return [best]


def build_fastest(w: Workload, name: str | None, device_records: DeviceRecords, device: Device) -> Kernel:
    """Build the fastest kernel in the log, of a schedule if one is named, or else that of the default knobs."""
    has_records = any(record.ok and name in (None, record.schedule) for record in device_records.records.get(w, []))
    return build(w, name, device=device, log=device_records.files if has_records else None)


def _compute_waterfall(
    kernels: Sequence[Kernel],
    device_spec: Target | None,
    records: Sequence[Record],
    on_progress: Callable[[str], None],
) -> tuple[list[WaterfallStep], str]:
    """Return the waterfall of the first kernel with a non-default config, or the reason why there is none."""
    if not device_spec:
        return [], "The specifications of this architecture's GPUs are unknown, so that no bound can be computed."
    try:
        best = next((kernel for kernel in kernels if not _is_default(kernel)), kernels[0])
        if not best.config:
            return [], f"{best.schedule.name} has no knobs."
        find_known_seconds = make_time_lookup(records, best.schedule.name)
        waterfall_steps = compute_waterfall(
            best, device_spec, find_known_seconds, lambda knob: on_progress(f"waterfall: {knob}")
        )
    except Error as error:
        return [], f"The configs on the way to this kernel cannot be analyzed: {error}"
    return (waterfall_steps, "") if len(waterfall_steps) > 1 else ([], f"{best.schedule.name} has its default config.")


def _is_default(kernel: Kernel) -> bool:
    space = kernel.schedule.space(kernel.workload, kernel.device.limits)
    return space.point_from_config(kernel.config).tolist() == space.point_from_config({}).tolist()


def _read_counters(
    layers: Sequence[Layer], files: Sequence[Path], device: Device, on_progress: Callable[[str], None]
) -> tuple[list[CounterComparison], list[tuple[str, str]]]:
    """Return the measured counters with those predicted from the code, and the provenance of each file."""
    rows, provenance = [], []
    workloads_by_text = {layer.workload.text: layer.workload for layer in layers}
    for file in files:
        readings = _read_metrics_file(file, workloads_by_text, device, on_progress)
        provenance.append((file.name, readings.provenance))
        kernel_rows = [row for row in readings.kernels if row.workload in workloads_by_text]
        if not kernel_rows:
            subject = "any of these layers" if len(workloads_by_text) > 1 else layers[0].workload.text
            raise Error(f"{file}: no counters of {subject}")
        rows += kernel_rows
    return rows, provenance


def _read_metrics_file(
    file: Path, workloads_by_text: Mapping[str, Workload], device: Device, on_progress: Callable[[str], None]
) -> KernelMetricsFile[CounterComparison]:
    """Read a file of `tvmconv counters`, or of its --stalls, for which counters are predicted here."""
    try:
        return KernelMetricsFile.read(file, CounterComparison)
    except Error:
        metrics = KernelMetricsFile.read(file, Counters)
    rows = []
    for counters in metrics.kernels:
        if w := workloads_by_text.get(counters.workload):
            on_progress(f"counting {counters.schedule}")
            kernel = build_for_device(w, registry.find_schedule(w, counters.schedule), device, None)
            counted = cast(PredictedKernelCounters, predict_counters(kernel, kernel.kernels[0]).to_json())
            names = counters.workload, counters.schedule
            rows.append(CounterComparison(*names, dict(kernel.config), 0, counted, dict(counters.metrics)))
    return KernelMetricsFile(metrics.name, metrics.provenance, rows)


def _describe_logs(device_records: DeviceRecords, sources: ReportSources) -> list[tuple[str, str]]:
    """Return the provenance of the logs: numbers of records, dates and versions."""
    records = [record for workload_records in device_records.records.values() for record in workload_records]
    if not records:
        return []
    versions = Counter(" ".join(pair) for record in records for pair in sorted(record.versions.items()))
    names = ", ".join(file.name for file in device_records.files)
    texts = [
        f"{names}: {len(records):,} records on {device_records.device}",
        timing_groups.format_dates(records),
        ", ".join(sorted(versions)),
    ]
    return [(sources.logs_name, "; ".join(filter(None, texts)))]
