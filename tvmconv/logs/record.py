"""A record: one measurement of one config, and its line in a log.

The line is a JSON object in AutoTVM's log format 0.2, with further keys for values that the format lacks:

    {"workload": "conv2d:…", "schedule": "direct", "device": "NVIDIA H200",
     "input": ["cuda -arch=sm_90", "conv2d_nchw.cuda", [["TENSOR", [1, 64, 56, 56], "float32"], …], {}],
     "config": {"index": 0, "code_hash": null, "entity": [["tile_f", "sp", [-1, 1, 4, 8]], …]},
     "result": [[1.37e-05, …], 0, 0.21, 1783000000.0], "version": 0.2, "tvm_version": "0.27.0", …}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tvmconv import compat
from tvmconv.errors import KnobError, RecordError
from tvmconv.logs import autotvm, json_checks
from tvmconv.measure.results import ErrorKind, MeasureResult, compute_cost_seconds
from tvmconv.space import Config, format_value
from tvmconv.workloads import Workload

VERSION = 0.2
FAILED_SECONDS = 1e9  # AutoTVM's cost of a failed config
MIN_SECONDS, MAX_SECONDS = 1e-12, FAILED_SECONDS  # range of a launch, in which rates and sums stay finite
MAX_ELAPSED_SECONDS = 1e9  # thirty years of tuning


class RecordKey(NamedTuple):
    """The key of a record."""

    workload: Workload
    schedule: str
    device: str  # name of the device, such as "NVIDIA H200"; for lines of AutoTVM, the model of the target
    target: str  # AutoTVM's target text, such as "cuda -arch=sm_90" or "opencl"

    def to_json(self) -> dict[str, Any]:
        """Return the first keys of a line: those of tvmconv, and AutoTVM's `input`."""
        task, args = autotvm.encode_task(self.workload, self.schedule)
        return {
            "workload": self.workload.text,
            "schedule": self.schedule,
            "device": self.device,
            "input": [self.target, task, args, {}],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordKey:
        """Return the key of a line, from AutoTVM's `input` if the line has no keys of tvmconv."""
        target, task, args, kwargs = json_checks.check_list(data.get("input"), "input", 4)
        target, task = json_checks.check_line(target, "the target"), json_checks.check_line(task, "the task's name")
        args = json_checks.check_list(args, "the task's arguments")
        if kwargs != {}:
            raise RecordError("the task has keyword arguments, which no schedule takes", json_checks.abbreviate(kwargs))
        device = (
            json_checks.check_line(data["device"], "device") if "device" in data else autotvm.parse_model_name(target)
        )
        if "workload" not in data and "schedule" not in data:
            return cls(*autotvm.decode_task(task, args), device, target)
        workload = autotvm.parse_workload(json_checks.check_text(data.get("workload"), "workload"))
        schedule = json_checks.check_line(data.get("schedule"), "schedule")
        # The task may be written in another way, for example with a short padding, so that decoding it decides.
        is_equal_text = autotvm.encode_task(workload, schedule) == (task, args)
        if not is_equal_text and autotvm.decode_task(task, args) != (workload, schedule):
            raise RecordError("workload and schedule contradict the task", f"{schedule} of {workload}, but {task}")
        return cls(workload, schedule, device, target)


@dataclass(frozen=True)
class Record:
    """One measurement of one config.

    Attributes:
        workload: Workload that was computed.
        schedule: Name of the schedule.
        config: Values by knob name, as they were proposed.
        device: Name of the device, such as "NVIDIA H200".
        target: AutoTVM's target text, such as "cuda -arch=sm_90" or "opencl".
        times: Seconds per launch of each repeat; empty for an error.
        error: Kind of error, `ErrorKind.NONE` for a valid measurement.
        message: Message of an error, in one line.
        relative_error: Relative L2 error against the float64 reference; None if it is unknown or not finite.
        cost_seconds: Seconds of wall-clock time to build and to run.
        timestamp: Time of the measurement, in seconds since 1970.
        elapsed: Seconds of tuning of this workload up to the record, earlier sessions included.
        resources: The known ones of registers, spills, shared_bytes, threads and blocks. For several kernels, they are
            the maxima, and `steps` is the number of kernels. `dynamic_shared_bytes` is present if it is not zero.
        versions: Versions of the software that built and ran the kernel: tvmconv, tvm, nvrtc …
        index: Index of the config in AutoTVM's space, kept from AutoTVM's lines; 0 in lines of tvmconv.
        final: Whether this is a final timing of a search, which times its fastest configs again in turn and for longer,
            and not a trial.

    Examples:
        >>> from tvmconv.logs.record import Record
        >>> from tvmconv.workloads import parse
        >>> w = parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
        >>> record = Record(w, "tiling", {"tile_rc": (-1, 4)}, "NVIDIA H200", "cuda -arch=sm_90", times=(2e-6,))
        >>> Record.parse(record.line()).cost
        2e-06
        >>> record.rounded() == record
        True
    """

    workload: Workload
    schedule: str
    config: Config
    device: str
    target: str
    times: tuple[float, ...] = ()
    error: ErrorKind = ErrorKind.NONE
    message: str = ""
    relative_error: float | None = None
    cost_seconds: float = 0.0
    timestamp: float = 0.0
    elapsed: float | None = None
    resources: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    index: int = 0
    final: bool = False

    def __repr__(self) -> str:
        config = " ".join(f"{name}={format_value(value)}" for name, value in self.config.items())
        description = " ".join(filter(None, [self.schedule, config]))
        result_text = f"{self.cost * 1e6:.4g} µs" if self.ok else f"failed, {self.error.name}: {self.message}"
        return f"<Record {self.workload} by {description} on {self.device}: {result_text}>"

    deviation = compat.former_attribute("relative_error")

    @property
    def ok(self) -> bool:
        """Whether the config ran, gave the correct result, and was timed."""
        return math.isfinite(self.cost)

    @property
    def cost(self) -> float:
        """Seconds per launch, the median of the repeats; `math.inf` for an error."""
        return compute_cost_seconds(self.error, self.times)

    @property
    def gflops(self) -> float:
        """GFLOP/s at `cost`; 0 for an error."""
        return self.workload.flops / self.cost / 1e9

    @property
    def key(self) -> RecordKey:
        """Workload, schedule, device and target of the record."""
        return RecordKey(self.workload, self.schedule, self.device, self.target)

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Key that all measurements of one config on one device share."""
        return self.workload.text, self.schedule, self.device, json.dumps(self.config, sort_keys=True)

    def rounded(self) -> Record:
        """Return the record with fewer digits: five for times, and whole seconds for the timestamp."""
        return replace(
            self,
            times=tuple(float(f"{seconds:.5g}") for seconds in self.times),
            relative_error=None if self.relative_error is None else float(f"{self.relative_error:.1e}"),
            cost_seconds=round(self.cost_seconds, 2),
            timestamp=float(round(self.timestamp)),
            elapsed=None if self.elapsed is None else round(self.elapsed, 2),
        )

    @classmethod
    def from_measurement(cls, measurement: MeasureResult, elapsed_seconds: float | None = None) -> Record:
        """Make the record of a measurement.

        Args:
            measurement: Result of one measurement, as a runner returns it.
            elapsed_seconds: Seconds of tuning up to the measurement; None if it is not part of a search.

        Returns:
            The record, with the current names of the knobs.

        Examples:
            >>> Record.from_measurement(measurement, elapsed_seconds=1.5).line()  # doctest: +SKIP
        """
        outcome = measurement.runner_result
        return cls(
            measurement.workload,
            measurement.schedule,
            compat.rename_config(measurement.schedule, measurement.config),
            measurement.device,
            measurement.target,
            times=outcome.times,
            error=outcome.error,
            message=outcome.message,
            relative_error=outcome.relative_error,
            cost_seconds=measurement.seconds,
            timestamp=measurement.timestamp,
            elapsed=elapsed_seconds,
            resources=measurement.resources,
            versions=measurement.versions,
            final=measurement.is_final,
        )

    def line(self) -> str:
        """Return the record as a line of a log, in ASCII and without the newline; equal records have equal lines."""
        has_failed = self.error is not ErrorKind.NONE
        costs = [FAILED_SECONDS] if has_failed else self.times
        versions = dict(self.versions)
        data = {
            **self.key.to_json(),
            "config": {"index": self.index, "code_hash": None, "entity": autotvm.encode_config(self.config)},
            "result": [costs, int(self.error), self.cost_seconds, self.timestamp],
            "version": VERSION,
            "tvm_version": versions.pop("tvm", None),
            "message": self.message or None,
            "relative_error": self.relative_error if math.isfinite(self.relative_error or 0) else None,
            "elapsed": self.elapsed,
            "resources": dict(self.resources) or None,
            "versions": versions or None,
            "final": self.final or None,
        }
        return json.dumps({key: value for key, value in data.items() if value is not None}, allow_nan=False)

    @classmethod
    def parse(cls, line: str | bytes) -> Record:
        """Parse a line of tvmconv or of AutoTVM.

        Args:
            line: Line without its newline, as text or in UTF-8.

        Returns:
            The record.

        Raises:
            RecordError: The line is not a record, or its task has no schedule.
        """
        data = json_checks.parse_object(line)
        if "input" not in data and "v" in data:
            raise RecordError("the line is in AutoTVM's log format 0.1: expected 0.2")
        if data.get("version", VERSION) != VERSION:
            raise RecordError(f"the log format is not {VERSION}", json_checks.abbreviate(data["version"]))
        data = _rename_keys(data)
        key = RecordKey.from_json(data)
        config = json_checks.check_object(data.get("config"), "config")
        costs, error_no, cost_seconds, timestamp = json_checks.check_list(data.get("result"), "result", 4)
        error = _parse_error_kind(error_no)
        costs = json_checks.check_list(costs, "the costs")
        return cls(
            *key[:2],
            _parse_config(key.schedule, config.get("entity")),
            *key[2:],
            times=() if error else _parse_times(costs),
            error=error,
            message=_parse_message(data, costs if error else ()),
            relative_error=_parse_optional_number(data, "relative_error"),
            cost_seconds=json_checks.check_number(cost_seconds, "all_cost"),
            timestamp=json_checks.check_number(timestamp, "timestamp"),
            elapsed=_parse_elapsed(data),
            resources=_parse_table(json_checks.check_integer, data, "resources"),
            versions=_parse_versions(data),
            index=json_checks.check_integer(config.get("index", 0), "the config's index"),
            final=data.get("final") is True,
        )


def _rename_keys(data: dict[str, Any]) -> dict[str, Any]:
    try:
        return compat.rename_keys(data, compat.RECORD_KEYS)
    except ValueError as error:
        raise RecordError("the line has a key twice", str(error)) from error


def _parse_config(schedule: str, entities: object) -> Config:
    try:
        return compat.rename_config(schedule, autotvm.decode_config(entities))
    except KnobError as error:
        raise RecordError("the config has a knob twice", str(error)) from error


def _parse_error_kind(value: object) -> ErrorKind:
    try:
        return ErrorKind(json_checks.check_integer(value, "error_no"))
    except ValueError as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError("error_no is not 0 to 8", json_checks.abbreviate(value)) from error


def _parse_times(costs: list[Any]) -> tuple[float, ...]:
    times = tuple(json_checks.check_number(cost, "a time") for cost in costs)
    if not times or min(times) < MIN_SECONDS or max(times) > MAX_SECONDS:
        expectation = f"a record without an error has times of {MIN_SECONDS:g} to {MAX_SECONDS:g} seconds"
        raise RecordError(expectation, json_checks.abbreviate(costs))
    return times


def _parse_message(data: Mapping[str, Any], costs: list[Any] | tuple[()]) -> str:
    """Return the message of a line of tvmconv, or the text that AutoTVM writes in place of the times of an error."""
    if data.get("message") is not None:
        return json_checks.check_text(data["message"], "message")
    text = next((cost for cost in costs if isinstance(cost, str)), "")
    return " ".join(json_checks.check_text(text, "message").split())


def _parse_optional_number(data: Mapping[str, Any], name: str) -> float | None:
    return None if data.get(name) is None else json_checks.check_number(data[name], name)


def _parse_elapsed(data: Mapping[str, Any]) -> float | None:
    seconds = _parse_optional_number(data, "elapsed")
    if seconds is not None and not 0 <= seconds <= MAX_ELAPSED_SECONDS:
        raise RecordError(f"elapsed is not 0 to {MAX_ELAPSED_SECONDS:g} seconds", json_checks.abbreviate(seconds))
    return seconds


def _parse_table(check_value: Any, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = json_checks.check_object(data.get(name) or {}, name)
    return {json_checks.check_text(key, f"a key of {name}"): check_value(value, name) for key, value in table.items()}


def _parse_versions(data: Mapping[str, Any]) -> dict[str, str]:
    versions = _parse_table(json_checks.check_text, data, "versions")
    if data.get("tvm_version") is not None:
        versions["tvm"] = json_checks.check_text(data["tvm_version"], "tvm_version")
    return versions
