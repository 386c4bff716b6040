"""Results of experiments: rows of schedules and libraries, and their conversion to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tvmconv import compat, jsonfile
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices import Timing
from tvmconv.errors import KnobError
from tvmconv.space import JSON_VALUE_TYPES, Config
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.workloads import Workload, parse

MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9  # range of a launch, in which all results stay finite
NON_NEGATIVE_FIELDS = (
    "error",
    "gflops",
    "peak_share",
    "bandwidth",
    "bandwidth_share",
    "speedup",
    "shared_bytes",
    "registers",
    "spills",
    "sampled",
)


@dataclass(frozen=True)
class ResultRow:
    """The result of one schedule or library for a workload.

    Attributes:
        name: Name of the schedule or the library.
        verified: Whether the output was compared with float64 results and is correct.
        error: Relative L2 error of the output; None if the kernel did not run.
        failure: Reason why there is no time, in one line; None if there is a time.
        timing: Times of a verified kernel.
        gflops: GFLOP/s at the median time.
        peak_share: Fraction of the device's float32 peak rate, 0 to 1; None if the peak is unknown.
        bandwidth: Bandwidth at the median time in bytes/s, for the workload's minimum number of bytes.
        bandwidth_share: Fraction of the peak memory bandwidth, which may exceed 1 with a cache; None if it is unknown.
        speedup: Time of the naive schedule divided by this one's; None without a time of the naive schedule.
        launch: Sizes of grid and block.
        shared_bytes: Static shared memory per block, in bytes.
        registers: Number of registers per thread; None on OpenCL.
        spills: Bytes of register spills; None on OpenCL.
        config: Value of every knob.
        library: Version and settings of a library.
        schedule: Name of the schedule, if `name` is another one, such as that of the log's best record.
        rounds: Seconds per launch in each round of the comparison; `timing` is that of the median round.
        unstable: Whether the rounds deviate by more than 10 % after all repetitions.
        sampled: Number of outputs that were compared with float64 results; None for all.
    """

    name: str
    verified: bool = False
    error: float | None = None
    failure: str | None = None
    timing: Timing | None = None
    gflops: float | None = None
    peak_share: float | None = None
    bandwidth: float | None = None
    bandwidth_share: float | None = None
    speedup: float | None = None
    launch: LaunchConfig | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    config: Config = field(default_factory=dict)
    library: str | None = None
    schedule: str | None = None
    rounds: tuple[float, ...] = ()
    unstable: bool = False
    sampled: int | None = None

    def with_name(self, name: str) -> ResultRow:
        """Return the row under another name, with the name of its schedule in `schedule`."""
        return self if self.name == name else replace(self, name=name, schedule=self.name)

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON values, with times in seconds."""
        data = asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            data["error"] = None  # JSON has no NaN
        if self.timing is not None:
            data["timing"] |= {"median": self.timing.median, "spread": self.timing.spread}
        return data

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> ResultRow:
        """Return the row that `to_json` wrote; raise `JsonError` for other data."""
        config = {name: value.decode(JSON_VALUE_TYPES) for name, value in data["config"].members().items()}
        row: ResultRow = data.decode(cls, provided_fields={"timing": _parse_timing(data["timing"]), "config": config})
        try:
            row = replace(row, config=compat.rename_config(row.schedule or row.name, row.config))
        except KnobError:
            data["config"].check(False, "each knob once, by its former or its current name")
        data["name"].decode_line()
        for name in NON_NEGATIVE_FIELDS:
            if getattr(row, name) is not None:
                data[name].decode_number(0)
        for seconds in data["rounds"].elements() if row.rounds else ():
            seconds.decode_number(MIN_SECONDS, MAX_SECONDS)
        if row.launch:
            extents = (*row.launch.grid, *row.launch.block, *row.launch.cluster)
            data["launch"].check(min(extents) >= 1, "extents of at least 1")
        return row


@dataclass(frozen=True)
class Result:
    """The rows of one workload on one device.

    Attributes:
        workload: Workload that was computed.
        device: Text of the device, such as `cuda:0`.
        device_name: Name of the device by its driver.
        seed: Seed of the inputs.
        rows: One row per schedule, the naive one first, then one row per library.
        peak_flops: Peak rate of the device in float32 FLOP/s; None if it is unknown.
        peak_bandwidth: Peak memory bandwidth of the device in bytes/s; None if it is unknown.
    """

    workload: Workload
    device: str
    device_name: str
    seed: int
    rows: tuple[ResultRow, ...]
    peak_flops: float | None = None
    peak_bandwidth: float | None = None

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory bandwidth limits the workload: its arithmetic intensity is below the roofline's ridge."""
        flops, bandwidth = self.peak_flops, self.peak_bandwidth
        ridge = flops / bandwidth if flops and bandwidth else UNKNOWN_TARGET.flops / UNKNOWN_TARGET.bandwidth
        return self.workload.arithmetic_intensity < ridge

    @property
    def is_cold(self) -> bool:
        """Whether arrays were outside the cache when kernels were timed."""
        return any(row.timing.cold for row in self.rows if row.timing)

    @property
    def has_all_times(self) -> bool:
        """Whether every row is verified and has a time."""
        return all(row.failure is None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        rows = [row.to_json() for row in self.rows]
        device_fields = {"device": self.device, "device_name": self.device_name, "seed": self.seed}
        peaks = {"peak_flops": self.peak_flops, "peak_bandwidth": self.peak_bandwidth}
        return {"workload": self.workload.text, **device_fields, **peaks, "rows": rows}

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> Result:
        """Return the result that `to_json` wrote; raise `JsonError` for other data."""
        rows = tuple(map(ResultRow.from_json, data["rows"].elements()))
        data["rows"].check(bool(rows), "at least one row")
        decoded_fields = {
            "workload": data["workload"].convert(parse),
            "seed": data["seed"].decode_integer(0),
            "rows": rows,
        }
        decoded_fields |= {name: data[name].decode_line() for name in ("device", "device_name")}
        result: Result = data.decode(cls, provided_fields=decoded_fields)
        for peak in (data.get("peak_flops"), data.get("peak_bandwidth")):  # files of version 0.1.0 lack them
            if peak and peak.value is not None:
                peak.decode_number(1)
        return result


def _parse_timing(data: jsonfile.JsonValue) -> Timing | None:
    """Return the timing of a row, or None; the median and the spread are computed from it."""
    if data.value is None:
        return None
    seconds = tuple(sample.decode_number(MIN_SECONDS, MAX_SECONDS) for sample in data["seconds"].elements())
    data["seconds"].check(bool(seconds), "at least one time")
    return Timing(seconds, data["method"].decode(str), data["cold"].decode(bool))


def list_libraries(results: Sequence[Result]) -> list[str]:
    """Return the names of the libraries that ran, in the order of the rows."""
    return list(dict.fromkeys(row.name for result in results for row in result.rows if row.library))


def find_common_settings(results: Sequence[Result], name: str) -> list[str]:
    """Return the parts of a library's version and settings that all its rows share."""
    rows = [row for result in results for row in result.rows if row.name == name]
    settings = [row.library.split(", ") for row in rows if row.library]
    return [setting for setting in settings[0] if all(setting in others for others in settings)] if settings else []
