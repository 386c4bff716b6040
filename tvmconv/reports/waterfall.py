"""The knob waterfall as a table: the effect of each knob from the default config to the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tvmconv.analysis.waterfall import WaterfallStep
from tvmconv.kernel import Kernel
from tvmconv.logs.record import Record
from tvmconv.reports.tables import Columns, Table, TableFormatter, format_micros, format_significant, make_table
from tvmconv.space import Config, format_value

LEGEND = (
    "Each line includes the knobs of all lines above it. Estimate: the time of the slowest unit, counted from the "
    "code; × is the speed-up over the line above. Measured: the log's time of exactly that config. Wavefronts and "
    "sectors are those of the whole kernel."
)


def make_time_lookup(records: Iterable[Record], schedule: str) -> Callable[[Config], float | None]:
    """Return a function from a config to its fastest seconds in the records of a schedule, or to None. The records are
    those of one workload on one device.
    """
    seconds_by_config: dict[tuple[tuple[str, object], ...], float] = {}
    for record in records:
        if record.ok and record.schedule == schedule:
            key = _make_config_key(record.config)
            seconds_by_config[key] = min(record.cost, seconds_by_config.get(key, record.cost))
    return lambda config: seconds_by_config.get(_make_config_key(config))


def _make_config_key(config: Config) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(config.items(), key=lambda item: item[0]))


def format_changes(step: WaterfallStep) -> str:
    """Return the changed knobs of a step, "tile_f=-1,1,8,2"; the first step is the default config."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in step.knobs) or "the default config"


def format_waterfall(
    best: Kernel, steps: Sequence[WaterfallStep], formatter: TableFormatter = Table.format_text
) -> str:
    """Return the table with a heading and a legend, for a terminal; `formatter` returns the table as text."""
    heading = f"{best.workload} by {best.schedule.name} on {best.device.text}, one knob at a time"
    return "\n".join([heading, "", formatter(make_waterfall_table(steps)), "", LEGEND])


def make_waterfall_table(steps: Sequence[WaterfallStep]) -> Table:
    """Return a table with one row per config, from the default to the best."""
    columns: Columns = {
        "knob": lambda pair: format_changes(pair[1]),
        "estimate [µs]": lambda pair: format_micros(pair[1].seconds),
        "× line above": lambda pair: format_significant(pair[0].seconds / pair[1].seconds) if pair[0] else "",
        "bound by": lambda pair: pair[1].unit,
        "measured [µs]": lambda pair: format_micros(pair[1].measured_seconds or None),
        "occupancy": lambda pair: f"{pair[1].occupancy:.0%}",
        "registers": lambda pair: str(pair[1].registers),
        "wavefronts": lambda pair: f"{pair[1].wavefronts:,}",
        "sectors": lambda pair: f"{pair[1].sectors:,}",
    }
    return make_table(zip([None, *steps], steps, strict=False), columns, {"knob", "bound by"})
