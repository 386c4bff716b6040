"""Results of experiments: rows of schedules and libraries, and their conversion to and from JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tvmconv import compat, jsonfile
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.devices import Timing
from tvmconv.devices.power import SustainedRun
from tvmconv.errors import KnobError
from tvmconv.html import make_html_bars, make_html_table
from tvmconv.palette import LIBRARY_COLOR, find_style
from tvmconv.space import JSON_VALUE_TYPES, Config
from tvmconv.target import TENSOR_CORE_RATE, UNKNOWN_TARGET
from tvmconv.workloads import Workload, parse

TUNED = "tuned"  # name of the row of a log's best record
PREDICTED = "predicted"  # name of the row of the cost model's prediction
UNTUNED = "untuned"  # name of the row of the fastest default config
MIN_SECONDS, MAX_SECONDS = 1e-12, 1e9  # range of a launch, in which all results stay finite


@dataclass(frozen=True)
class ResultRow:
    """The result of one schedule or library for a workload; numbers that are unknown or do not apply are None."""

    name: str  # of the schedule or the library
    verified: bool = False  # whether the output was compared with float64 results and is correct
    error: float | None = None  # relative L2 error of the output
    failure: str | None = None  # reason why there is no time, in one line
    timing: Timing | None = None
    gflops: float | None = None  # GFLOP/s at the median time
    peak_share: float | None = None  # fraction of the device's float32 peak rate
    bandwidth: float | None = None  # bytes/s at the median time, for the workload's minimum number of bytes
    bandwidth_share: float | None = None  # fraction of the peak memory bandwidth, which may exceed 1 with a cache
    speedup: float | None = None  # time of the naive schedule divided by this one's
    launch: LaunchConfig | None = None
    shared_bytes: int | None = None  # static shared memory per block
    registers: int | None = None  # per thread
    spills: int | None = None  # bytes
    config: Config = field(default_factory=dict)
    library: str | None = None  # version and settings of a library
    schedule: str | None = None  # name of the schedule, if `name` is another one, such as that of the log's best record
    rounds: tuple[float, ...] = ()  # seconds per launch in each round; `timing` is that of the median round
    unstable: bool = False  # whether the rounds deviate by more than 10 % after all repetitions
    sampled: int | None = None  # number of outputs that were compared with float64 results, if not all
    sustained: SustainedRun | None = None  # clock, power and time of a longer run, if it was made

    @property
    def seconds(self) -> float | None:
        """Median time of a launch."""
        return self.timing.median if self.timing else None

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
        if row.sustained:
            data["sustained"]["seconds"].decode_number(MIN_SECONDS, MAX_SECONDS)
            data["sustained"]["clock_hz"].decode_number(1)
        for name, value in vars(row).items():
            if type(value) in (int, float):
                data[name].decode_number(0)
        for seconds in data["rounds"].elements() if row.rounds else ():
            seconds.decode_number(MIN_SECONDS, MAX_SECONDS)
        if row.launch:
            extents = (*row.launch.grid, *row.launch.block, *row.launch.cluster)
            data["launch"].check(min(extents) >= 1, "extents of at least 1")
        return row


@dataclass(frozen=True, repr=False)
class Result:
    """The rows of one workload on one device.

    Attributes:
        workload: The workload.
        device: Text of the device, such as "cuda:0".
        device_name: Name of the device by its driver.
        seed: Seed of the inputs.
        rows: One row per schedule, the naive one first, then one per library.
        peak_flops: Peak float32 rate of the device in FLOP/s; None if it is unknown.
        peak_bandwidth: Peak memory bandwidth of the device in bytes per second; None if it is unknown.
        peak_clock: Clock in Hz at which the device has `peak_flops`; None if it is unknown.

    Examples:
        >>> import json
        >>> import tvmconv as tc
        >>> from tvmconv import jsonfile
        >>> result = tc.run("conv2d:1x8x8x8,8x8x3x3,s1,p1", ["tiling"], device="opencl:0", seconds=0.01)
        >>> result.find_row("tiling").verified, result.compute_speedup("tiling", "default") > 0
        (True, True)
        >>> values = json.loads(json.dumps(result.to_json()))
        >>> tc.Result.from_json(jsonfile.JsonValue(values)).workload == result.workload
        True
    """

    workload: Workload
    device: str
    device_name: str
    seed: int
    rows: tuple[ResultRow, ...]
    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    peak_clock: float | None = None

    def __repr__(self) -> str:
        times = (f"{name} {seconds * 1e6:.4g} µs" for name, seconds in self.seconds.items())
        return f"<Result {self.workload.text} on {self.device_name}: {', '.join(times) or 'no time'}>"

    def _repr_html_(self) -> str:
        baseline = self.rows[0].name
        rows = [
            (
                row.name,
                f"{row.seconds * 1e6:,.4g}" if row.seconds else "failed",
                f"{row.speedup:.3g}" if row.speedup else "",
                f"{row.gflops:,.4g}" if row.gflops else "",
                f"{row.error:.1e}" if row.error is not None else "",
                str(row.launch or ""),
                row.failure or row.library or "",
            )
            for row in self.rows
        ]
        headers = ("schedule", "time [µs]", f"× {baseline}", "GFLOP/s", "rel. error", "grid × block", "notes")
        title = f"{self.workload.text} on {self.device_name}"
        speedups = {row.name: row.speedup for row in self.rows if row.speedup}
        labels = {name: f"{speedup:.3g} × {baseline}" for name, speedup in speedups.items()}
        colors = {row.name: LIBRARY_COLOR if row.library else find_style(row.name).color for row in self.rows}
        table = make_html_table(headers, rows, {"schedule", "grid × block", "notes"}, title)
        return table + make_html_bars(speedups, labels, colors)

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory bandwidth limits the workload: its arithmetic intensity is below the roofline's ridge."""
        flops, bandwidth = self.peak_flops, self.peak_bandwidth
        ridge = flops / bandwidth if flops and bandwidth else UNKNOWN_TARGET.flops / UNKNOWN_TARGET.bandwidth
        return self.workload.arithmetic_intensity < ridge

    @property
    def limit_seconds(self) -> float | None:
        """Seconds that no direct convolution undercuts at the peak rates of the device; None if these are unknown.

        They are the longer of the arithmetic at the peak rate for the dtype and the minimum memory traffic at the
        memory bandwidth. Arrays that stay in the L2 cache between launches are not bound by the latter.
        """
        return self._compute_limit_seconds(1.0)

    def _compute_limit_seconds(self, clock_fraction: float) -> float | None:
        """Return `limit_seconds` at a fraction of the clock of the peak rates, which the memory keeps."""
        if not self.peak_flops or not self.peak_bandwidth:
            return None
        peak_flops = self.peak_flops * TENSOR_CORE_RATE.get(self.workload.dtype, 1) * clock_fraction
        return max(self.workload.flops / peak_flops, self.workload.min_bytes / self.peak_bandwidth)

    def compute_limit_share(self, name: str) -> float | None:
        """Return `limit_seconds` as a fraction of the time of a row; None if one of them is unknown.

        If the row has a `SustainedRun`, both are those of this run: its time, and the limit at the clock that it held.

        Args:
            name: Name of the row.

        Examples:
            >>> import tvmconv as tc
            >>> from tvmconv.devices import Timing
            >>> from tvmconv.experiments.results import ResultRow
            >>> w = tc.parse("conv2d:1x8x8x8,8x8x3x3,s1,p1")
            >>> row = ResultRow("tiling", timing=Timing((2e-6,), "a graph", False))
            >>> result = tc.Result(w, "cuda:0", "NVIDIA H200", 0, (row,), peak_flops=66.9e12, peak_bandwidth=4.8e12)
            >>> f"{result.compute_limit_share('tiling'):.1e}"
            '6.7e-04'
        """
        seconds, limit_seconds = self.seconds.get(name), self.limit_seconds
        sustained = self.find_row(name).sustained
        if sustained and self.peak_clock:
            seconds = sustained.seconds
            limit_seconds = self._compute_limit_seconds(min(sustained.clock_hz / self.peak_clock, 1.0))
        return limit_seconds / seconds if limit_seconds and seconds else None

    @property
    def is_cold(self) -> bool:
        """Whether arrays were outside the cache when kernels were timed."""
        return any(row.timing.cold for row in self.rows if row.timing)

    @property
    def has_all_times(self) -> bool:
        """Whether every row is verified and has a time."""
        return all(row.failure is None for row in self.rows)

    @property
    def seconds(self) -> dict[str, float]:
        """Median times of the rows that have one, by name."""
        return {row.name: row.timing.median for row in self.rows if row.timing}

    def find_row(self, name: str) -> ResultRow:
        """Return the row of a schedule or library; an empty row if there is none.

        Args:
            name: Name of the row.
        """
        return next((row for row in self.rows if row.name == name), ResultRow(name))

    def compute_speedup(self, name: str, library: str) -> float | None:
        """Return how many times as fast as another row a row is; None if one has no time.

        Args:
            name: Name of the row.
            library: Name of the other row.
        """
        seconds = self.seconds
        return seconds[library] / seconds[name] if {name, library} <= seconds.keys() else None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        values = {**vars(self), "workload": self.workload.text}
        return values | {"rows": [row.to_json() for row in values.pop("rows")]}

    @classmethod
    def from_json(cls, data: jsonfile.JsonValue) -> Result:
        """Return the result that `to_json` wrote.

        Args:
            data: The values that `to_json` returned, read from JSON.

        Raises:
            JsonError: The data is not a result.
        """
        rows = tuple(map(ResultRow.from_json, data["rows"].elements()))
        data["rows"].check(bool(rows), "at least one row")
        decoded_fields = {
            "workload": data["workload"].convert(parse),
            "seed": data["seed"].decode_integer(0),
            "rows": rows,
        }
        decoded_fields |= {name: data[name].decode_line() for name in ("device", "device_name")}
        result: Result = data.decode(cls, provided_fields=decoded_fields)
        for peak in map(data.get, ("peak_flops", "peak_bandwidth", "peak_clock")):  # older files lack them
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
