"""What experiments give: rows of schedules and libraries, and the way to JSON and back."""

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
from tvmconv.workloads import Workload, parse

DEFAULT_RIDGE = 10.0  # FLOP/byte at which a roofline bends, where the device's peaks are not known
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9  # that a launch may have taken: all that is computed from it is finite
NON_NEGATIVE_FIELDS = (  # fields of a row that are no less than 0
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
    """What one schedule, or a library to compare with, did on a workload.

    Attributes:
        name: of the schedule or the library.
        verified: whether the output was compared with float64 and is right.
        error: relative L2 error of the output; None if it never ran.
        failure: why there is no time, in one line; None where there is one.
        timing: only of a verified kernel.
        gflops: GFLOP/s at the median time.
        peak_share: of the device's float32 peak, 0 to 1; None where that is not known.
        bandwidth: bytes/s at the median time, if memory is asked for no more than the workload's least bytes.
        bandwidth_share: of the peak of the device's memory, 0 to 1 (above where a cache serves); None where that is not
            known.
        speedup: time of the naive schedule over this one's; None without a time of that.
        launch: grid and block.
        shared_bytes: static shared memory of a block, in bytes.
        registers: a thread; None on OpenCL.
        spills: bytes of register spills; None on OpenCL.
        config: the value of every knob.
        library: for a library, what ran: its version and settings.
        schedule: of a row that is not named after it, such as the fastest of a log.
        rounds: seconds a launch in each round of the comparison; `timing` is the median round's.
        unstable: whether the rounds never agreed within 10 %, however often they were repeated.
        sampled: how many outputs were compared with float64, where that was a sample; None for all.
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
        """The row of what nobody named by its schedule, under a name of its own."""
        return self if self.name == name else replace(self, name=name, schedule=self.name)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON has it, times in seconds."""
        data = asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            data["error"] = None  # JSON has no NaN
        if self.timing is not None:
            data["timing"] |= {"median": self.timing.median, "spread": self.timing.spread}
        return data

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> ResultRow:
        """Return the row that `to_json` wrote; raises `JsonError` for anything else."""
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
        workload: what was computed.
        device: its text, such as `cuda:0`.
        device_name: the driver's name for it.
        seed: of the inputs.
        rows: one a schedule, the naive one first; then the libraries that were asked for.
        peak_flops: of the device, in float32 FLOP/s; None where it is not known.
        peak_bandwidth: of the device's memory, in bytes/s; None where it is not known.
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
        """Whether the memory's peak limits the workload, not the multipliers': left of the roofline's ridge."""
        flops, bandwidth = self.peak_flops, self.peak_bandwidth
        ridge = flops / bandwidth if flops and bandwidth else DEFAULT_RIDGE
        return self.workload.arithmetic_intensity < ridge

    @property
    def is_cold(self) -> bool:
        """Whether the times were taken with arrays outside the cache."""
        return any(row.timing.cold for row in self.rows if row.timing)

    @property
    def has_all_times(self) -> bool:
        """Whether every row is verified and has a time."""
        return all(row.failure is None for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON has it."""
        rows = [row.to_json() for row in self.rows]
        device_fields = {"device": self.device, "device_name": self.device_name, "seed": self.seed}
        peaks = {"peak_flops": self.peak_flops, "peak_bandwidth": self.peak_bandwidth}
        return {"workload": self.workload.text, **device_fields, **peaks, "rows": rows}

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> Result:
        """Return the result that `to_json` wrote; raises `JsonError` for anything else."""
        rows = tuple(map(ResultRow.from_json, data["rows"].elements()))
        data["rows"].check(bool(rows), "at least one row")
        decoded_fields = {
            "workload": data["workload"].convert(parse),
            "seed": data["seed"].decode_integer(0),
            "rows": rows,
        }
        decoded_fields |= {name: data[name].decode_line() for name in ("device", "device_name")}
        result: Result = data.decode(cls, provided_fields=decoded_fields)
        for peak in (data.get("peak_flops"), data.get("peak_bandwidth")):  # files of version 0.1.0 do not have them
            if peak and peak.value is not None:
                peak.decode_number(1)
        return result


def _parse_timing(data: jsonfile.JsonValue) -> Timing | None:
    """Return the timing of a row, which is None where there is none; the median and the spread follow from it."""
    if data.value is None:
        return None
    seconds = tuple(sample.decode_number(MIN_SECONDS, MAX_SECONDS) for sample in data["seconds"].elements())
    data["seconds"].check(bool(seconds), "at least one time")
    return Timing(seconds, data["method"].decode(str), data["cold"].decode(bool))


def list_libraries(results: Sequence[Result]) -> list[str]:
    """The names of the libraries that ran, in the order of the rows."""
    return list(dict.fromkeys(row.name for result in results for row in result.rows if row.library))


def find_common_settings(results: Sequence[Result], name: str) -> list[str]:
    """What a library ran, its version and settings, as far as that is the same wherever it ran."""
    settings_of_rows = [
        row.library.split(", ") for result in results for row in result.rows if row.name == name and row.library
    ]
    return (
        [
            setting
            for setting in settings_of_rows[0]
            if all(setting in other_settings for other_settings in settings_of_rows)
        ]
        if settings_of_rows
        else []
    )
